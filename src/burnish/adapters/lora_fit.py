"""Whether a LoRA adapter fits a model, told from names and shapes alone.

In:  a model (its parameters may be on the meta device) and an adapter's folder, of which the config and the header of
     the weights are read; or two states, of a checkpoint and of this run.
Out: where each adapter tensor belongs, and problems a person can act on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor, nn

from burnish.adapters.base import raise_unless_same
from burnish.adapters.lora_config import WEIGHTS_NAME, LoraConfig
from burnish.adapters.lora_layer import LoraLinear, features
from burnish.adapters.lora_model import FILE_PREFIX, linear_layers
from burnish.core.errors import Problem, UserError
from burnish.core.tensor_files import TensorInfo, read_header

# The last part of a tensor's name in a file, and which sides of the layer its shape tells.
_FACTORS = (
    "lora_A.weight",
    "lora_B.weight",
    "lora_B.bias",
    "lora_embedding_A",
    "lora_embedding_B",
    "lora_magnitude_vector",
)
_BASE = "base_layer.weight"


@dataclass(frozen=True)
class Fit:
    """An adapter and the places in a model where it goes.

    Args:
        targets: paths of the layers that get factors.
        whole: paths of the modules of which a trained copy is held.
        base: name in the file -> parameter of the model it replaces (an embedding saved with the adapter).
    """

    config: LoraConfig
    targets: Sequence[str]
    whole: Sequence[str]
    base: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of_folder(cls, folder: Path) -> Fit:
        """Raises UserError where a file is missing, damaged, or of a kind that burnish does not run."""
        config = LoraConfig.read(folder)
        targets: dict[str, None] = {}
        whole: dict[str, None] = {}
        base: dict[str, str] = {}
        for key in _weights_header(folder):
            path, kind = _place(key)
            holder = path.rpartition(".")[0]
            if kind in _FACTORS:
                targets[path] = None
            elif kind == _BASE:
                base[key] = f"{path}.weight"
            elif module := _copied(holder, config.modules_to_save):
                whole[module] = None
            else:
                base[key] = path
        return cls(config, list(targets), list(whole), base)

    def problems(self, model: nn.Module) -> list[Problem]:
        """What the settings ask of layers that cannot do it."""
        rank = self.config.settings.rank
        modules = [model.get_submodule(path) for path in self.targets]
        small = [
            path
            for path, module in zip(self.targets, modules, strict=True)
            if self.config.settings.pissa is not None and rank > min(_sides(module))
        ]
        if not small:
            return []
        return [
            Problem(
                f"pissa_init with lora_rank {rank}: {small[0]} has only {min(_sides(model.get_submodule(small[0])))} "
                "singular values.",
                remedy="Lower lora_rank, or leave that layer out of lora_target.",
            )
        ]


def check_fit(model: nn.Module, folder: Path) -> list[Problem]:
    """What keeps the adapter in ``folder`` from being put on ``model``."""
    try:
        fit = Fit.of_folder(folder)
        header = _weights_header(folder)
    except UserError as error:
        return list(error.problems)
    places = {**linear_layers(model), **{p: m for p, m in model.named_modules() if isinstance(m, nn.Embedding)}}
    modules = dict(model.named_modules())
    absent = [path for path in fit.targets if path not in places] + [path for path in fit.whole if path not in modules]
    if absent:
        return [_absent(model, folder, fit, absent)]
    other = [text for key, info in header.items() if (text := _difference(model, fit, key, info))]
    if other:
        return [_misfit(model, folder, fit, other)]
    return fit.problems(model)


def raise_unless_fitting(own: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> None:
    """Raise UserError where a checkpoint's adapter is not the one this run trains."""
    ranks = {_rank(own), _rank(given)}
    if None not in ranks and len(ranks) == 2 and own.keys() == given.keys():
        raise UserError(
            Problem(
                f"the checkpoint's adapter has rank {_rank(given)}, and this run's has rank {_rank(own)}.",
                remedy="Set lora_rank to what it was, or start a new run in another output_dir.",
            )
        )
    raise_unless_same(own, given, "the adapter's weights")


