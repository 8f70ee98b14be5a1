"""Any method of the peft library, through peft itself: prompt tuning, IA3, OFT, ...

In:  peft's config, as a mapping with ``peft_type`` and the method's own fields, as a JSON file, or as a folder with an
``adapter_config.json``; from Python also a ``PeftConfig`` or a model that is already wrapped by peft. OFT may also be
configured with LLaMA-Factory's keys.
Out: peft's wrapper of the model; peft's files.
Refuses: methods and fields unknown to the installed peft.

Other modules import peft's methods only through this one: the import takes seconds, so it happens when such an adapter
is checked or attached.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from burnish.adapters.base import (
    ADAPTERS,
    FinetuningOptions,
    is_frozen,
    part_problems,
    raise_unless_same_tensors,
)
from burnish.adapters.chain import incomplete_chain_notes, write_merged
from burnish.adapters.lora_fit import CONFIG_NAME, read_weights_header
from burnish.adapters.lora_model import find_targets, shortest_names
from burnish.config.checks import check
from burnish.config.errors import Problem, UserError, did_you_mean, first_line, is_out_of_memory
from burnish.config.options import option, raise_if
from burnish.utils.files import absolute_if_local, check_texts_below_roots
from burnish.utils.json_files import quote_value, read_object


@dataclass
class PeftOptions:
    """Methods of the peft library."""

    peft_config: dict[str, Any] | str | None = option(
        None,
        "Config of any method of the peft library: a mapping with peft_type, or a file or folder that contains one.",
        names_place=True,
    )


@ADAPTERS.register("peft", options=PeftOptions, is_of_peft=True)
class PeftAdapter:
    """Trains an adapter of the peft library. The model itself is frozen."""

    saves_whole_model = False
    file_stem = "peft_state"  # names as in memory: peft's own file omits what some methods need to resume exactly

    def __init__(self, options: PeftOptions, folders: Sequence[Path] = ()) -> None:
        self.options, self.folders = options, list(folders)
        self.notes: list[str] = []
        self._base: set[int] = set()

    def check(self, model: nn.Module) -> list[Problem]:
        if is_peft_model(model) or self.folders:
            return [problem for folder in self.folders for problem in folder_problems(folder)]
        try:
            self._config(model)
        except UserError as error:
            return list(error.problems)
        return []

    def attach(self, model: nn.Module) -> nn.Module:
        if is_peft_model(model):
            self._base = {id(p) for p in model.state_dict(keep_vars=True).values() if not p.requires_grad}
            return model
        from peft import get_peft_model

        self.notes += incomplete_chain_notes(self.folders)
        model = merge_folders(model, self.folders[:-1])
        self.notes += [f"The adapter {folder} was merged." for folder in self.folders[:-1]]
        self._base = {id(tensor) for tensor in model.state_dict(keep_vars=True).values()}
        if self.folders:
            return self._continue_adapter(model, str(self.folders[-1]))
        config = self._config(model)
        try:
            wrapped: nn.Module = get_peft_model(model, config)
        except _REJECTIONS as error:
            if is_out_of_memory(error):
                raise
            what = f"peft_config cannot be applied to this model: {type(error).__name__}: {first_line(error)}"
            raise UserError(what, option="peft_config") from error
        if isinstance(self.options.peft_config, dict | str) and getattr(config, "orth_reg_weight", None):
            self.notes.append(
                "AdaLoRA trains with the rank init_r throughout, and without its orthogonality penalty. In a script, "
                "Trainer adds the penalty, and a callback can reduce the ranks with update_and_allocate."
            )
        return wrapped

    def _continue_adapter(self, model: nn.Module, folder: str) -> nn.Module:
        """Load the adapter in ``folder`` to train it further. peft saves and loads a trained prompt as an embedding
        table for inference. That table is trained further, even if a network computed it before.
        """
        is_prompt = _config_in(Path(folder)).is_prompt_learning
        wrapped: nn.Module = _load_peft_model(model, Path(folder), is_trainable=not is_prompt)
        if is_prompt:
            wrapped.prompt_encoder.requires_grad_(True)
            self.notes.append(f"The prompt of {folder} is loaded as trainable embeddings.")
        return wrapped

    def reference(self, model: nn.Module) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = model.disable_adapter()  # type: ignore[operator]
        return context

    def state(self, model: nn.Module) -> dict[str, Tensor]:
        return {name: t for name, t in model.state_dict(keep_vars=True).items() if id(t) not in self._base}

    def load_state(self, model: nn.Module, state: Mapping[str, Tensor]) -> None:
        own = self.state(model)
        raise_unless_same_tensors(own, state, "the adapter's weights")
        with torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(state[name])

    def save(self, model: nn.Module, folder: str) -> None:
        name_base(model)
        model.save_pretrained(folder, safe_serialization=True)  # type: ignore[operator]
        write_merged(Path(folder), self.folders[:-1])

    def save_config(self, model: nn.Module, folder: str) -> None:
        self.save(model, folder)  # small; peft loads this file, not peft_state.safetensors

    def _config(self, model: nn.Module) -> Any:
        """The given or described ``PeftConfig``. Raises UserError if it is invalid."""
        from peft import PeftConfig

        raw_config: Any = self.options.peft_config  # the trainer passes an object
        if isinstance(raw_config, PeftConfig):
            return raw_config
        raw = dict(_raw_peft_config(raw_config))
        check_texts_below_roots(raw)
        kind = str(raw.pop("peft_type", "")).upper()
        known = _peft_config_classes()
        if kind not in known:
            what = f'peft_config: unknown peft_type "{kind}".{did_you_mean(kind, known)}'
            raise UserError(what, remedy=f"Available: {', '.join(sorted(known))}.", option="peft_config")
        try:
            return known[kind](**{"task_type": "CAUSAL_LM", **raw})
        except (TypeError, ValueError) as error:
            raise UserError(f"peft_config is not valid for {kind}: {error}.", option="peft_config") from error


_REJECTIONS = (
    ArithmeticError, AttributeError, LookupError, OSError, re.error, RuntimeError, TypeError, ValueError,
)  # fmt: skip
"""Errors that peft raises for a config or weights that do not suit the model. It checks few of the values."""


def changes_outputs(model: nn.Module) -> bool:
    """Whether a method of peft computes more than the wrapped model does: AdaLoRA, for example, adds to its loss."""
    from peft.tuners.tuners_utils import BaseTuner

    tuner = getattr(model, "base_model", None)
    return isinstance(tuner, BaseTuner) and type(tuner).forward is not BaseTuner.forward


@dataclass
class OftOptions:
    """OFT."""

    oft_block_size: int = option(
        32,
        "Size of the OFT blocks; for a layer whose input size it does not divide, the nearest size that does. "
        "0: determined by oft_rank.",
        ge=0,
    )
    oft_rank: int = option(0, "Number of OFT blocks per layer. 0: determined by oft_block_size.", ge=0)
    oft_target: list[str] = option(
        ["all"], "Modules to apply OFT to, by name. all: every linear layer except the LM head."
    )
    module_dropout: float = option(0.0, "Dropout probability of the OFT blocks.", ge=0, lt=1)


class OftChoices(FinetuningOptions, OftOptions):
    """Options of OFT."""


@check
def check_oft(options: OftChoices) -> Iterator[Problem]:
    if options.finetuning_type != "oft" or (options.oft_rank == 0) != (options.oft_block_size == 0):
        return
    what = (
        '"oft_rank" and "oft_block_size" cannot be combined: one of them must be 0. '
        f"Received: {options.oft_rank} and {options.oft_block_size}."
    )
    yield Problem(what, remedy="Remove oft_rank, or set oft_block_size: 0.", option=("oft_rank", "oft_block_size"))


@ADAPTERS.register("oft", options=OftOptions, is_of_peft=True)
class OftAdapter(PeftAdapter):
    """Trains small orthogonal matrices that rotate the inputs of layers (OFT, with peft)."""

    def __init__(self, options: OftChoices, folders: Sequence[Path] = ()) -> None:
        super().__init__(PeftOptions(), folders)
        self.oft = options

    def _config(self, model: nn.Module) -> Any:
        """Source: Qiu et al. 2023, https://arxiv.org/abs/2306.07280."""
        from peft import OFTConfig

        options, frozen = self.oft, is_frozen(model, self.oft)
        targets, missing = find_targets(model, options.oft_target, is_frozen=frozen, option="oft_target")
        raise_if([*missing, *part_problems(options, model)])
        return OFTConfig(
            task_type="CAUSAL_LM",
            r=options.oft_rank,
            oft_block_size=options.oft_block_size,
            module_dropout=options.module_dropout,
            target_modules=list(shortest_names(targets, model)),
        )


