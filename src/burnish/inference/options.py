"""Options of inference: engine, concurrency, adapters. Names of other engines' settings are LLaMA-Factory's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from burnish.config.checks import check, notes
from burnish.config.errors import Problem
from burnish.config.options import changed_options, option

if TYPE_CHECKING:
    from burnish.adapters.base import FinetuningOptions
    from burnish.data.chat.choose import TemplateOptions
    from burnish.data.chat.truncate import EncodingOptions
    from burnish.data.images.options import ImageOptions
    from burnish.models.export import ExportOptions
    from burnish.models.generate import GenerationOptions
    from burnish.models.options import ModelOptions
    from burnish.models.quantization.quantize import QuantizationOptions
    from burnish.parallel.options import ParallelOptions

TRAINING_ONLY = ("train_on_prompt", "mask_history", "train_on_eos", "train_from_scratch", "upcast_layernorm",
                 "use_cache", "init_special_tokens", "new_special_tokens_config")  # fmt: skip
"""Options of the model and the template that only training reads."""


@dataclass
class InferOptions:
    """Inference engine."""

    infer_backend: str = option(
        "huggingface",
        "Inference backend: burnish's engine in this process (huggingface), or a vLLM or SGLang server "
        "started for the command.", choices=("huggingface", "vllm", "sglang"),
    )  # fmt: skip
    infer_url: str | None = option(
        None,
        "URL of a running OpenAI-compatible server to use instead. Its key is read from INFER_KEY.",
        risky="it sends text to another machine",
    )
    infer_executable: str | None = option(
        None,
        "Executable that starts vLLM or SGLang; it may belong to another environment. Default: the library's command.",
        names_place=True,
        risky="it specifies a program to run",
    )
    max_concurrent_requests: int | None = option(
        None,
        "Maximum number of concurrent requests. Default: 8 on a CPU; on a GPU, as many as fit into memory, at most 64.",
        ge=1,
        aliases=("infer_seats",),
    )
    infer_context: int | None = option(
        None,
        "Maximum length of prompt and response together, in tokens. Default: the model's context, at most 8,192.",
        unit="tokens",
        ge=2,
    )
    infer_exact: bool = option(
        False,
        "Compute each response separately, so that the same seed gives the same tokens regardless of other requests.",
    )
    served_adapters: dict[str, str] | None = option(
        None,
        "Adapters served alongside the base model, each under its own model name: {name: folder}.",
        names_place=True,
    )
    vllm_maxlen: int = option(4096, "Maximum sequence length of vLLM.", unit="tokens", ge=2)
    vllm_gpu_util: float = option(0.7, "Fraction of GPU memory that vLLM uses.", gt=0, le=1)
    vllm_enforce_eager: bool = option(False, "Disable CUDA graphs in vLLM.")
    vllm_max_lora_rank: int = option(32, "Maximum LoRA rank of vLLM.", ge=1)
    vllm_config: dict[str, Any] | str | None = option(
        None, "Additional vLLM settings.", names_place=True, risky="it passes arguments to another program"
    )
    sglang_maxlen: int = option(4096, "Maximum sequence length of SGLang.", unit="tokens", ge=2)
    sglang_mem_fraction: float = option(0.7, "Fraction of GPU memory that SGLang uses.", gt=0, le=1)
    sglang_tp_size: int = option(-1, "Tensor parallel size of SGLang. -1: all GPUs.")
    sglang_config: dict[str, Any] | str | None = option(
        None, "Additional SGLang settings.", names_place=True, risky="it passes arguments to another program"
    )


if TYPE_CHECKING:

    @dataclass
    class AnsweringOptions(
        ModelOptions, QuantizationOptions, FinetuningOptions, TemplateOptions, EncodingOptions, GenerationOptions,
        InferOptions, ExportOptions, ParallelOptions, ImageOptions,
    ):  # fmt: skip
        """Options used for inference, for type checkers."""


def is_server_url(url: str) -> bool:
    """Return whether ``url`` has the scheme http or https, a host, and a valid port or none."""
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # an incomplete IPv6 address, or a port that is not a number up to 65,535
        return False


@check
def check_infer(options: InferOptions) -> Iterator[Problem]:
    if options.infer_url is None or is_server_url(options.infer_url):
        return
    what = f'"infer_url" must be a URL with http:// or https://. Received: {options.infer_url}.'
    yield Problem(what, remedy="For a server on this machine: infer_url: http://127.0.0.1:8000", option="infer_url")


@notes
def infer_notes(options: InferOptions) -> list[str]:
    """Return notes on options that the selected engine does not read."""
    has_url, backend = options.infer_url is not None, options.infer_backend
    unread = [name for name in vars(options) if name.startswith(("vllm_", "sglang_"))]
    if not has_url:
        unread = [name for name in unread if not name.startswith(f"{backend}_")]
    unread += ["infer_backend"] if has_url else []
    unread += ["infer_executable"] if has_url or backend == "huggingface" else []
    unread += ["infer_context"] if is_remote(options) and not has_url else []
    unread += ["infer_exact"] if is_remote(options) else []
    engine, changed = "infer_url" if has_url else f"infer_backend: {backend}", changed_options(options)
    return [f'"{name}" has no effect with {engine}.' for name in unread if name in changed]


def is_remote(options: InferOptions) -> bool:
    """Return whether another process runs the model."""
    return options.infer_url is not None or options.infer_backend != "huggingface"
