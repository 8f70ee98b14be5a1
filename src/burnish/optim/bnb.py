"""Optimizers of the bitsandbytes library: 8-bit moments (Dettmers et al. 2021, https://arxiv.org/abs/2110.02861), paged
to main memory if a GPU has too little, and Lion, RMSprop and AdEMAMix in 8 and 32 bits.

Tensors below 4096 elements keep 32-bit moments by the library's own rule, and embeddings by transformers' rule: in a
step few of their rows change, by large amounts, and 8 bits lose the others (Dettmers et al. 2021, section 2.3). On a
CPU nothing is paged.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.optim import Optimizer

from burnish.optim.builtin import ADAM_ONLY, OPTIMIZERS, Groups, OptimOptions, adam_arguments, optim_arguments

LIBRARY = "bitsandbytes"
UNUSED_OPTIONS = {"Lion": ("adam_epsilon",), "RMSprop": ADAM_ONLY}


def _adam(options: OptimOptions) -> dict[str, Any]:
    return {name: value for name, value in adam_arguments(options).items() if name != "lr"}


def _lion(options: OptimOptions) -> dict[str, Any]:
    return {"betas": (options.adam_beta1, options.adam_beta2), **optim_arguments(options)}


def _ademamix(options: OptimOptions) -> dict[str, Any]:
    """Adam's arguments with a third beta and ``alpha`` (Pagliardini et al. 2024, https://arxiv.org/abs/2409.03137)."""
    arguments = optim_arguments(options)
    betas = (
        arguments.pop("beta1", options.adam_beta1),
        arguments.pop("beta2", options.adam_beta2),
        arguments.pop("beta3", 0.9999),
    )
    return {"betas": betas, "eps": options.adam_epsilon, **arguments}


def _bnb_optimizer(class_name: str, arguments: Callable[[Any], dict[str, Any]], summary: str, **fixed: Any) -> Any:
    """A function that creates one of the library's optimizers."""

    def make(groups: Groups, options: OptimOptions, model: nn.Module | None = None) -> Optimizer:
        import bitsandbytes.optim

        modules = model.modules() if model else ()
        embeddings = {id(module.weight) for module in modules if isinstance(module, nn.Embedding)}
        kind = _with_32_bits(getattr(bitsandbytes.optim, class_name), embeddings)
        made: Optimizer = kind(groups, lr=options.learning_rate, **fixed, **arguments(options))
        return made

    make.__doc__ = summary
    return make


def _with_32_bits(kind: Any, weights: set[int]) -> Any:
    """The class with 32-bit moments for these weights. The library's own mechanism (GlobalOptimManager) stores ids of
    weights for the whole process, even after an id has been reused by another model.
    """

    class Kind(kind):  # type: ignore[misc]
        def get_config(self, gindex: int, pindex: int, group: dict[str, Any]) -> dict[str, Any]:
            found: dict[str, Any] = super().get_config(gindex, pindex, group)
            is_exempt = id(self.param_groups[gindex]["params"][pindex]) in weights
            return {**found, "optim_bits": 32} if is_exempt else found

    Kind.__name__ = Kind.__qualname__ = kind.__name__
    return Kind


def _register() -> None:
    """Register the optimizers under transformers' names, which include the number of bits and whether it is paged."""
    families: list[tuple[str, Callable[[Any], dict[str, Any]], str, tuple[str, ...]]] = [
        ("AdamW", _adam, "AdamW",
         ("adamw_bnb_8bit", "adamw_8bit", "paged_adamw_8bit", "paged_adamw_32bit")),
        ("Lion", _lion, "Lion", ("lion_8bit", "lion_32bit", "paged_lion_8bit", "paged_lion_32bit")),
        ("AdEMAMix", _ademamix, "AdEMAMix",
         ("ademamix", "ademamix_8bit", "paged_ademamix_8bit", "paged_ademamix_32bit")),
        ("RMSprop", optim_arguments, "RMSprop", ("rmsprop_bnb", "rmsprop_bnb_8bit", "rmsprop_bnb_32bit")),
    ]  # fmt: skip
    for class_name, arguments, title, names in families:
        for name in names:
            bits, is_paged = (8 if "8bit" in name else 32), name.startswith("paged_")
            fixed = {"optim_bits": bits} | ({"is_paged": True} if is_paged else {})
            summary = f"{title}, moments in {bits} bits{', paged to CPU memory' if is_paged else ''} (bitsandbytes)."
            leaves_out = UNUSED_OPTIONS.get(class_name, ())
            OPTIMIZERS.register(name, library=LIBRARY, leaves_out=leaves_out, reads_model=True)(
                _bnb_optimizer(class_name, arguments, summary, **fixed)
            )


_register()