def merge_folders(model: nn.Module, folders: Sequence[Path]) -> nn.Module:
    """Merge the adapters in ``folders`` into the model, in order.

    Raises:
        UserError: for a method that cannot be merged.
    """
    for folder in folders:
        wrapped: Any = _load_peft_model(model, folder)
        if wrapped.active_peft_config.is_prompt_learning:
            what = "a trained prompt does not change the weights, so it cannot be merged."
            raise UserError(
                what, where=str(folder), remedy="Use it through peft: PeftModel.from_pretrained(model, folder)."
            )
        model = wrapped.merge_and_unload()
    return model


def folder_problems(folder: Path) -> list[Problem]:
    """Return problems of an adapter's files, of which only the config and the header of the weights are read."""
    try:
        _config_in(folder)
        read_weights_header(folder)
    except UserError as error:
        return list(error.problems)
    return []


def _load_peft_model(model: nn.Module, folder: Path, is_trainable: bool = False) -> Any:
    """The model with the adapter in ``folder``, in peft's wrapper. Raises UserError if its files cannot be used."""
    from peft import PeftModel

    raise_if(folder_problems(folder))
    try:
        return PeftModel.from_pretrained(model, str(folder), is_trainable=is_trainable)
    except _REJECTIONS as error:
        if is_out_of_memory(error):
            raise
        what = f"peft cannot load this adapter: {type(error).__name__}: {first_line(error).rstrip('.')}."
        raise UserError(
            what, where=str(folder), remedy="It may belong to a different base model, or be corrupted."
        ) from error


