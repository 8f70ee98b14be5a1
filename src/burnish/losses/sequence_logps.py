"""Compute log-probabilities of whole responses with a language model, for preference learning.

In: a micro-batch of sequences whose responses are trained and whose prompts are not. Out: sums over the trained tokens
of each sequence, with gradient. Only positions that predict a trained token pass the head, and never all logits at once
(``kernels.token_logps``). Sequences are padding-free and share prefixes if model and run allow it.
"""

# S sequences in a micro-batch, N trained tokens in it, T tokens, H hidden size, V vocabulary

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from burnish.kernels.probe import Head, unwrap_peft
from burnish.kernels.tied import TIED
from burnish.kernels.token_logps import LogpRules, TokenLogps, linear_token_logps, plain_token_logps
from burnish.loop.protocols import Parallel
from burnish.loop.types import Batch, Row
from burnish.losses.base import Collate, WrappedModel
from burnish.losses.lm import hidden_and_weight, tied_embedding
from burnish.losses.logits import logits_at, model_inputs, target_positions
from burnish.utils.patching import PatchOptions, allows_patch


class SequenceValues(NamedTuple):
    """Log-probabilities of the trained tokens, and sums over each sequence, (S,) float32.

    Only ``token_logps`` and ``logps`` have a gradient, and ``token_entropy`` if the rules request it. Token n belongs
    to the sequence ``batch["owner"][n]``.
    """

    token_logps: Tensor  # (N,) in nats, each times its factor
    logps: Tensor  # sums of ``token_logps``
    correct: Tensor  # number of correctly predicted tokens; zero if not requested
    entropy: Tensor  # in nats; zero if not requested
    sum_squared_probs: Tensor  # log p(token) - ln Σ_v p(v)²; zero if not requested
    mean_logits: Tensor  # mean over the vocabulary; zero if the batch has no ``mean_row``
    aux: Tensor | None  # () the router's loss, a mean over tokens
    token_entropy: Tensor  # (N,) in nats; zero if not requested
    token_values: Tensor | None = None  # (N,) of a value head, before each token


def with_images(row: Row, prefix: str = "") -> Row:
    """The images of a sequence of ``row``, if it has any. ``prefix`` is that of the column in the row."""
    return {"images": row[f"{prefix}images"]} if row.get(f"{prefix}images") else {}


def collate_sequences(collate: Collate, sequences: Sequence[Row]) -> Batch:
    """A micro-batch of single sequences.

    Returns:
        The result of ``collate``, with
        target_positions: (N,) positions whose next token is trained, in the flattened batch.
        owner: (N,) the sequence of each target position.
        lengths: (S,) float32, number of trained tokens of each sequence, at least 1.
    """
    numbered: list[Row] = [{**row, "sequence": [at] * len(row["input_ids"])} for at, row in enumerate(sequences)]
    batch = collate(numbered)
    trained = target_positions(batch["labels"])
    owner = batch.pop("sequence").flatten()[trained + 1]
    lengths = torch.bincount(owner, minlength=len(sequences)).clamp(min=1).float()
    return {**batch, "target_positions": trained, "owner": owner, "lengths": lengths}


def factors_beyond(owner: Tensor, limits: Tensor, factor: float) -> Tensor:
    """(N,) 1 for the first ``limits[s]`` trained tokens of sequence s, ``factor`` for the others.

    Args:
        owner: (N,) as in ``collate_sequences``; the tokens of a sequence are in order.
        limits: (S,).
        factor: value beyond the limit.
    """
    place = torch.empty_like(owner)
    for sequence in range(len(limits)):
        own = owner == sequence
        place[own] = torch.arange(int(own.sum()))
    return torch.where(place < limits[owner], 1.0, factor)


