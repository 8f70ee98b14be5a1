"""What a model does, found by asking it: a few tokens go in, and what comes out is compared.

Neither the name of a model nor its config says whether it keeps neighbours apart or what it does between its last
hidden states and its logits, and both have been wrong where they were believed. A question costs some forward passes
over about twenty tokens, in evaluation mode; weights, gradients, random numbers and the mode of every module are as
before.
"""

# T tokens, H hidden size, V vocabulary

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from burnish.ops.last_layer import LastFeedForward, last_feed_forward

REFUSALS = (TypeError, ValueError, RuntimeError, LookupError, AttributeError, NotImplementedError)
"""What a model raises where it does not understand the question; that is an answer too."""

_NEIGHBOUR, _LENGTH = 9, 13
_LEAK = 0.05
_LOUD = 1024.0


def isolates_sequences(model: nn.Module) -> bool:
    """Whether a sequence gets the logits it would get alone when another one lies before it in the same row.

    The neighbour is exchanged: the logits must stay. Where they do not stay to the bit (in a mixture of experts the
    neighbour decides with whom a token is multiplied, hence how its sums are rounded), they may move by a twentieth
    of what the exchange does to a sequence that does see its neighbour. Bloom, state-space models and some eager
    attention fail here without a word, and ``use_cache=True`` makes all models fail.
    """
    try:
        with _asking(model) as ask:
            neighbour, other, tokens = (_tokens(model, n, seed) for seed, n in enumerate((_NEIGHBOUR, 9, _LENGTH)))
            alone = ask(tokens)
            beside, beside_other = (
                ask(torch.cat([first, tokens], 1), **_two_sequences(tokens.device))[:, _NEIGHBOUR:]
                for first in (neighbour, other)
            )
            if not _close(beside, alone, model):
                return False
            if torch.equal(beside, beside_other):
                return True
            seen, seen_other = (ask(torch.cat([first, tokens], 1))[:, _NEIGHBOUR:] for first in (neighbour, other))
            return bool((beside - beside_other).abs().max() < _LEAK * (seen - seen_other).abs().max())
    except REFUSALS:
        return False


def shares_prefixes(model: nn.Module) -> bool:
    """Whether two sequences that begin alike get the logits they would get alone when that beginning is computed once
    (``data.batching.collate_needed``), and whether a model in training draws nothing at random. Where it does, dropout
    say, a beginning is drawn for each sequence anew, and is not the same. The generators are asked besides the logits:
    the dropout of an adapter that is still zero shows in gradients only.

    Rotary positions that depend on the longest row of a batch cannot be asked with a few tokens; their config says so.
    """
    if _looks_at_the_longest(causal_lm(model).config):
        return False
    try:
        with _asking(model) as ask:
            shared, first, second = (_tokens(model, n, seed) for seed, n in enumerate((_NEIGHBOUR, _LENGTH, _LENGTH)))
            together = ask(torch.cat([shared, first, second], 1), **_two_from_one(shared.device))
            for own, place in ((first, _NEIGHBOUR), (second, _NEIGHBOUR + _LENGTH)):
                alone = ask(torch.cat([shared, own], 1))
                beside = torch.cat([together[:, :_NEIGHBOUR], together[:, place : place + _LENGTH]], 1)
                if not _close(beside, alone, model):
                    return False
            model.train()
            before = _generators(shared.device)
            return torch.equal(ask(first), ask(first)) and torch.equal(before, _generators(shared.device))
    except REFUSALS:
        return False


def _looks_at_the_longest(config: Any) -> bool:
    """Whether the frequencies of its positions change with the length of what comes in
    (https://huggingface.co/docs/transformers/internal/rope_utils)."""
    found = getattr(config.get_text_config(), "rope_parameters", None) or {}
    kinds = [found, *(value for value in found.values() if isinstance(value, dict))]  # of all layers, or by their kind
    return any(kind.get("rope_type") in {"dynamic", "longrope"} for kind in kinds)


