"""Arguments that TRL's trainers share, with TRL's names and defaults, based on burnish's ``TrainingArguments``.

Raises the same errors as TRL, with messages that scripts and tests expect. Earlier names are accepted with one warning.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from burnish.config.options import option
from burnish.parallel.precision import has_fast_bfloat16
from burnish.parallel.selection import device_of
from burnish.trainer import notes
from burnish.trainer.arguments.training import AcceptsOldNames, TrainingArguments, for_argument_parser
from burnish.trainer.arguments.values import dictionary_of


class _AcceptsOldNames(AcceptsOldNames):
    """Replaces earlier names before any ``__init__`` runs, and refuses those without a current equivalent."""

    renamed: Mapping[str, str] = {}  # earlier name of a field -> current name
    without_effect: Mapping[str, str] = {}  # earlier field -> the reason why it has no effect
    refused: Mapping[str, str] = {}  # earlier field -> the remedy

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        for name in [name for name in kwargs if name in cls.renamed]:
            notes.warn(f"`{name}` is deprecated. Use `{cls.renamed[name]}` instead.", FutureWarning)
            kwargs.setdefault(cls.renamed[name], kwargs.pop(name))
        for name in [name for name in kwargs if name in cls.without_effect]:
            if kwargs.pop(name) is not None:
                notes.warn(f"`{name}` has no effect: {cls.without_effect[name]}", FutureWarning)
        for name in [name for name in kwargs if name in cls.refused]:
            raise ValueError(f"`{name}` was removed from {cls.__name__}. {cls.refused[name]}")
        return super().__call__(*args, **kwargs)


@dataclass
class TrlArguments(TrainingArguments, metaclass=_AcceptsOldNames):
    """Fields of all TRL configs in addition to ``TrainingArguments``."""

    # --- defaults that differ from those of TrainingArguments
    logging_steps: float = 10
    gradient_checkpointing: bool = option(True, "Recompute activations in the backward pass to save memory.")
    bf16: bool | None = option(  # type: ignore[assignment]
        None,
        "Mixed precision training in bfloat16. Default: on if the device supports fast bfloat16 matrix multiplication.",
    )

    # --- the model
    model_init_kwargs: dict[str, Any] | str | None = option(
        None, "Arguments of from_pretrained, if the model is given by name."
    )
    trust_remote_code: bool = option(
        False, "Run Python code that comes with the model. Enable only for models that you trust."
    )
    router_aux_loss_coef: float | None = option(
        None, "Weight of the load-balancing loss of a mixture of experts. Default: as in the model's config.", ge=0
    )
    chat_template_path: str | None = option(None, "Jinja file, or a tokenizer whose chat template is used.")

    # --- the data
    dataset_num_proc: int | None = option(None, "Number of processes for dataset preparation.", ge=1)
    eos_token: str | None = option(None, "EOS token. Default: the tokenizer's.")
    pad_token: str | None = option(None, "Padding token. Deprecated: set tokenizer.pad_token.")
    max_length: int | None = option(1024, "Maximum sequence length in tokens.", unit="tokens", ge=1)
    truncation_mode: str = option(
        "keep_start", "Which end of a sequence longer than max_length is kept.", choices=("keep_start", "keep_end")
    )
    padding_free: bool = option(False, "Concatenate the sequences of a micro-batch instead of padding them.")
    pad_to_multiple_of: int | str | None = option(
        "auto",
        "Pad sequences to a multiple of this value. auto: pad to the longest sequence of the batch.",
        unit="tokens",
        ge=1,
    )
    activation_offloading: bool = option(False, "Offload activations to CPU memory until the backward pass.")

    def __post_init__(self) -> None:
        if self.activation_checkpointing is None:  # set here, so that the default of the earlier name gives no warning
            self.activation_checkpointing = self.gradient_checkpointing
        if self.activation_checkpointing_kwargs is None:
            self.activation_checkpointing_kwargs = self.gradient_checkpointing_kwargs
        if self.bf16 is None:
            kind = device_of(self).type  # where float32 is faster, bfloat16 would cost time and precision
            is_fast = torch.cuda.is_bf16_supported() if kind == "cuda" else kind != "cpu" or has_fast_bfloat16()
            self.bf16 = not self.fp16 and is_fast
        if isinstance(multiple := self.pad_to_multiple_of, str):
            self.pad_to_multiple_of = None if multiple.lower() in ("auto", "none", "null") else int(multiple)
        self._convert_old_values()
        super().__post_init__()

    def _read_json_texts(self) -> None:
        super()._read_json_texts()
        for name in ("model_init_kwargs", "dataset_kwargs", "generation_kwargs", "chat_template_kwargs"):
            value = getattr(self, name, None)
            if isinstance(value, str):
                setattr(self, name, dictionary_of(name, value))

    def _convert_old_values(self) -> None:
        if self.pad_token is not None:
            self._warn("`pad_token` is deprecated: set `tokenizer.pad_token`, and pass the tokenizer as "
                       "`processing_class`.")  # fmt: skip
        if self.truncation_mode == "keep_end":
            self._warn('`truncation_mode="keep_end"` is deprecated in TRL: it removes the beginning of a long example, '
                       "including the prompt.")  # fmt: skip

    def _warn(self, message: str) -> None:
        notes.warn(message, FutureWarning)

    def to_dict(self) -> dict[str, Any]:
        """Every argument as plain data, including eos_token and pad_token, which are not secrets despite their
        suffix."""
        return {**super().to_dict(), "eos_token": self.eos_token, "pad_token": self.pad_token}


for_argument_parser(TrlArguments)
