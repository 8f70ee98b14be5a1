"""The layers of LoRA: around a linear layer and around an embedding.

Each stands in the model where the layer it wraps stood and keeps it as ``base_layer``; the base product is
``base_layer(x)``, whatever kind of layer that is. Parameters are called as peft calls them, so that a state dict reads
the same here and there: ``lora_A.<adapter>.weight``, ``base_layer.weight``.
"""

# I inputs (of an embedding: its vocabulary), O outputs, r rank

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from burnish.adapters.switch import AdapterModule
from burnish.core.errors import Problem, UserError
from burnish.ops.lora import dora_update, lora_linear, lora_update, product_dtype, weight_norm
from burnish.ops.lora_siblings import Adapted
from burnish.ops.quantised import dense, is_quantised


@dataclass(frozen=True)
class LoraSettings:
    """What one adapter is in one layer.

    Args:
        pissa: start from the r largest singular vectors of the weight and leave the rest in the base (PiSSA); the
            number of iterations of a fast decomposition, -1 for an exact one, None for plain LoRA.
        use_bias: a bias in B.
    """

    rank: int
    alpha: float
    dropout: float = 0.0
    use_rslora: bool = False
    use_dora: bool = False
    pissa: int | None = None
    use_bias: bool = False

    @property
    def scaling(self) -> float:
        """alpha / r, or alpha / sqrt(r) for rsLoRA (Kalajdzievski 2023, https://arxiv.org/abs/2312.03732)."""
        return self.alpha / (math.sqrt(self.rank) if self.use_rslora else self.rank)