class SequenceModel(WrappedModel):
    """A causal language model that returns log-probabilities of responses.

    Args:
        model: a model of transformers, with or without adapter.
        head: the model's head; None: the model computes its logits.
        makes_some_logits: whether the model can compute the logits of selected positions only.
        rules: which further values are computed for each token.
        needs_router: whether the router's loss is computed.
        patches: whether the embedding may be patched.
        batch_keys: keys of batches that are not model inputs, besides the general ones.
        value_head: (N, H) -> (N,), applied to the hidden states that predict the tokens.
    """

    def __init__(
        self, model: nn.Module, head: Head | None, makes_some_logits: bool, rules: LogpRules, needs_router: bool,
        patches: PatchOptions, batch_keys: Collection[str] = (), value_head: nn.Module | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self._batch_keys, self._patches = batch_keys, patches
        self.model = model
        self._head = head
        self._tied = (
            tied_embedding(unwrap_peft(model), head) if head is not None and allows_patch(patches, TIED) else None
        )
        self._makes_some_logits = makes_some_logits
        self._rules = rules
        self._needs_router = needs_router
        self.value_head = value_head

    def without_head(self, model: nn.Module) -> SequenceModel:
        """The same for another model that computes its logits itself, such as a wrapped one."""
        made = SequenceModel(model, None, False, self._rules, self._needs_router, self._patches, self._batch_keys)
        return made.train(model.training)

    def forward(self, batch: Batch) -> SequenceValues:
        trained, owner = batch["target_positions"], batch["owner"]
        targets = batch["labels"].flatten()[trained + 1].clamp(min=0)  # those of a padding batch get weight 0 later
        inputs = model_inputs(batch, self._batch_keys)
        if self._head is not None and not self._needs_router:
            tokens, mean_logits, values = self._in_chunks(self._head, inputs, trained, targets, batch)
            aux = None
        else:
            tokens, mean_logits, aux = self._from_logits(inputs, trained, targets)
            values = None
        count = len(batch["lengths"])
        logps = tokens.logps * batch["factors"] if "factors" in batch else tokens.logps
        return SequenceValues(
            logps, owner_sums(logps, owner, count), owner_sums(tokens.correct, owner, count),
            owner_sums(tokens.entropy.detach(), owner, count),
            owner_sums(tokens.sum_squared_probs, owner, count), owner_sums(mean_logits, owner, count),
            aux, tokens.entropy, values,
        )  # fmt: skip

    def _in_chunks(
        self, head: Head, inputs: dict[str, Any], trained: Tensor, targets: Tensor, batch: Batch
    ) -> tuple[TokenLogps, Tensor, Tensor | None]:
        hidden, weight = hidden_and_weight(head, self._tied, trained, inputs)
        values = None if self.value_head is None else self.value_head(hidden)
        if head.scale != 1.0:
            hidden = hidden * head.scale
        tokens = linear_token_logps(
            hidden, weight, targets, self._rules, head.linear.bias, batch.get("logp_gradients")
        )  # fmt: skip
        mean_row = batch.get("mean_row")
        means = torch.zeros_like(tokens.correct) if mean_row is None else hidden.detach().float() @ mean_row
        return tokens, means, values

    def _from_logits(
        self, inputs: dict[str, Any], trained: Tensor, targets: Tensor
    ) -> tuple[TokenLogps, Tensor, Tensor | None]:
        """Compute log-probabilities from the model's logits."""
        of_trained, output = logits_at(self.model, inputs, trained, self._makes_some_logits, self._needs_router)
        aux = output.aux_loss if self._needs_router else None
        return plain_token_logps(of_trained, targets, self._rules), of_trained.detach().float().mean(-1), aux


def mean_row(head: Head | None, parallel: Parallel) -> Tensor | None:
    """(H,) mean over the rows of the head's weight; its product with a hidden state is the mean logit.

    Returns:
        (0,) if the model computes its logits itself, whose mean is taken then. None if the mean logit is not available,
        for example because the head is sharded.
    """
    if parallel.shards_weights:
        return None
    if head is None:
        return torch.empty(0)
    if head.softcap is not None or getattr(head.linear, "bias", None) is not None:
        return None
    return head.linear.weight.detach().mean(0, dtype=torch.float32)


def owner_sums(values: Tensor, owner: Tensor, count: int) -> Tensor:
    """(S,) the sum of ``values`` (N,) over each sequence."""
    return torch.zeros(count, dtype=values.dtype, device=values.device).index_add(0, owner, values)
