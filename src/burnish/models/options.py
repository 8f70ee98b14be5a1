"""The options of the model and of its tokenizer. Names and meanings are LLaMA-Factory's and transformers'."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from burnish.config.checks import check, notes
from burnish.config.errors import Problem
from burnish.config.options import option


@dataclass
class ModelOptions:
    """Model, and how it is loaded."""

    model_name_or_path: str | None = option(
        None,
        "The model: a local folder, or an id on the Hugging Face hub; on ModelScope's with USE_MODELSCOPE_HUB=1.",
        names_place=True,
    )
    adapter_name_or_path: list[str] | None = option(
        None,
        "Adapters to begin with, folders or hub ids: merged in order, the last goes on training.",
        names_place=True,
    )
    model_revision: str = option("main", "Branch, tag or commit of the model on the hub.")
    cache_dir: str | None = option(
        None, "Where models and data sets from a hub are kept; the hub's own place if not given.", names_place=True
    )
    hf_hub_token: str | None = option(
        None, "The token for private models and data sets on the Hugging Face hub.", is_secret=True
    )
    ms_hub_token: str | None = option(None, "The token for private models and data sets on ModelScope.", is_secret=True)
    trust_remote_code: bool = option(
        False,
        "Run Python code that comes with the model. It can do anything you can.",
        risky="it runs code that a model brings",
    )
    train_from_scratch: bool = option(False, "Start from random weights, drawn with seed; only the config is read.")
    use_fast_tokenizer: bool = option(
        True, "Use the tokenizer written in Rust.", ignored="transformers 5 always uses it"
    )
    add_tokens: list[str] | None = option(None, "New tokens for the tokenizer; implies resize_vocab.")
    add_special_tokens: list[str] | None = option(
        None, "New special tokens for the tokenizer, never split and not part of text; implies resize_vocab.",
        aliases=("new_special_tokens", "additional_special_tokens"),
    )  # fmt: skip
    new_special_tokens_config: str | dict[str, Any] | None = option(
        None, "New special tokens with what each stands for, in words: a YAML or JSON file, {<token>: <description>}; "
        "implies resize_vocab.", names_place=True,
    )  # fmt: skip
    init_special_tokens: str = option(
        "noise_init", "How the rows of those begin: around the mean of all rows, or as the mean of the rows of the "
        "words that describe them, with noise or without.", choices=("noise_init", "desc_init", "desc_init_w_noise"),
    )  # fmt: skip
    resize_vocab: bool = option(False, "Grow the embedding where the tokenizer has more tokens than it has rows.")
    flash_attn: str = option(
        "auto", "How attention is computed; auto leaves the choice to the model.",
        choices=("auto", "disabled", "sdpa", "fa2", "fa3"),
    )  # fmt: skip
    attn_implementation: str | None = option(
        None,
        "The same by transformers' name, or a kernel of the hub: kernels-community/flash-attn2, with kernels.",
        risky="another name is that of a kernel on the hub, which is code",
        harmless=("eager", "sdpa", "flex_attention", "flash_attention_2", "flash_attention_3", "flash_attention_4"),
    )
    rope_scaling: str | None = option(
        None, "Stretch rotary positions where cutoff_len is beyond the model's context.",
        choices=("linear", "dynamic", "yarn", "llama3"),
    )  # fmt: skip
    upcast_layernorm: bool = option(False, "Keep the weights of norms in float32.")
    use_cache: bool = option(False, "Keep keys and values in the forward passes of training, which do not need them.")
    low_cpu_mem_usage: bool = option(
        True, "Load without a second copy in memory.", ignored="transformers 5 always loads so"
    )


@check
def check_new_tokens(options: ModelOptions) -> list[Problem]:
    problems = []
    if options.init_special_tokens != "noise_init" and not options.new_special_tokens_config:
        what = f'"init_special_tokens" is {options.init_special_tokens}, and no token is described.'
        problems.append(
            Problem(
                what,
                remedy="Describe them in new_special_tokens_config: {<token>: <description>}.",
                option="init_special_tokens",
            )
        )
    if options.add_special_tokens and options.new_special_tokens_config:
        what = '"add_special_tokens" and "new_special_tokens_config" both name new special tokens.'
        problems.append(
            Problem(
                what,
                remedy="Name all of them in new_special_tokens_config.",
                option=("add_special_tokens", "new_special_tokens_config"),
            )
        )
    return problems


class NormChoices(Protocol):
    """The options read here."""

    pure_bf16: bool
    upcast_layernorm: bool


@check
def check_norms(options: NormChoices) -> list[Problem]:
    if not (options.upcast_layernorm and options.pure_bf16):
        return []
    what = '"upcast_layernorm" holds norms in float32, and "pure_bf16" holds every weight in bfloat16.'
    return [
        Problem(
            what,
            remedy="Set bf16: true instead of pure_bf16, or leave upcast_layernorm out.",
            option=("upcast_layernorm", "pure_bf16"),
        )
    ]


@notes
def remote_code_notes(options: ModelOptions) -> list[str]:
    """Say that code of other people runs, in the log of every run in which it may."""
    if not options.trust_remote_code:
        return []
    return [f"trust_remote_code: Python code that comes with {options.model_name_or_path} may run, as you."]


@notes
def new_tokens_notes(options: ModelOptions) -> list[str]:
    if not options.new_special_tokens_config or options.init_special_tokens != "noise_init":
        return []
    return ["The descriptions in new_special_tokens_config have no effect without init_special_tokens: desc_init."]
