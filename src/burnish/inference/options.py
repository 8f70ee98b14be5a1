"""The options of answering: which engine, how much at once, which adapters. Names of other engines' settings are
LLaMA-Factory's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from burnish.config.checks import check, notes
from burnish.config.errors import Problem
from burnish.config.options import option, set_without

if TYPE_CHECKING:
    from burnish.adapters.base import FinetuningOptions
    from burnish.data.chat.choose import TemplateOptions
    from burnish.data.chat.truncate import EncodingOptions
    from burnish.models.export import ExportOptions
    from burnish.models.generate import GenerationOptions
    from burnish.models.options import ModelOptions
    from burnish.models.quantization.quantize import QuantizationOptions
    from burnish.parallel.options import EngineOptions


@dataclass
class InferOptions:
    """Engine of answers, and its limits."""

    infer_backend: str = option(
        "huggingface", "Inference engine: burnish's own, in this process (huggingface), or a vLLM or SGLang "
        "server that is started for it.", choices=("huggingface", "vllm", "sglang"),
    )  # fmt: skip
    infer_url: str | None = option(
        None,
        "A running server that answers in place of this process; its key is read from INFER_KEY.",
        risky="it sends texts to another machine",
    )
    infer_executable: str | None = option(
        None,
        "The program that starts vLLM or SGLang, which may lie in another environment; its name if not given.",
        names_place=True,
        risky="it names a program",
    )
    infer_seats: int | None = option(
        None, "Answers at once; by default 8 on a CPU, and on a GPU what fits, at most 64.", ge=1
    )
    infer_context: int | None = option(
        None, "The longest prompt and answer together; by default the model's, at most 8,192.", unit="tokens", ge=2
    )
    infer_exact: bool = option(
        False, "Compute each answer alone, so that the same seed gives the same tokens whatever else is answered."
    )
    served_adapters: dict[str, str] | None = option(
        None, "Adapters beside the model, each a model of its own name: {name: folder}.", names_place=True
    )
    vllm_maxlen: int = option(4096, "The longest prompt and answer of vLLM.", unit="tokens", ge=2)
    vllm_gpu_util: float = option(0.7, "The share of the GPU's memory that vLLM takes.", gt=0, le=1)
    vllm_enforce_eager: bool = option(False, "vLLM without CUDA graphs.")
    vllm_max_lora_rank: int = option(32, "The highest rank of an adapter that vLLM takes.", ge=1)
    vllm_config: dict[str, Any] | str | None = option(
        None, "More of vLLM's settings.", names_place=True, risky="it holds arguments of another program"
    )
    sglang_maxlen: int = option(4096, "The longest prompt and answer of SGLang.", unit="tokens", ge=2)
    sglang_mem_fraction: float = option(0.7, "The share of the GPU's memory that SGLang takes.", gt=0, le=1)
    sglang_tp_size: int = option(-1, "GPUs over which SGLang cuts the model; -1 for all.")
    sglang_config: dict[str, Any] | str | None = option(
        None, "More of SGLang's settings.", names_place=True, risky="it holds arguments of another program"
    )


if TYPE_CHECKING:

    @dataclass
    class AnsweringOptions(
        ModelOptions, QuantizationOptions, FinetuningOptions, TemplateOptions, EncodingOptions, GenerationOptions,
        InferOptions, ExportOptions, EngineOptions,
    ):  # fmt: skip
        """The options that answers are made with, as a type checker sees them."""


@check
def check_infer(options: InferOptions) -> list[Problem]:
    if options.infer_url is None or options.infer_url.startswith(("http://", "https://")):
        return []
    what = f'"infer_url" begins with http:// or https://. Received: {options.infer_url}.'
    return [Problem(what, remedy="For a server on this machine: infer_url: http://127.0.0.1:8000", option="infer_url")]


@notes
def infer_notes(options: InferOptions) -> list[str]:
    """Names of options that were set for another engine than the one that answers."""
    notes = set_without(options, {"infer_executable": "infer_backend"})
    settings = [name for name in vars(options) if name.startswith(("vllm_", "sglang_"))]
    plain = InferOptions()
    for name in settings:
        library = name.partition("_")[0]
        if getattr(options, name) != getattr(plain, name) and options.infer_backend != library:
            notes.append(f'"{name}" has no effect without infer_backend: {library}.')
    return notes


def is_remote(options: InferOptions) -> bool:
    """Tell whether another process answers."""
    return options.infer_url is not None or options.infer_backend != "huggingface"