class LoraLayer(AdapterModule):
    """What LoRA over a linear layer and over an embedding have in common."""

    plain = False
    """The formula as written, instead of the product that keeps its input once (ops/lora.py). For every layer."""

    lora_magnitude_vector: nn.ModuleDict  # made last: the order of the parameters is peft's, and optimizers count by it

    def __init__(self, base_layer: nn.Module) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.settings: dict[str, LoraSettings] = {}
        self._before_merge: tuple[nn.Parameter, nn.Parameter | None] | None = None

    # --- what a model may ask of the layer that stood here --------------------------------------------------------

    @property
    def weight(self) -> Tensor:
        return self.base_layer.weight  # type: ignore[return-value]

    @property
    def bias(self) -> Tensor | None:
        return getattr(self.base_layer, "bias", None)

    # --- adapters -------------------------------------------------------------------------------------------------

    @property
    def adapters(self) -> Iterable[str]:
        return self.settings

    def add(self, name: str, settings: LoraSettings) -> None:
        """A new adapter, which changes nothing yet: a factor is zero, or what it holds is taken from the base."""
        self.settings[name] = settings
        self._make_factors(name, settings)
        if settings.pissa is not None:
            self._start_from_principal(name, settings)
        if settings.use_dora:
            a, b = self.factors(name)
            length = weight_norm(_numbers(self.base_layer), a, b, settings.scaling)
            self.lora_magnitude_vector[name] = _Vector(length)

    def factors(self, name: str) -> tuple[Tensor, Tensor]:
        """A (r, I) and B (O, r)."""
        raise NotImplementedError

    def _make_factors(self, name: str, settings: LoraSettings) -> None:
        raise NotImplementedError

    def _start_from_principal(self, name: str, settings: LoraSettings) -> None:
        """W = W_res + scaling * B A, with A and B from the largest singular values (Meng et al. 2024, section 3,
        https://arxiv.org/abs/2404.02948). A and B as they are now are kept: an adapter is saved as what it has
        become since, so that it fits the base everyone has."""
        a, b = self.factors(name)
        if not a.is_meta:
            weight = dense_weight(self.base_layer).detach().float()
            left, values, right = _principal(weight, settings.rank, settings.pissa)
            root = (values / settings.scaling).sqrt()
            a.data = (root[:, None] * right).contiguous()
            b.data = (left * root).contiguous()
            _set_dense_weight(self.base_layer, weight - settings.scaling * (b @ a).detach())
        self.register_buffer(f"pissa_A_{name}", a.detach().clone(), persistent=False)
        self.register_buffer(f"pissa_B_{name}", b.detach().clone(), persistent=False)

    def trainable(self, name: str) -> list[nn.Parameter]:
        own = (item for item in self.named_parameters() if not item[0].startswith("base_layer."))
        return [parameter for path, parameter in own if name in path.split(".")]

    # --- forward --------------------------------------------------------------------------------------------------

    def forward(self, x: Tensor) -> Tensor:
        if self.is_merged:
            return self.base_layer(x)  # type: ignore[no-any-return]
        if self.rows is not None and not self.is_disabled:
            return self._row_by_row(x, lambda part, name: self._with(part, [name]))
        return self._with(x, [] if self.is_disabled else self.active)

    def _with(self, x: Tensor, names: Sequence[str]) -> Tensor:
        result: Tensor = self.base_layer(x)
        for a, b, scaling in self._taken_from_base(names):
            result = self._plus(result, x, a, b, scaling)
        for name in names:
            if name in self.settings:
                result = self._updated(result, x, name)
        return result

    def _taken_from_base(self, names: Sequence[str]) -> Iterator[tuple[Tensor, Tensor, float]]:
        """What PiSSA adapters that are not in use took out of the base weight, and is missing from it."""
        for name, settings in self.settings.items():
            if settings.pissa is not None and name not in names:
                yield *self._beginning(name), settings.scaling

    def _plus(self, result: Tensor, x: Tensor, a: Tensor, b: Tensor, scaling: float, dropout: float = 0.0) -> Tensor:
        """``result`` with the plain low-rank update of A and B added."""
        raise NotImplementedError

    def _updated(self, result: Tensor, x: Tensor, name: str) -> Tensor:
        """``result`` with adapter ``name`` applied."""
        raise NotImplementedError

    def _scale(self, name: str) -> Tensor:
        """(O,) DoRA's factor: the learned length over the length that the direction has."""
        a, b = self.factors(name)
        magnitude: Tensor = self.lora_magnitude_vector[name].weight  # type: ignore[assignment]
        return magnitude / weight_norm(_numbers(self.base_layer), a, b, self.settings[name].scaling)

    # --- merging --------------------------------------------------------------------------------------------------

    @property
    def is_merged(self) -> bool:
        return self._before_merge is not None

    @torch.no_grad()
    def merge(self) -> None:
        names = [name for name in self.active if name in self.settings]
        if self.is_merged or not names:
            return
        if is_quantised(self.base_layer):
            raise UserError(_no_merge(self.base_layer))
        merged = dense_weight(self.base_layer).float()
        for a, b, scaling in self._taken_from_base(names):
            merged = torch.addmm(merged, b, a, alpha=scaling)
        for name in names:
            a, b = self.factors(name)
            scale = self._scale(name).float()[:, None] if name in self.lora_magnitude_vector else 1.0
            merged = scale * torch.addmm(merged, b.float(), a.float(), alpha=self.settings[name].scaling)
        before = self.base_layer.weight, getattr(self.base_layer, "bias", None)
        self.base_layer.weight = nn.Parameter(self.base_layer.weight.detach().clone(), requires_grad=False)  # type: ignore[operator]
        _set_dense_weight(self.base_layer, merged)
        self._merge_bias(names)
        self._before_merge = before  # type: ignore[assignment]

    def _merge_bias(self, names: Sequence[str]) -> None: ...

    def unmerge(self) -> None:
        if self._before_merge is not None:
            self.base_layer.weight, bias = self._before_merge
            if bias is not None or getattr(self.base_layer, "bias", None) is not None:
                self.base_layer.bias = bias  # type: ignore[assignment]
            self._before_merge = None

    def bare(self) -> nn.Module:
        return self.base_layer

    # --- files ----------------------------------------------------------------------------------------------------

    NAMES: tuple[str, str] = ("lora_A.weight", "lora_B.weight")

    def state(self, name: str) -> dict[str, Tensor]:
        """The factors; of an adapter that began as PiSSA the difference to its beginning, with twice the rank:
        ``W_res + s B A = W + s [B, -B0] [A; A0]``."""
        a, b = self.factors(name)
        if self.settings[name].pissa is not None:
            a0, b0 = self._beginning(name)
            a, b = torch.cat([a, a0]), torch.cat([b, -b0], dim=1)
        found = dict(zip(self.NAMES, (a, b), strict=True))
        if name in self.lora_magnitude_vector:
            found["lora_magnitude_vector"] = self.lora_magnitude_vector[name].weight  # type: ignore[assignment]
        return found

    @torch.no_grad()
    def load(self, name: str, state: Mapping[str, Tensor]) -> None:
        settings = self.settings[name]
        a, b = self.factors(name)
        loaded_a, loaded_b = (state[key].to(a) for key in self.NAMES)
        rank = settings.rank
        if settings.pissa is not None and len(loaded_a) == 2 * rank:
            self._begin_at(name, loaded_a[rank:], -loaded_b[:, rank:])
            loaded_a, loaded_b = loaded_a[:rank], loaded_b[:, :rank]
        a.copy_(loaded_a)
        b.copy_(loaded_b)
        if name in self.lora_magnitude_vector:
            magnitude: Tensor = self.lora_magnitude_vector[name].weight  # type: ignore[assignment]
            magnitude.copy_(state["lora_magnitude_vector"])

    def _beginning(self, name: str) -> tuple[Tensor, Tensor]:
        return self.get_buffer(f"pissa_A_{name}"), self.get_buffer(f"pissa_B_{name}")

    def _begin_at(self, name: str, a: Tensor, b: Tensor) -> None:
        """Take another decomposition as the beginning: the one a checkpoint was written with. On the same devices it
        is this one, to the bit, and the base stays as it is."""
        a0, b0 = self._beginning(name)
        if torch.equal(a0, a) and torch.equal(b0, b):
            return
        shift = self.settings[name].scaling * (b0 @ a0 - b @ a)
        _set_dense_weight(self.base_layer, dense_weight(self.base_layer).float() + shift)
        a0.copy_(a)
        b0.copy_(b)


