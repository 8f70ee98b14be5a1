"""The feed-forward part of a model's last layer, at the positions that are learned and nowhere else.

In: a backbone, positions. Out: its last feed-forward part, and a context in which that answers for the positions alone.
Behind the last attention no position looks at another one any more, so what the last feed-forward part says of a
question that nobody learns is thrown away. That part is most of a layer's arithmetic: with eight layers and a third of
the tokens not learned, two to three percent of the whole.
"""

# B rows, T tokens in a row, N positions, H hidden size

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

_NAMES = ("mlp", "feed_forward")
_WORTH = 0.9
"""Share of the positions above which to pick rows costs about what it spares."""


@dataclass(frozen=True)
class LastFeedForward:
    """
    Args:
        layer: the last layer. part: its feed-forward part.
    """

    layer: nn.Module
    part: nn.Module

    def spares(self, positions: Tensor, tokens: int) -> bool:
        """Whether to answer for ``positions`` (N,) alone is less work, and possible: a layer that is computed again in
        the backward pass does so outside of any context, and a compiled one is compiled anew when a part of it changes.
        """
        is_fixed = getattr(self.layer, "gradient_checkpointing", False) or self.layer._compiled_call_impl is not None
        return not is_fixed and 0 < len(positions) < _WORTH * tokens

    @contextmanager
    def only_at(self, positions: Tensor) -> Iterator[None]:
        """Inside it the part answers zero but at ``positions`` (N,), counted through its rows (B, T, H)."""
        before, whole = vars(self.part).get("forward"), self.part.forward

        def forward(x: Tensor) -> Tensor:
            some = whole(x.flatten(0, -2).index_select(0, positions).unsqueeze(0)).squeeze(0)
            answers: Tensor = some.new_zeros(x.shape[:-1].numel(), some.shape[-1]).index_copy(0, positions, some)
            return answers.view(*x.shape[:-1], -1)

        self.part.forward = forward
        try:
            yield
        finally:
            if before is None:
                del self.part.forward
            else:
                self.part.forward = before


def last_feed_forward(backbone: Any) -> LastFeedForward | None:
    """By the names of the parts; whether it is one has to be asked (``ops.probe.find_head``)."""
    count = getattr(backbone.config.get_text_config(), "num_hidden_layers", None)
    stacks = (module for module in backbone.modules() if isinstance(module, nn.ModuleList) and len(module) == count)
    layer = next((stack[-1] for stack in stacks if len(stack)), None)
    parts = (getattr(layer, name, None) for name in _NAMES)
    part = next((part for part in parts if isinstance(part, nn.Module)), None)
    return None if layer is None or part is None else LastFeedForward(layer, part)