@dataclass(frozen=True)
class Head:
    """How a model makes logits of its last hidden states: ``softcap(scale * linear(hidden))``.

    Args:
        backbone: ids -> hidden states (B, T, H).
        linear: (B, T, H) -> (B, T, V); its weight may be the embedding's.
        scale: before the cap; Cohere and Granite have one.
        softcap: logits become ``softcap * tanh(logit / softcap)`` (Gemma 2).
        last: the feed-forward part behind which positions do not meet any more; None where there is none.
    """

    backbone: nn.Module
    linear: nn.Linear
    scale: float = 1.0
    softcap: float | None = None
    last: LastFeedForward | None = None

    def hidden(self, **inputs: Any) -> Tensor:
        states: Tensor = self.backbone(**inputs)[0]
        return states

    def hidden_at(self, positions: Tensor, **inputs: Any) -> Tensor:
        """(N, H) of ``positions`` (N,), counted through the rows; of no others where that is less work."""
        is_less = self.last is not None and self.last.spares(positions, inputs["input_ids"].numel())
        with self.last.only_at(positions) if self.last is not None and is_less else nullcontext():
            return self.hidden(**inputs).flatten(0, 1).index_select(0, positions)

    def logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.linear(hidden) * self.scale
        return self.softcap * torch.tanh(logits / self.softcap) if self.softcap else logits


def find_head(model: nn.Module) -> Head | None:
    """The head of a causal language model, or None where its logits are not what ``Head`` says.

    None too where the head is no plain linear layer (quantised, adapted), or where somebody listens to its calls,
    since going past it would leave them out. The hidden states are made a thousand times as large for the comparison,
    so that a cap or an offset which small logits do not feel is seen.
    """
    try:
        head = _claimed_head(model)
        if head is None or type(head.linear) is not nn.Linear or _has_hooks(head.linear):
            return None
        tokens = _tokens(model, _LENGTH, seed=3)
        with _asking(model) as ask, _louder(head.linear):
            said = ask(tokens)
            hidden = head.hidden(input_ids=tokens, use_cache=False)
            if not _close(said, head.logits(hidden), model):
                return None
            return replace(head, last=_proven(last_feed_forward(head.backbone), head, tokens, hidden, model))
    except REFUSALS:
        return None


def _proven(
    last: LastFeedForward | None, head: Head, tokens: Tensor, hidden: Tensor, model: nn.Module
) -> LastFeedForward | None:
    """``last``, where the hidden states (1, T, H) of some positions are the same when it answers for these alone."""
    chosen = torch.tensor([1, 4, 5], device=tokens.device)
    if last is None:
        return None
    try:
        with last.only_at(chosen):
            some = head.hidden(input_ids=tokens, use_cache=False)[:, chosen]
    except REFUSALS:
        return None
    return last if _close(some, hidden[:, chosen], model) else None


def makes_some_logits(model: nn.Module) -> bool:
    """Whether the model makes the logits of chosen positions alone: ``logits_to_keep=(N,)``."""
    try:
        tokens, chosen = _tokens(model, _LENGTH, seed=4), torch.tensor([1, 4, 5], device=_device(model))
        with _asking(model) as ask:
            whole, some = ask(tokens), ask(tokens, logits_to_keep=chosen)
        # A learned prompt before the tokens (peft's prompt tuning) shifts the positions.
        return whole.shape[1] == _LENGTH and _close(some, whole[:, chosen], model)
    except REFUSALS:
        return False


def keeps_answers(model: nn.Module, change: Callable[[], None]) -> bool:
    """Whether the model says the same, but for rounding, once ``change`` was made to it. The change stays."""
    tokens = _tokens(model, _LENGTH, seed=5)
    with _asking(model) as ask:
        before = ask(tokens)
        change()
        return _close(ask(tokens), before, model)


def causal_lm(model: nn.Module) -> Any:
    """The model itself, or the one that an adapter of the peft library is wrapped around."""
    unwrap = getattr(model, "get_base_model", None)
    return unwrap() if callable(unwrap) else model


def _claimed_head(model: nn.Module) -> Head | None:
    """What the attributes and the config of a transformers model say of its head."""
    inner = causal_lm(model)
    backbone, linear, config = inner.base_model, inner.get_output_embeddings(), inner.config.get_text_config()
    if backbone is inner or linear is None:
        return None
    scale = getattr(config, "logit_scale", None) or 1.0 / (getattr(config, "logits_scaling", None) or 1.0)
    return Head(backbone, linear, float(scale), getattr(config, "final_logit_softcapping", None))