class LoraLinear(LoraLayer):
    """LoRA over a linear layer, dense or quantised, or GPT-2's ``Conv1D``."""

    def __init__(self, base_layer: nn.Module) -> None:
        super().__init__(base_layer)
        self.in_features, self.out_features = features(base_layer)
        self.lora_A = nn.ModuleDict()
        self.lora_B = nn.ModuleDict()
        self.lora_magnitude_vector = nn.ModuleDict()

    def factors(self, name: str) -> tuple[Tensor, Tensor]:
        return self.lora_A[name].weight, self.lora_B[name].weight  # type: ignore[return-value]

    def lora_bias(self, name: str) -> Tensor | None:
        """(O,) the bias in B, which few adapters have."""
        return self.lora_B[name].bias  # type: ignore[return-value]

    def _make_factors(self, name: str, settings: LoraSettings) -> None:
        # A as torch initialises a linear layer, B zero (Hu et al. 2021, section 4.1; the bound is that of their code).
        device = _device_of(self.base_layer)
        a = nn.Linear(self.in_features, settings.rank, bias=False, device=device, dtype=torch.float32)
        b = nn.Linear(settings.rank, self.out_features, bias=settings.use_bias, device=device, dtype=torch.float32)
        nn.init.kaiming_uniform_(a.weight, a=math.sqrt(5))
        for parameter in b.parameters():
            nn.init.zeros_(parameter)
        self.lora_A[name], self.lora_B[name] = a, b

    def _with(self, x: Tensor, names: Sequence[str]) -> Tensor:
        product = self._one_product(x, names)
        return super()._with(x, names) if product is None else lora_linear(x, *product)

    def adapted(self, x: Tensor) -> Adapted | None:
        """As ``ops.lora_siblings.AdaptedLayer`` has it."""
        is_more = self.is_merged or self.is_disabled or self.rows is not None
        return None if is_more else self._one_product(x, self.active)

    def _one_product(self, x: Tensor, names: Sequence[str]) -> Adapted | None:
        """The layer under the adapters ``names``, where that is one product."""
        here = [name for name in names if name in self.settings]
        if len(here) != 1 or not self._is_one_product(x, here[0]):
            return None
        return Adapted(self.weight, self.bias, *self.factors(here[0]), *self._strength(here[0]))

    def _is_one_product(self, x: Tensor, name: str) -> bool:
        """Whether layer and adapter are nothing but ``ops.lora.lora_linear``: a dense layer that does not train, with
        nobody listening to it, under a plain adapter; and all numbers in the format of the product."""
        base, (a, _) = self.base_layer, self.factors(name)
        is_plain = not self.plain and name not in self.lora_magnitude_vector and self.lora_bias(name) is None
        is_whole = all(settings.pissa is None or other == name for other, settings in self.settings.items())
        return (
            is_plain and is_whole and _is_frozen_product(base) and x.dtype == base.weight.dtype == product_dtype(x, a)
        )

    def _strength(self, name: str) -> tuple[float, float]:
        """What the update is multiplied by, and the probability of dropout."""
        settings = self.settings[name]
        return settings.scaling, settings.dropout if self.training else 0.0

    def _updated(self, result: Tensor, x: Tensor, name: str) -> Tensor:
        scaling, dropout = self._strength(name)
        if name in self.lora_magnitude_vector:
            updated = self._decomposed(result, x, name, dropout)
        else:
            updated = self._plus(result, x, *self.factors(name), scaling, dropout)
        bias = self.lora_bias(name)
        return updated if bias is None else updated + (bias * scaling).to(updated.dtype)

    def _plus(self, result: Tensor, x: Tensor, a: Tensor, b: Tensor, scaling: float, dropout: float = 0.0) -> Tensor:
        return lora_update(result, x, a, b, scaling, dropout, plain=self.plain)

    def _decomposed(self, result: Tensor, x: Tensor, name: str, dropout: float) -> Tensor:
        a, b = self.factors(name)
        if dropout > 0:
            x = F.dropout(x, dropout)
        base = self.base_layer(x) if dropout > 0 else result
        if self.bias is not None:
            base = base - self.bias.to(base.dtype)
        return dora_update(result, base, x, a, b, self.settings[name].scaling, self._scale(name))

    def _merge_bias(self, names: Sequence[str]) -> None:
        biases = [(self.lora_bias(name), self.settings[name].scaling) for name in names]
        added = [bias * scaling for bias, scaling in biases if bias is not None]
        if added:
            old = added[0].new_zeros(self.out_features) if self.bias is None else self.bias.float()
            merged = torch.stack([old, *added]).sum(dim=0).to(self.weight.dtype)
            self.base_layer.bias = nn.Parameter(merged, requires_grad=False)

    def state(self, name: str) -> dict[str, Tensor]:
        bias = self.lora_bias(name)
        return super().state(name) | ({} if bias is None else {"lora_B.bias": bias})

    @torch.no_grad()
    def load(self, name: str, state: Mapping[str, Tensor]) -> None:
        super().load(name, state)
        bias = self.lora_bias(name)
        if bias is not None:
            bias.copy_(state["lora_B.bias"])


