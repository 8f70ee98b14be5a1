"""8-bit or 4-bit weights of the base model while an adapter is trained (QLoRA, Dettmers et al. 2023,
https://arxiv.org/abs/2305.14314).

In:  ``quantization_bit`` and related options. Out: arguments for transformers, with which bitsandbytes quantizes linear
layers while the weights are loaded, on a CPU as well.
Refuses: training of quantized weights; decomposing them (PiSSA); other methods of quantizing while loading; a missing
library.

Models whose files are quantized (GPTQ, AWQ) are loaded by transformers if the library of their method is installed.
Both were trained on a CPU with gptqmodel 7.7, optimum 2.3 and transformers 5.23 (tests/models/test_quantized_files.py);
neither was tested on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, cast

import torch
from torch import nn

from burnish.config.checks import check, notes
from burnish.config.errors import MissingExtraError, Problem
from burnish.config.options import changed_options, ineffective_option_notes, option, raise_if
from burnish.models.options import TRAINED_MODEL, ModelNames, ModelOptions
from burnish.utils.patching import Reason, patch

EXTRA = "quantization"
LIBRARY_OF = {"gptq": ("gptqmodel", "optimum"), "awq": ("gptqmodel",), "bitsandbytes": ("bitsandbytes",),
              "aqlm": ("aqlm",), "hqq": ("hqq",), "eetq": ("eetq",)}  # fmt: skip
"""Method of quantized files -> the libraries that transformers requires to read them."""


@dataclass
class QuantizationOptions:
    """Quantization of the base model."""

    quantization_bit: int | None = option(
        None, "Number of bits to quantize the linear layers of the base model to.", choices=(4, 8), unit="bits"
    )
    quantization_method: str = option(
        "bnb", "Library that quantizes the model on load. bnb: bitsandbytes.", choices=lambda: METHODS
    )
    quantization_type: str = option("nf4", "Data type of 4-bit quantization.", choices=("nf4", "fp4"))
    double_quantization: bool = option(True, "Quantize the quantization constants as well (4-bit only).")
    quantization_device_map: str | None = option(
        None, "Placement of the layers of a quantized model.",
        ignored="a quantized model is loaded directly onto the device on which it is trained",
    )  # fmt: skip


class QuantizationChoices(ModelOptions, QuantizationOptions):
    """Options that select what is quantized."""

    create_new_adapter: bool
    finetuning_type: str
    pissa_init: bool


@check
def check_quantization(options: QuantizationChoices) -> Iterator[Problem]:
    if options.quantization_bit is None:
        return
    if find_spec("bitsandbytes") is None:
        yield from MissingExtraError("bitsandbytes", '"quantization_bit"', EXTRA, option="quantization_bit").problems
    if options.finetuning_type in ("full", "freeze"):
        what = (
            f'"quantization_bit" {options.quantization_bit} makes the weights untrainable, but '
            f'"finetuning_type" is {options.finetuning_type}.'
        )
        yield Problem(
            what,
            remedy="Set finetuning_type: lora, or remove quantization_bit.",
            option=("quantization_bit", "finetuning_type"),
        )
    folders = options.adapter_name_or_path or []
    if len(folders) > 1 or (folders and options.create_new_adapter):
        yield Problem(
            '"adapter_name_or_path" names adapters that would be merged into a base model with '
            f'"quantization_bit" {options.quantization_bit}: rounding would discard the update.',
            remedy="Merge them first: burnish export without quantization_bit. Then train on top of that model.",
            option=("adapter_name_or_path", "quantization_bit"),
        )
    if options.pissa_init:
        what = '"pissa_init" decomposes the base weights and cannot be combined with "quantization_bit".'
        yield Problem(what, remedy="Remove pissa_init or quantization_bit.", option=("pissa_init", "quantization_bit"))
    if options.train_from_scratch:
        yield Problem(
            '"quantization_bit" and "train_from_scratch" cannot be combined: random weights must be trained.',
            option=("quantization_bit", "train_from_scratch"),
        )


@notes
def quantization_notes(options: QuantizationOptions) -> list[str]:
    switches = dict.fromkeys(("quantization_type", "double_quantization"), "quantization_bit")
    notes = ineffective_option_notes(options, switches)
    if options.quantization_bit == 8:
        notes += [
            f'"{name}" has no effect: it applies to 4-bit quantization only.'
            for name in switches
            if name in changed_options(options)
        ]
    return notes


def quantization_arguments(
    options: ModelOptions, dtype: torch.dtype | str, config: Any, names: ModelNames
) -> dict[str, Any]:
    """Additional arguments of ``from_pretrained``; empty without quantization.

    Args:
        options: the options of the model.
        dtype: dtype of weights that are not quantized, and of computation; "auto" for that of the files.
        config: config of the model.
        names: the options that the model is given by.

    Raises:
        UserError: if the files contain quantized weights that cannot be read here.
    """
    if getattr(options, "quantization_bit", None) is None:  # a Python caller may pass ModelOptions only
        return {}
    raise_if(check_quantized_files(options, config, names))
    wanted = dtype if isinstance(dtype, torch.dtype) else config.dtype or torch.float32
    choices = cast(QuantizationOptions, options)
    return {"quantization_config": METHODS[choices.quantization_method](choices, wanted)}


def _bitsandbytes(options: QuantizationOptions, compute_dtype: torch.dtype) -> Any:
    from transformers import BitsAndBytesConfig

    if options.quantization_bit == 8:
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_compute_dtype=compute_dtype,
        bnb_4bit_use_double_quant=options.double_quantization,
        bnb_4bit_quant_type=options.quantization_type,
    )


METHODS: dict[str, Callable[[Any, torch.dtype], Any]] = {"bnb": _bitsandbytes, "bitsandbytes": _bitsandbytes}
"""Method of quantizing while loading -> its config for transformers."""


def quantization_method_of(config: Any) -> str:
    """The quantization method of a model's files ("gptq", "awq", ...), or "".

    Args:
        config: config of transformers, or its JSON data.
    """
    described = _entry(config, "quantization_config")
    if described is None:
        return ""
    found = _entry(described, "quant_method")
    return str(getattr(found, "value", found) or "an unnamed method")


PLAIN_KERNEL = {"gptq": "gptq_torch", "awq": "torch_awq"}
"""Method of quantized files -> transformers' name of the kernel in plain torch, available on every device."""


