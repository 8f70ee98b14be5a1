"""LoRA: trainable low-rank updates of frozen weights (Hu et al. 2021, https://arxiv.org/abs/2106.09685), with rsLoRA,
DoRA and PiSSA, in peft's modules and file format.

In:  the options below; folders of initial adapters. All but the last are merged in order. The last one is trained
further, unless ``create_new_adapter`` is set.
Out: the same model object with peft's layers; ``adapter_model.safetensors`` and ``adapter_config.json``.
Refuses: targets that the model does not have, adapters that do not fit it, damaged files. ``check`` finds these before
any weight is read, because it only needs the model's shapes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from burnish.adapters.base import ADAPTERS, FinetuningOptions, is_frozen, part_problems
from burnish.adapters.chain import incomplete_chain_notes, write_merged
from burnish.adapters.lora_fit import CONFIG_NAME, SCORE, WEIGHTS_NAME, Fit, check_fit, raise_unless_fitting
from burnish.adapters.lora_model import (
    FILE_PREFIX,
    adapter_state,
    add_adapter,
    embeddings,
    find_modules,
    find_targets,
    is_conv1d,
    load_adapter_state,
    merge_into_base,
    output_head,
    shortest_names,
    train_only,
    without_adapters,
)
from burnish.config.checks import notes
from burnish.config.errors import Problem, few
from burnish.config.options import changed_options, ineffective_option_notes, option, raise_if
from burnish.utils.files import absolute_if_local
from burnish.utils.json_files import quote_value, write_json

DEFAULT = "default"
"""Name of the trained adapter in memory, as in peft."""


@dataclass
class LoraOptions:
    """LoRA."""

    lora_rank: int = option(8, "LoRA rank.", ge=1)
    lora_alpha: float | None = option(
        None, "LoRA alpha: the update is scaled by alpha / rank. Default: twice the rank.", gt=0
    )
    lora_dropout: float = option(0.0, "LoRA dropout probability.", ge=0, lt=1)
    lora_target: list[str] = option(
        ["all"], "Modules to apply LoRA to (names or a regular expression). all: every linear layer except the LM head."
    )
    additional_target: list[str] | None = option(
        None, "Additional modules to train and save in full alongside the adapter, matched by name suffix."
    )
    use_rslora: bool = option(False, "Scale the update by alpha / sqrt(rank) (rsLoRA).")
    use_dora: bool = option(False, "Use weight-decomposed LoRA (DoRA).")
    pissa_init: bool = option(False, "Initialize with the principal singular vectors of the weights (PiSSA).")
    pissa_iter: int = option(
        16, "Number of iterations of the fast SVD for PiSSA. -1: exact SVD.", ge=-1, unit="iterations"
    )
    pissa_convert: bool = option(
        False, "Convert a PiSSA adapter to plain LoRA when saving.",
        ignored="PiSSA adapters are always saved as plain LoRA of twice the rank, for use with the original base model",
    )  # fmt: skip
    create_new_adapter: bool = option(False, "Merge all adapters of adapter_name_or_path and train a new one.")
    loraplus_lr_ratio: float | None = option(
        None, "Ratio of the learning rates of B and A (LoRA+, https://arxiv.org/abs/2402.12354).", gt=0
    )
    loraplus_lr_embedding: float = option(1e-6, "Learning rate of the B matrices of embedding layers with LoRA+.", gt=0)


@notes
def lora_notes(options: FinetuningOptions) -> list[str]:
    """Notes on options of LoRA variants that are not enabled."""
    if options.finetuning_type != "lora":
        return []  # reported for the whole group
    switches = {
        "pissa_iter": "pissa_init",
        "loraplus_lr_embedding": "loraplus_lr_ratio",
        "create_new_adapter": "adapter_name_or_path",
    }
    return ineffective_option_notes(options, switches)


class LoraChoices(LoraOptions, FinetuningOptions):
    """Options that this module reads."""


@ADAPTERS.register("lora", options=LoraOptions)
class LoraAdapter:
    """Trains low-rank updates of linear layers. The model itself is frozen."""

    saves_whole_model = False
    file_stem = WEIGHTS_NAME.removesuffix(".safetensors")

    def __init__(self, options: LoraChoices, folders: Sequence[Path] = ()) -> None:
        self.options = options
        continues = bool(folders) and not options.create_new_adapter
        self.to_merge = list(folders)[: -1 if continues else None]
        self.to_continue = folders[-1] if continues else None
        self.notes: list[str] = []
        self.config: Any = None  # peft's LoraConfig
        self._initial = InitialFactors({})

    def check(self, model: nn.Module) -> list[Problem]:
        problems: list[Problem] = []
        for folder in [*self.to_merge, *([self.to_continue] if self.to_continue else [])]:
            problems += check_fit(model, folder)
        if self.to_continue is None:
            problems += self._new_config(model)[1]
        return problems

    def attach(self, model: nn.Module) -> nn.Module:
        raise_if(self.check(model))
        self.notes += incomplete_chain_notes([*self.to_merge, *([self.to_continue] if self.to_continue else [])])
        for folder in self.to_merge:
            load_adapter(model, folder)
            merge_into_base(model)
            self.notes.append(f"The adapter {folder} was merged.")
        if self.to_continue is not None:
            fit = Fit.of_folder(self.to_continue)
            self._put_in(model, fit)
            fill_adapter(model, self.to_continue, fit)
            self.notes += _notes_on_existing_adapter(model, self.to_continue, fit.config, self.options)
        else:
            fit, _ = self._new_config(model)
            self._put_in(model, fit)
            self.notes += _notes_on_new_adapter(model, self.options, fit)
        train_only(model, DEFAULT)
        return model

    def _put_in(self, model: nn.Module, fit: Fit) -> None:
        add_adapter(model, DEFAULT, fit.config, fit.targets, fit.whole)
        self.config = fit.config
        if str(fit.config.init_lora_weights).startswith("pissa"):
            self._initial = InitialFactors.of(model)

    def reference(self, model: nn.Module) -> AbstractContextManager[Any]:
        return self._initial.detach_temporarily(model) if self._initial else without_adapters(model)

    def state(self, model: nn.Module) -> dict[str, Tensor]:
        state = adapter_state(model, DEFAULT)
        return self._initial.to_saved_state(state) if self._initial else state

    def load_state(self, model: nn.Module, state: Mapping[str, Tensor]) -> None:
        raise_unless_fitting(self.state(model), state)
        load_adapter_state(model, DEFAULT, self._initial.from_saved_state(model, state) if self._initial else state)

    def save(self, model: nn.Module, folder: str) -> None:
        from safetensors.torch import save_file

        Path(folder).mkdir(parents=True, exist_ok=True)
        state = {key: tensor.cpu().contiguous().clone() for key, tensor in self.state(model).items()}
        save_file(state, Path(folder) / WEIGHTS_NAME, metadata={"format": "pt"})
        self.save_config(model, folder)

    def save_config(self, model: nn.Module, folder: str) -> None:
        if self.config is None:
            raise RuntimeError("No adapter is attached, so there is nothing to save.")
        config = self._initial.saved_config(self.config) if self._initial else self.config
        config = config.to_dict() | {"inference_mode": True, "fan_in_fan_out": any(map(is_conv1d, model.modules()))}
        listed = {key: sorted(value) if isinstance(value, set) else value for key, value in config.items()}
        write_json(Path(folder) / CONFIG_NAME, listed, sort_keys=True)
        write_merged(Path(folder), self.to_merge)

    def _new_config(self, model: nn.Module) -> tuple[Fit, list[Problem]]:
        """The configured adapter, and the problems that prevent its creation."""
        from peft import LoraConfig

        options = self.options
        extra = options.additional_target or _modules_with_new_tokens(model)
        whole, problems = find_modules(model, extra)
        frozen = is_frozen(model, options)
        targets, missing = find_targets(model, options.lora_target, left_out=whole, is_frozen=frozen)
        decomposition = "pissa" if options.pissa_iter < 0 else f"pissa_niter_{options.pissa_iter}"  # exact, or fast
        config = LoraConfig(  # some of peft's annotations are narrower than the values it accepts
            task_type="CAUSAL_LM", r=options.lora_rank,
            lora_alpha=cast(Any, 2 * options.lora_rank if options.lora_alpha is None else options.lora_alpha),
            lora_dropout=options.lora_dropout, use_rslora=options.use_rslora, use_dora=options.use_dora,
            init_lora_weights=cast(Any, decomposition if options.pissa_init else True),
            target_modules=cast(Any, set(shortest_names(targets, model))), modules_to_save=sorted(extra) or None,
            base_model_name_or_path=absolute_if_local(getattr(getattr(model, "config", None), "name_or_path", None)),
        )  # fmt: skip
        fit = Fit(config, targets, whole)
        return fit, [*problems, *missing, *part_problems(options, model), *fit.problems(model)]


@dataclass
class InitialFactors:
    """Initial factors that PiSSA split off from the weights: ``W = W_res + s B0 A0`` (Meng et al. 2024, section 3,
    https://arxiv.org/abs/2404.02948).

    The adapter is saved as its change since then, as plain LoRA of twice the rank. So it fits the original weights:
    ``W_res + s B A = W + s [B, -B0] [A; A0]``.

    Args:
        state: the initial tensors, by their names in a file.
    """

    state: dict[str, Tensor]

    @classmethod
    def of(cls, model: nn.Module) -> InitialFactors:
        return cls({key: tensor.clone() for key, tensor in adapter_state(model, DEFAULT).items()})

    def __bool__(self) -> bool:
        return bool(self.state)

    def to_saved_state(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Convert the state of the adapter to LoRA for the original weights."""
        found = dict(state)
        for _, key_a, key_b in self._pairs():
            found[key_a] = torch.cat([state[key_a], self.state[key_a]])
            found[key_b] = torch.cat([state[key_b], -self.state[key_b]], 1)
        return found

    def from_saved_state(self, model: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Inverse of ``to_saved_state``. If the state started from another decomposition, that becomes the initial one,
        and the base weights are recomputed. On the same device the decomposition is exactly the same.
        """
        found = dict(state)
        for path, key_a, key_b in list(self._pairs()):
            a0, b0, rank = self.state[key_a], self.state[key_b], len(self.state[key_a])
            found[key_a], found[key_b] = state[key_a][:rank], state[key_b][:, :rank]
            a, b = state[key_a][rank:].to(a0), -state[key_b][:, rank:].to(b0)
            if not (torch.equal(a, a0) and torch.equal(b, b0)):
                layer: Any = model.get_submodule(path)
                shift = layer.scaling[DEFAULT] * (b0 @ a0 - b @ a)
                weight = layer.base_layer.weight.data
                is_transposed = is_conv1d(layer.base_layer) or isinstance(layer.base_layer, nn.Embedding)
                weight.copy_(weight.float() + (shift.t() if is_transposed else shift))
                self.state[key_a], self.state[key_b] = a, b
        return found

    def _pairs(self) -> Iterator[tuple[str, str, str]]:
        """Yield the path of each layer with factors, and the names of its A and B in a file."""
        for key in self.state:
            for suffix_a, suffix_b in _FACTORS:
                if key.endswith(suffix_a):
                    stem = key.removesuffix(suffix_a)
                    yield stem.removeprefix(FILE_PREFIX), key, stem + suffix_b

    @contextmanager
    def detach_temporarily(self, model: nn.Module) -> Iterator[None]:
        """Context in which the model computes as before the adapter was attached."""
        state = {key: tensor.clone() for key, tensor in adapter_state(model, DEFAULT).items()}
        load_adapter_state(model, DEFAULT, self.state)
        try:
            yield
        finally:
            load_adapter_state(model, DEFAULT, state)

    def saved_config(self, config: Any) -> Any:
        """The config of the saved adapter: twice the rank, the same scale."""
        scaling = config.lora_alpha / (config.r**0.5 if config.use_rslora else config.r)
        rank = 2 * config.r
        return replace(config, r=rank, lora_alpha=scaling * rank, use_rslora=False, init_lora_weights=True)


_FACTORS = ((".lora_A.weight", ".lora_B.weight"), (".lora_embedding_A", ".lora_embedding_B"))
"""Suffixes of A and B in a file, of a linear layer and of an embedding, whose A is zero at first."""


def _modules_with_new_tokens(model: nn.Module) -> list[str]:
    """Names of embedding and head if the vocabulary has new rows, which would stay random if frozen."""
    if not getattr(model, "has_new_tokens", False):
        return []
    head = output_head(model)
    paths = [path for path, module in model.named_modules() if module is head] + [*embeddings(model)][:1]
    return sorted({path.split(".")[-1] for path in paths})


def _notes_on_existing_adapter(model: nn.Module, folder: Path, config: Any, options: LoraOptions) -> Iterator[str]:
    """Notes on an existing adapter: options that it does not follow, and another base model."""
    kept = {
        "lora_rank": config.r, "lora_alpha": config.lora_alpha, "lora_dropout": config.lora_dropout,
        "use_rslora": config.use_rslora, "use_dora": config.use_dora,
        "pissa_init": str(config.init_lora_weights).startswith("pissa"),
        "lora_target": _sorted_names(config.target_modules),
        "additional_target": _sorted_names(config.modules_to_save),
    }  # fmt: skip
    requested = {name: value for name, value in changed_options(options).items() if name in kept}
    requested |= {name: sorted(value) for name, value in requested.items() if isinstance(value, list)}
    ignored = [name for name, value in requested.items() if value != kept[name]]
    if ignored:
        verb = "applies" if len(ignored) == 1 else "apply"
        shown = ", ".join(f"{name}: {quote_value(kept[name])}" for name in ignored)
        yield f"{' and '.join(ignored)} {verb} to new adapters only. {folder} has {shown}."
    base, own = getattr(getattr(model, "config", None), "name_or_path", None), config.base_model_name_or_path
    if own and base and Path(own).name != Path(base).name:
        yield f"The adapter was trained on {own}; the base model of this run is {base}."


def _sorted_names(names: str | Collection[str] | None) -> list[str]:
    return [names] if isinstance(names, str) else sorted(names or ())


def _notes_on_new_adapter(model: nn.Module, options: LoraOptions, fit: Fit) -> Iterator[str]:
    """Notes on automatic choices for a new adapter."""
    if options.additional_target:
        yield f"Trained in full alongside the adapter: {few(fit.whole)} (additional_target)."
    elif fit.whole:
        names = " and ".join(fit.config.modules_to_save or ())
        yield f"The vocabulary has grown, so {names} are trained in full alongside the adapter."
    # Experts in one three-dimensional tensor are not linear layers, and neither are convolutions (Mamba).
    solid = [name for name, parameter in model.named_parameters() if parameter.ndim == 3]
    fused = [name for name in solid if "experts" in name]
    others = [name for name in solid if name not in fused]
    for kind, frozen in (("fused expert weights", fused), ("convolutions", others)):
        if frozen:
            yield f"{len(frozen)} {kind} get no adapter and stay frozen: {frozen[0]}, ..."


def load_adapter(model: nn.Module, folder: Path, name: str = DEFAULT) -> None:
    """Attach the adapter in ``folder`` to the model under ``name``, active and frozen.

    Raises:
        UserError: if it does not fit.
    """
    raise_if(check_fit(model, folder))
    fit = Fit.of_folder(folder)
    add_adapter(model, name, fit.config, fit.targets, fit.whole)
    fill_adapter(model, folder, fit, name)


def fill_adapter(model: nn.Module, folder: Path, fit: Fit, name: str = DEFAULT) -> None:
    """Load the weights in ``folder`` into an attached adapter, and freeze it."""
    from safetensors.torch import load_file

    state = load_file(folder / WEIGHTS_NAME)
    state.pop(SCORE, None)
    load_adapter_state(model, name, state)
    for key, path in fit.base.items():  # weights of the base model, whether or not their layer is wrapped
        holder, _, leaf = path.rpartition(".")
        module = model.get_submodule(holder)
        with torch.no_grad():
            getattr(module, "base_layer", module).get_parameter(leaf).copy_(state[key])
    for path in [*fit.targets, *fit.whole]:
        model.get_submodule(path).requires_grad_(False)


class RateChoices(LoraOptions):
    """Options that determine the learning rate of parameters."""

    learning_rate: float


def learning_rates(model: nn.Module, options: RateChoices) -> dict[str, float]:
    """Parameter name -> its learning rate under LoRA+. All others use ``learning_rate``.

    Vectors (magnitudes of DoRA, biases, norms) have the rate of B, as in the authors' code, peft and LLaMA-Factory.
    Source: Hayou et al. 2024, section 4, https://arxiv.org/abs/2402.12354
    """
    if options.loraplus_lr_ratio is None:
        return {}
    found = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and ".lora_embedding_B." in name:
            found[name] = options.loraplus_lr_embedding
        elif parameter.requires_grad and (".lora_B." in name or parameter.ndim == 1):
            found[name] = options.learning_rate * options.loraplus_lr_ratio
    return found
