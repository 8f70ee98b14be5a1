"""The feed-forward module of the last layer, computed only at the positions that the loss reads.

In: a causal language model of transformers. Out: a ``LastLayer``, if its hidden states at some positions are the same
as in a whole forward pass. Other tokens have keys and values in the last layer, but nothing reads their hidden states:
their feed-forward results are zero. In a row with a long prompt or an image, these are most of its tokens.
"""

# T tokens of all rows, N positions, H hidden size

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from burnish.kernels.probe import REFUSALS, is_close, probe_mode, random_tokens, unwrap_peft
from burnish.utils.patching import Reason, installed_hook, patch, restore

LAST_LAYER = Reason("last layer", "its feed-forward module is computed only at positions that contribute to the loss")
_POSITIONS = (1, 4, 5)


class LastLayer:
    """The feed-forward module of the last layer, limited to some positions inside of ``only``."""

    def __init__(self, backbone: nn.Module, feed_forward: nn.Module) -> None:
        self._repeatable: list[Any] = [part for part in backbone.modules() if hasattr(part, "gradient_checkpointing")]
        self._whole: Callable[[Tensor], Tensor] = feed_forward.forward
        self._positions: Tensor | None = None

    @contextmanager
    def only(self, positions: Tensor) -> Iterator[None]:
        """Context manager for a forward pass whose hidden states are only read at ``positions``.

        No effect under gradient checkpointing, which repeats the forward pass outside of the context.

        Args:
            positions: (N,) indices into the flattened rows, each once.
        """
        is_repeated = any(part.gradient_checkpointing for part in self._repeatable)
        self._positions = positions if len(positions) and not is_repeated else None
        try:
            yield
        finally:
            self._positions = None

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Apply the feed-forward module: (..., H) -> (..., H), zero outside of the positions passed to ``only``."""
        whole, positions = self._whole, self._positions
        if positions is None:
            return whole(hidden_states)
        some = whole(hidden_states.flatten(0, -2).index_select(0, positions).unsqueeze(0))  # (1, N, H)
        every = some.new_zeros(hidden_states.shape[:-1].numel(), some.shape[-1])
        return every.index_copy_(0, positions, some.squeeze(0)).view(*hidden_states.shape[:-1], -1)


def find_last_layer(model: nn.Module) -> LastLayer | None:
    """Find the last layer of a model, with or without adapter, and patch it.

    None if its feed-forward module is not found, has experts, or gives other results for some positions than for all.
    """
    inner = unwrap_peft(model)
    backbone, feed_forward = inner.base_model, _feed_forward(inner)
    if feed_forward is None:
        return None
    known = installed_hook(feed_forward, "forward", LastLayer)
    made = known or LastLayer(backbone, feed_forward)
    done = [] if known else [patch(feed_forward, "forward", made.forward, LAST_LAYER)]
    tokens = random_tokens(model, max(_POSITIONS) + 3, seed=6)
    positions = torch.tensor(_POSITIONS, device=tokens.device)
    try:
        with probe_mode(model):
            expected = backbone(input_ids=tokens, use_cache=False)[0].flatten(0, 1)[positions]
            with made.only(positions):
                found = backbone(input_ids=tokens, use_cache=False)[0].flatten(0, 1)[positions]
        is_same = is_close(found, expected, model)
    except REFUSALS:
        is_same = False
    if not is_same:
        restore(done)
        return None
    return made


def _feed_forward(model: Any) -> nn.Module | None:
    """The feed-forward module of a model's last layer, if it is dense."""
    config = model.config.get_text_config()
    count = getattr(config, "num_hidden_layers", None)
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model.base_model
    layers = next((m for m in decoder.modules() if isinstance(m, nn.ModuleList) and len(m) == count), None)
    if layers is None or hasattr(config, "router_aux_loss_coef"):
        return None
    found = getattr(layers[-1], "mlp", None)
    if found is None or any(isinstance(module, nn.ModuleList) for module in found.modules()):
        return None
    return found if all(weight.ndim <= 2 for weight in found.parameters()) else None