def use_kernels_that_train(config: Any, device: torch.device | str | None = None) -> str:
    """Make the library of GPTQ and AWQ use a kernel with a backward pass, unless the model selects a kernel.

    "auto" selects the fastest, which may have none. transformers documents "auto_trainable" for this, and peft uses it,
    but on a CPU it would compile a kernel for minutes (gptqmodel 7.7).

    Args:
        config: config of the model; changed in place.
        device: device of the model. Default: CPU.

    Returns:
        A note for the user, or "".
    """
    described, method = _entry(config, "quantization_config"), quantization_method_of(config)
    if method not in PLAIN_KERNEL or _entry(described, "backend") not in (None, "auto", "autoawq"):
        return ""
    is_cpu = torch.device(device or "cpu").type == "cpu"
    chosen = PLAIN_KERNEL[method] if is_cpu else "auto_trainable"
    if isinstance(described, dict):
        described["backend"] = chosen
    else:
        described.backend = chosen
    return f"On a CPU, {method}-quantized weights use the kernel {chosen}." if is_cpu else ""


def _entry(holder: Any, name: str) -> Any:
    return holder.get(name) if isinstance(holder, dict) else getattr(holder, name, None)


def quantization_of(options: QuantizationOptions, config: Any) -> str:
    """The quantization of the weights in memory ("4 bits", "gptq"), or ""."""
    return f"{options.quantization_bit} bits" if options.quantization_bit else quantization_method_of(config)


def check_quantized_files(options: ModelOptions, config: Any, names: ModelNames = TRAINED_MODEL) -> Iterator[Problem]:
    """Yield problems that prevent loading a model with quantized files."""
    method = quantization_method_of(config)
    if not method:
        return
    where = str(options.model_name_or_path)
    missing = [name for name in LIBRARY_OF.get(method, ()) if find_spec(name) is None]
    if missing:
        yield Problem(
            f"its weights are quantized with {method}, which requires the library {' and '.join(missing)}.",
            where=where,
            remedy=f"Install it with: pip install {' '.join(missing)}; or use the unquantized model.",
        )
    trained = getattr(options, "finetuning_type", "lora")
    if names.is_trained and trained in ("full", "freeze"):
        what = f'its weights are quantized with {method} and cannot be trained; "finetuning_type" is {trained}.'
        yield Problem(
            what,
            where=where,
            remedy="Set finetuning_type: lora, or use the unquantized model.",
            option="finetuning_type",
        )
    if getattr(options, "quantization_bit", None) is not None:
        what = f'its weights are quantized already ({method}), so "{names.quantization}" cannot quantize them.'
        remedy = f"Remove {names.quantization}."
        yield Problem(what, where=where, remedy=remedy, option=names.quantization)


UNTOUCHED = Reason("4-bit layer", "evaluation does not change its weights")


def keep_as_loaded(model: nn.Module) -> None:
    """Prevent evaluation from changing quantized weights.

    On a CPU with AVX512-BF16, bitsandbytes (0.49 to 0.50) converts 4-bit weights to another layout at the first product
    outside of training. This rounds their scales to bfloat16 and has no backward pass, so an evaluation would change
    the following training (bitsandbytes/nn/modules.py, Linear4bit.forward).
    """
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            patch(module, "support_avx512bf16_for_cpu", False, UNTOUCHED)
