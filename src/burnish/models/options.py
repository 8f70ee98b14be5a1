"""Options of the model and its tokenizer. Names and semantics are LLaMA-Factory's and transformers'."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from burnish.config.checks import check, notes
from burnish.config.errors import Problem
from burnish.config.options import option
from burnish.parallel.options import ParallelOptions


@dataclass(frozen=True)
class ModelNames:
    """The options that a model is given by, for error messages.

    Args:
        model: the option for its name or folder.
        adapters: the option for its adapters.
        quantization: the option that quantizes it.
        is_trained: whether it is trained, so that ``finetuning_type`` and ``train_from_scratch`` apply to it.
    """

    model: str = "model_name_or_path"
    adapters: str = "adapter_name_or_path"
    quantization: str = "quantization_bit"
    is_trained: bool = True


TRAINED_MODEL, USED_MODEL = ModelNames(), ModelNames(is_trained=False)
REFERENCE_MODEL = ModelNames("ref_model", "ref_model_adapters", "ref_model_quantization_bit", is_trained=False)
REWARD_MODEL = ModelNames("reward_model", "reward_model_adapters", "reward_model_quantization_bit", is_trained=False)


@dataclass
class ModelOptions:
    """Model and tokenizer."""

    model_name_or_path: str | None = option(
        None,
        "Base model: a local folder or a model ID on the Hugging Face Hub (on ModelScope with USE_MODELSCOPE_HUB=1).",
        names_place=True,
    )
    adapter_name_or_path: list[str] | None = option(
        None,
        "Adapters to start from (folders or IDs on the Hub). All but the last are merged; the last is trained further.",
        names_place=True,
    )
    model_revision: str = option("main", "Branch, tag or commit of the model on the Hub.")
    cache_dir: str | None = option(
        None, "Folder for downloaded models and datasets. Default: the cache of the Hub's library.", names_place=True
    )
    hf_hub_token: str | None = option(
        None, "Access token for private models and datasets on the Hugging Face Hub.", is_secret=True
    )
    ms_hub_token: str | None = option(
        None, "Access token for private models and datasets on ModelScope.", is_secret=True
    )
    trust_remote_code: bool = option(
        False,
        "Run Python code that comes with the model. Enable only for models that you trust.",
        risky="it runs code that comes with a model",
    )
    train_from_scratch: bool = option(
        False, "Initialize the weights randomly (with seed); only the model's config is read."
    )
    use_fast_tokenizer: bool = option(
        True, "Use the fast tokenizer, written in Rust.", ignored="transformers 5 always uses it"
    )
    add_tokens: list[str] | None = option(None, "New tokens to add to the tokenizer. Implies resize_vocab.")
    add_special_tokens: list[str] | None = option(
        None, "New special tokens to add to the tokenizer; they are never split. Implies resize_vocab.",
        aliases=("new_special_tokens", "additional_special_tokens"),
    )  # fmt: skip
    new_special_tokens_config: str | dict[str, Any] | None = option(
        None,
        "YAML or JSON file with new special tokens and their descriptions: {<token>: <description>}. "
        "Implies resize_vocab.", names_place=True,
    )  # fmt: skip
    init_special_tokens: str = option(
        "noise_init",
        "Initialization of the embeddings of new special tokens: noise around the mean embedding (noise_init), or the "
        "mean embedding of the words in their descriptions, without noise (desc_init) or with noise "
        "(desc_init_w_noise).",
        choices=("noise_init", "desc_init", "desc_init_w_noise"),
    )  # fmt: skip
    resize_vocab: bool = option(False, "Resize the embedding if it has fewer rows than the tokenizer has tokens.")
    flash_attn: str = option(
        "auto",
        "Attention implementation, named as in LLaMA-Factory. auto: the model's default, which is also used if the "
        "implementation is not available.",
        choices=("auto", "disabled", "sdpa", "fa2", "fa3", "fa4"),
    )  # fmt: skip
    attn_implementation: str | None = option(
        None,
        "Attention implementation, named as in transformers, or a kernel from the Hub such as "
        "kernels-community/flash-attn2 (requires the library kernels).",
        risky="other names download and run a kernel from the Hub",
        harmless=("eager", "sdpa", "flex_attention", "flash_attention_2", "flash_attention_3", "flash_attention_4"),
    )
    rope_scaling: str | None = option(
        None, "RoPE scaling method for a cutoff_len beyond the model's context length.",
        choices=("linear", "dynamic", "yarn", "llama3"),
    )  # fmt: skip
    upcast_layernorm: bool = option(False, "Keep the weights of normalization layers in float32.")
    use_cache: bool = option(
        False, "Return the key-value cache from forward passes in training. Training does not use it."
    )
    low_cpu_mem_usage: bool = option(
        True,
        "Load the model without a second copy of its weights in memory.",
        ignored="transformers 5 always does this",
    )


@check
def check_new_tokens(options: ModelOptions) -> Iterator[Problem]:
    if options.init_special_tokens != "noise_init" and not options.new_special_tokens_config:
        what = f'"init_special_tokens" is {options.init_special_tokens}, but no token has a description.'
        yield Problem(
            what,
            remedy="Describe them in new_special_tokens_config: {<token>: <description>}.",
            option="init_special_tokens",
        )
    if options.add_special_tokens and options.new_special_tokens_config:
        what = '"add_special_tokens" and "new_special_tokens_config" both name new special tokens.'
        yield Problem(
            what,
            remedy="List all of them in new_special_tokens_config.",
            option=("add_special_tokens", "new_special_tokens_config"),
        )


class NormChoices(ParallelOptions, ModelOptions):
    """Options that this module reads."""


@check
def check_norms(options: NormChoices) -> Iterator[Problem]:
    if not (options.upcast_layernorm and options.pure_bf16):
        return
    what = '"upcast_layernorm" keeps norms in float32, but "pure_bf16" keeps all weights in bfloat16.'
    yield Problem(
        what,
        remedy="Set bf16: true instead of pure_bf16, or remove upcast_layernorm.",
        option=("upcast_layernorm", "pure_bf16"),
    )


@notes
def remote_code_notes(options: ModelOptions) -> Iterator[str]:
    """Log that custom code of the model may run."""
    if not options.trust_remote_code or _has_no_code(options.model_name_or_path):
        return
    yield f"trust_remote_code: Python code that comes with {options.model_name_or_path} may run with your permissions."


def _has_no_code(name: str | None) -> bool:
    """Return whether a model is a local folder whose configs refer to no custom code (``auto_map``)."""
    folder = Path(name or "").expanduser()
    if not name or not folder.is_dir():
        return False
    try:
        return not any(b'"auto_map"' in path.read_bytes() for path in folder.glob("*config.json"))
    except OSError:
        return False


@notes
def new_tokens_notes(options: ModelOptions) -> Iterator[str]:
    if not options.new_special_tokens_config or options.init_special_tokens != "noise_init":
        return
    yield "The descriptions in new_special_tokens_config have no effect without init_special_tokens: desc_init."
