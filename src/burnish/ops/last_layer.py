"""The feed-forward part of a model's last layer, at target positions only.

In: a backbone, positions. Out: its last feed-forward part, and a context in which that computes the positions alone.
After the last attention no position depends on another one any more, so the output of the last feed-forward part at
positions without a target is never used. That part is most of a layer's arithmetic: with eight layers and a third of
the tokens not learned, this saves two to three percent of the whole.
"""

# B rows, T tokens in a row, N positions, H hidden size

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from burnish.core.patching import Reason, patch, patched, standing

LAST = Reason("last feed-forward part", "it answers at the positions that are learned and nowhere else")
_NAMES = ("mlp", "feed_forward")
_WORTH = 0.9
"""Share of the positions above which selecting rows costs about as much as it saves."""


class LastFeedForward:
    """The last layer of a model.

    Args:
        layer: the last layer. part: its feed-forward part.
    """

    def __init__(self, layer: nn.Module, part: nn.Module) -> None:
        self.layer, self.part = layer, part
        self._whole = part.forward
        self._positions: Tensor | None = None

    def installed(self) -> LastFeedForward:
        """The one that answers for the part from now on: this, or the one that does already."""
        before = standing(self.part, "forward", LastFeedForward)
        if before is None:
            patch(self.part, "forward", self.answer, LAST)
        return before or self

    def spares(self, positions: Tensor, tokens: int) -> bool:
        """Return whether computing ``positions`` (N,) alone is less work, and possible: a layer under gradient
        checkpointing runs again outside of the context, and a compiled one would be compiled again."""
        is_fixed = getattr(self.layer, "gradient_checkpointing", False) or self.layer._compiled_call_impl is not None
        return not is_fixed and 0 < len(positions) < _WORTH * tokens

    @contextmanager
    def tried(self) -> Iterator[None]:
        """Inside it the part is asked by way of this, to be compared."""
        with patched(self.part, "forward", self.answer, LAST):
            yield

    @contextmanager
    def only_at(self, positions: Tensor) -> Iterator[None]:
        """The context in which the part's output is zero except at ``positions`` (N,), indices into its flattened rows
        (B, T, H)."""
        self._positions = positions
        try:
            yield
        finally:
            self._positions = None

    def answer(self, x: Tensor) -> Tensor:
        """The part's forward pass."""
        if self._positions is None:
            return self._whole(x)  # type: ignore[no-any-return]
        some = self._whole(x.flatten(0, -2).index_select(0, self._positions).unsqueeze(0)).squeeze(0)
        answers: Tensor = some.new_zeros(x.shape[:-1].numel(), some.shape[-1]).index_copy(0, self._positions, some)
        return answers.view(*x.shape[:-1], -1)


def last_feed_forward(backbone: Any) -> LastFeedForward | None:
    """Find the last feed-forward part by the names of modules; ``ops.probe.find_head`` checks that it is one."""
    count = getattr(backbone.config.get_text_config(), "num_hidden_layers", None)
    stacks = (module for module in backbone.modules() if isinstance(module, nn.ModuleList) and len(module) == count)
    layer = next((stack[-1] for stack in stacks if len(stack)), None)
    parts = (getattr(layer, name, None) for name in _NAMES)
    part = next((part for part in parts if isinstance(part, nn.Module)), None)
    return None if layer is None or part is None else LastFeedForward(layer, part)