class LoraEmbedding(LoraLayer):
    """LoRA over an embedding: ``E[x] + scaling * A[:, x]ᵀ Bᵀ``; I is the vocabulary, O the width."""

    NAMES = ("lora_embedding_A", "lora_embedding_B")

    def __init__(self, base_layer: nn.Module) -> None:
        super().__init__(base_layer)
        self.embedding_dim, self.num_embeddings = dense_weight(base_layer).shape
        self.lora_embedding_A = nn.ParameterDict()
        self.lora_embedding_B = nn.ParameterDict()
        self.lora_magnitude_vector = nn.ModuleDict()

    def factors(self, name: str) -> tuple[Tensor, Tensor]:
        return self.lora_embedding_A[name], self.lora_embedding_B[name]

    def _make_factors(self, name: str, settings: LoraSettings) -> None:
        # A zero and B normal, as the authors of LoRA do for embeddings (loralib, layers.py, Embedding).
        device = self.weight.device
        self.lora_embedding_A[name] = nn.Parameter(torch.zeros(settings.rank, self.num_embeddings, device=device))
        self.lora_embedding_B[name] = nn.Parameter(torch.randn(self.embedding_dim, settings.rank, device=device))

    def _plus(self, result: Tensor, x: Tensor, a: Tensor, b: Tensor, scaling: float, dropout: float = 0.0) -> Tensor:
        update = F.linear(F.embedding(x, a.t()), b) * scaling
        embed_scale = getattr(self.base_layer, "embed_scale", None)  # Gemma 3's embedding multiplies by it
        if embed_scale is not None:
            update = update * embed_scale.to(update.dtype)
        return (result + update).to(result.dtype)

    def _updated(self, result: Tensor, x: Tensor, name: str) -> Tensor:
        updated = self._plus(result, x, *self.factors(name), self.settings[name].scaling)
        return (self._scale(name) * updated).to(result.dtype) if name in self.lora_magnitude_vector else updated