@contextmanager
def _asking(model: nn.Module) -> Iterator[Callable[..., Tensor]]:
    """Inside it a function ids (1, T) -> logits (1, T, V); the model is left as it was found."""
    modes = {module: module.training for module in model.modules()}
    device = _device(model)

    def ask(input_ids: Tensor, **inputs: Any) -> Tensor:
        logits: Tensor = model(input_ids=input_ids, use_cache=False, **inputs).logits
        return logits

    try:
        model.eval()
        random = torch.random.fork_rng([device] if device.type == "cuda" else [])
        with random, torch.no_grad(), _one_format(model, device):
            yield ask
    finally:
        for module, mode in modes.items():
            module.training = mode


def _one_format(model: nn.Module, device: torch.device) -> AbstractContextManager[Any]:
    """autocast where some weights are in half precision and others are not, as it is on when such a model is trained:
    without it a frozen layer in bfloat16 and a trained one in float32 do not multiply. The same where all weights are
    in float32 under an attention that has no kernel for it. Else none, whoever asks under one."""
    halves = _formats(model) & {torch.bfloat16, torch.float16}
    is_mixed = bool(halves) and len(_formats(model)) > 1
    return torch.autocast(device.type, halves.pop() if is_mixed else None, enabled=is_mixed)


def _formats(model: nn.Module) -> set[torch.dtype]:
    """The formats in which a model computes."""
    formats = {p.dtype for p in model.parameters() if p.is_floating_point()}
    attention = str(getattr(causal_lm(model).config, "_attn_implementation", ""))
    # Flash attention by transformers' names, and kernels of the hub (owner/name), have 16 bits only.
    return formats | {torch.bfloat16} if "flash" in attention and formats == {torch.float32} else formats


@contextmanager
def _louder(linear: nn.Linear) -> Iterator[None]:
    hook = linear.register_forward_pre_hook(lambda module, inputs: (inputs[0] * _LOUD, *inputs[1:]))
    try:
        yield
    finally:
        hook.remove()


def _two_sequences(device: torch.device) -> dict[str, Any]:
    """What a batch of two sequences laid flat says besides its ids (``data.batching.collate_flat``)."""
    position_ids = torch.cat([torch.arange(_NEIGHBOUR), torch.arange(_LENGTH)]).unsqueeze(0).to(device)
    begins = torch.tensor([0, _NEIGHBOUR, _NEIGHBOUR + _LENGTH], dtype=torch.int32, device=device)
    lengths = {"max_length_q": _LENGTH, "max_length_k": _LENGTH}
    return {"position_ids": position_ids, "cu_seq_lens_q": begins, "cu_seq_lens_k": begins, **lengths}


def _two_from_one(device: torch.device) -> dict[str, Any]:
    """What a batch says in which two sequences share what they begin with (``data.batching.collate_needed``)."""
    whole = _NEIGHBOUR + _LENGTH
    own = torch.arange(_NEIGHBOUR, whole)
    lengths, widths = (_NEIGHBOUR, _LENGTH, _LENGTH), (_NEIGHBOUR, whole, whole)
    begins, begins_of_keys = (
        torch.tensor([0, *accumulate(counts)], dtype=torch.int32, device=device) for counts in (lengths, widths)
    )
    shared = (0, _NEIGHBOUR)
    return {
        "position_ids": torch.cat([torch.arange(_NEIGHBOUR), own, own]).unsqueeze(0).to(device),
        "cu_seq_lens_q": begins, "cu_seq_lens_k": begins_of_keys, "max_length_q": _LENGTH, "max_length_k": whole,
        "key_runs": (shared, shared, (_NEIGHBOUR, _LENGTH), shared, (whole, _LENGTH)),
    }  # fmt: skip


def _tokens(model: nn.Module, length: int, seed: int) -> Tensor:
    """(1, T) some ids of the vocabulary, the same each time."""
    vocabulary = causal_lm(model).get_input_embeddings().weight.shape[0]
    drawn = torch.randint(vocabulary, (1, length), generator=torch.Generator().manual_seed(seed))
    return drawn.to(_device(model))


def _generators(device: torch.device) -> Tensor:
    """The state of those that a model on ``device`` draws from."""
    own = [torch.cuda.get_rng_state(device)] if device.type == "cuda" else []
    return torch.cat([torch.get_rng_state(), *own])


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


def _close(a: Tensor, b: Tensor, model: nn.Module) -> bool:
    """Equal but for rounding in the coarsest format among the weights: half of its digits agree."""
    tolerance = max(torch.finfo(dtype).eps for dtype in _formats(model)) ** 0.5
    return bool((a.float() - b.float()).abs().max() <= tolerance * b.float().abs().max())


def _has_hooks(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)