def _weights_header(folder: Path) -> dict[str, TensorInfo]:
    path = folder / WEIGHTS_NAME
    if path.is_file():
        return read_header(path)
    is_pickle = (folder / "adapter_model.bin").is_file()
    raise UserError(
        Problem(
            f"adapter_model.bin is a pickle, which can run code; burnish reads {WEIGHTS_NAME} only."
            if is_pickle
            else f"the adapter has no {WEIGHTS_NAME}.",
            where=str(folder),
            remedy="Save it again with a current peft, which writes safetensors." if is_pickle else "Copy it again.",
        )
    )


def _copied(holder: str, names: Sequence[str]) -> str:
    """The module trained whole that a tensor of the module at ``holder`` belongs to, or the empty string. peft takes
    every module whose path ends in the letters of a name."""
    parts = holder.split(".")
    paths = (".".join(parts[: count + 1]) for count in range(len(parts)))
    return next((path for path in paths if path.endswith(tuple(names))), "")


def _place(key: str) -> tuple[str, str]:
    """A name in a file as (path in the model, which factor); ("lm_head.weight", "") for a tensor of a whole module."""
    name = key.removeprefix(FILE_PREFIX)
    for kind in (*_FACTORS, _BASE):
        if name.endswith(f".{kind}"):
            return name.removesuffix(f".{kind}"), kind
    return name, ""


def _sides(module: nn.Module) -> tuple[int, int]:
    """(I, O) of a linear layer; (vocabulary, width) of an embedding."""
    if isinstance(module, nn.Embedding):
        return module.num_embeddings, module.embedding_dim
    return (module.in_features, module.out_features) if isinstance(module, LoraLinear) else features(module)


def _difference(model: nn.Module, fit: Fit, key: str, info: TensorInfo) -> str:
    """How a tensor of the file differs in shape from its place in the model; empty where it fits."""
    path, kind = _place(key)
    if kind in _FACTORS:
        inputs, outputs = _sides(model.get_submodule(path))
        rank = fit.config.at(path).rank
        a, b, vector = (rank, inputs), (outputs, rank), (outputs,)
        expected = dict(zip(_FACTORS, (a, b, vector, a, b, vector), strict=True))[kind]
    else:
        path = fit.base.get(key, path)
        parameters = dict(model.named_parameters(remove_duplicate=False))
        if path not in parameters:
            return f"{path} is not in the model"
        expected = tuple(parameters[path].shape)
    if info.shape == expected:
        return ""
    return f"{path} {kind} is {_times(info.shape)} in the adapter, and would be {_times(expected)}".replace("  ", " ")


def _rank(state: Mapping[str, Tensor]) -> int | None:
    ranks = {len(tensor) for key, tensor in state.items() if key.endswith(("lora_A.weight", "lora_embedding_A"))}
    return ranks.pop() if len(ranks) == 1 else None


def _absent(model: nn.Module, folder: Path, fit: Fit, absent: Sequence[str]) -> Problem:
    more = f" and {len(absent) - 1} more" if len(absent) > 1 else ""
    return Problem(
        f"the adapter is for a model with {absent[0]}{more}, which {type(model).__name__} does not have.",
        where=str(folder),
        remedy=_its_base(fit),
    )


def _misfit(model: nn.Module, folder: Path, fit: Fit, differences: Sequence[str]) -> Problem:
    more = f" ({len(differences)} tensors differ)" if len(differences) > 1 else ""
    return Problem(
        f"the adapter does not fit this {type(model).__name__}: {differences[0]}{more}.",
        where=str(folder),
        remedy=_its_base(fit),
    )


def _its_base(fit: Fit) -> str:
    return (
        f"It was trained on {fit.config.base_model}." if fit.config.base_model else "Give the model it was trained on."
    )


def _times(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape)) or "a single number"