def _config_in(folder: Path) -> Any:
    """The ``PeftConfig`` in ``folder``. Raises UserError if it is missing, invalid or names files that may not be
    read."""
    from peft import PeftConfig

    path = folder / CONFIG_NAME
    raw = read_object(path) if path.is_file() else {}
    kind, known = raw.get("peft_type"), _peft_config_classes()
    if not isinstance(kind, str) or kind not in known:
        guess = did_you_mean(str(kind), known)
        what = f'"peft_type" must be a method of the installed peft. Received: {quote_value(kind)}.{guess}'
        raise UserError(what, where=str(path), remedy="A newer version of peft may support it.")
    check_texts_below_roots(raw)
    try:
        return PeftConfig.from_pretrained(str(folder))
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise UserError(f"peft rejects this adapter's config: {str(error).rstrip('.')}.", where=str(path)) from error


def _peft_config_classes() -> dict[str, Any]:
    """Name of each method of the installed peft -> the class of its config."""
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

    return {str(getattr(kind, "value", kind)): config for kind, config in PEFT_TYPE_TO_CONFIG_MAPPING.items()}


def is_peft_model(model: nn.Module) -> bool:
    """Whether a model is wrapped by the peft library."""
    return hasattr(model, "peft_config") and hasattr(model, "disable_adapter")


def _raw_peft_config(raw_config: dict[str, Any] | str | None) -> Mapping[str, Any]:
    """The mapping itself, or the one in the file or folder that it names."""
    if raw_config is None:
        what = "finetuning_type peft requires peft_config."
        raise UserError(
            what,
            remedy="Set it, for example, to {peft_type: PROMPT_TUNING, num_virtual_tokens: 8}.",
            option=("finetuning_type", "peft_config"),
        )
    if isinstance(raw_config, str):
        path = Path(raw_config) / "adapter_config.json" if Path(raw_config).is_dir() else Path(raw_config)
        if not path.is_file():
            raise UserError(
                f'peft_config "{raw_config}" is neither a file nor a folder with an adapter_config.json.',
                option="peft_config",
            )
        raw: Mapping[str, Any] = read_object(path)
        return raw
    return raw_config


def name_base(model: Any) -> None:
    """Set the base model's name in a peft model's configs so that it can be found from any folder."""
    for config in model.peft_config.values():
        config.base_model_name_or_path = absolute_if_local(config.base_model_name_or_path)