class _Vector(nn.Module):
    def __init__(self, values: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(values)


def is_conv1d(module: nn.Module) -> bool:
    """transformers' ``Conv1D``: a linear layer that stores its weight as (I, O). Known by name, so that adapters work
    without transformers."""
    return type(module).__name__ == "Conv1D"


def is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or is_conv1d(module) or is_packed(module)


def is_packed(module: nn.Module) -> bool:
    """A linear layer of GPTQ or AWQ, whatever the library: known by the name of its packed weight."""
    return isinstance(getattr(module, "qweight", None), Tensor) and hasattr(module, "in_features")


def features(layer: nn.Module) -> tuple[int, int]:
    """(I, O) of a linear layer."""
    if is_conv1d(layer):
        outputs, inputs = dense_weight(layer).shape
        return inputs, outputs
    return layer.in_features, layer.out_features  # type: ignore[return-value]


def dense_weight(layer: nn.Module) -> Tensor:
    """(O, I) the weight of a linear layer, or of an embedding with I its vocabulary; a view where stored as (I, O).

    Raises:
        RuntimeError: for a quantised weight, which is not a matrix of numbers.
    """
    weight: Tensor = layer.weight  # type: ignore[assignment]
    if not weight.is_floating_point():
        raise RuntimeError(f"{type(layer).__name__} is quantised; this needs the weight as numbers.")
    return weight.t() if is_conv1d(layer) or isinstance(layer, nn.Embedding) else weight


def _is_frozen_product(layer: nn.Module) -> bool:
    """Whether ``layer`` is torch's own linear layer over a plain tensor, which nothing trains and no hook follows (such
    as gathers a sharded weight). A quantised or distributed weight is of a class of its own."""
    if type(layer) is not nn.Linear or "forward" in vars(layer):
        return False
    hooks = (layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks, layer._backward_pre_hooks)
    is_frozen = not any(parameter.requires_grad for parameter in layer.parameters())
    return is_frozen and type(layer.weight) in (Tensor, nn.Parameter) and not any(hooks)


def _numbers(layer: nn.Module) -> Tensor:
    """(O, I) the weight of a layer, dense or quantised, to be looked at."""
    return dense(layer) if is_quantised(layer) else dense_weight(layer)


def _device_of(layer: nn.Module) -> torch.device:
    return next(tensor.device for tensor in (*layer.parameters(), *layer.buffers()))


def _no_merge(layer: nn.Module) -> Problem:
    return Problem(
        f"an adapter cannot be merged into a quantised base ({type(layer).__name__}): the sum would be rounded away.",
        remedy="Merge it into the base in full precision: burnish export without quantization_bit.",
    )


def _set_dense_weight(layer: nn.Module, value: Tensor) -> None:
    """Write ``value`` (O, I) where ``dense_weight`` reads, in the weight's own dtype."""
    with torch.no_grad():
        dense_weight(layer).copy_(value)


def _principal(weight: Tensor, rank: int, iterations: int | None) -> tuple[Tensor, Tensor, Tensor]:
    """The ``rank`` largest singular values of (O, I) with their vectors: (O, r), (r,), (r, I)."""
    if iterations is None or iterations < 0:
        left, values, right = torch.linalg.svd(weight, full_matrices=False)
        return left[:, :rank], values[:rank], right[:rank]
    left, values, right = torch.svd_lowrank(weight, q=rank, niter=iterations)
    return left, values, right.t()
