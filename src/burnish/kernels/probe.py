"""Probes: determine a model's behavior by forward passes over a few tokens.

Neither the name of a model nor its config reliably tells whether it separates the sequences of a row, or how it
computes logits from its last hidden states. A probe takes a few forward passes over about twenty tokens in evaluation
mode. It does not change weights, gradients, random states and the mode of any module.
"""

# T tokens, H hidden size, V vocabulary

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, cast

import torch
from torch import Tensor, nn

from burnish.utils.patching import Reason, temporary_hook

REFUSALS = (TypeError, ValueError, RuntimeError, LookupError, AttributeError, AssertionError)
"""Errors that models raise for unsupported inputs. They count as a result of the probe."""

_NEIGHBOUR, _LENGTH = 9, 13
_LEAK = 0.05
_SCALE = 1024.0
_PROBE = Reason("head", "a verification forward pass calls it with larger hidden states")


def isolates_sequences(model: nn.Module) -> bool:
    """Whether a sequence has the same logits alone and after another sequence in the same row.

    The other sequence is replaced, and the logits must not change. If they are not exactly equal (in a mixture of
    experts other tokens influence the order in which sums are rounded), they may change by at most a twentieth of the
    change that occurs if the sequence attends to the other one. Bloom, state-space models and some eager attention
    implementations silently mix sequences, as do all models with ``use_cache=True``.
    """
    try:
        with probe_mode(model) as logits_of:
            neighbour, other, tokens = (
                random_tokens(model, n, seed) for seed, n in enumerate((_NEIGHBOUR, 9, _LENGTH))
            )
            alone = logits_of(tokens)
            beside, beside_other = (
                logits_of(torch.cat([first, tokens], 1), **_two_sequences(tokens.device))[:, _NEIGHBOUR:]
                for first in (neighbour, other)
            )
            if not is_close(beside, alone, model):
                return False
            if torch.equal(beside, beside_other):
                return True
            seen, seen_other = (
                logits_of(torch.cat([first, tokens], 1))[:, _NEIGHBOUR:] for first in (neighbour, other)
            )
            return bool((beside - beside_other).abs().max() < _LEAK * (seen - seen_other).abs().max())
    except REFUSALS:
        return False


def shares_prefixes(model: nn.Module) -> bool:
    """Whether prefix sharing is possible: two sequences with a common prefix that is computed once
    (``data.batches.batching``) have the same logits as alone, and the model draws no random numbers in training.

    With dropout, for example, the prefix would differ between the two sequences. The state of the random generators is
    compared as well, because the dropout of an adapter that is still zero changes gradients only. Rotary positions that
    depend on the longest row of a batch cannot be detected with a few tokens; they are read from the config.
    """
    if _has_length_dependent_rope(unwrap_peft(model).config):
        return False
    try:
        with probe_mode(model) as logits_of:
            shared, first, second = (
                random_tokens(model, n, seed) for seed, n in enumerate((_NEIGHBOUR, _LENGTH, _LENGTH))
            )
            together = logits_of(torch.cat([shared, first, second], 1), **_shared_prefix_batch(shared.device))
            for own, place in ((first, _NEIGHBOUR), (second, _NEIGHBOUR + _LENGTH)):
                alone = logits_of(torch.cat([shared, own], 1))
                beside = torch.cat([together[:, :_NEIGHBOUR], together[:, place : place + _LENGTH]], 1)
                if not is_close(beside, alone, model):
                    return False
            model.train()
            before = _generators(shared.device)
            return torch.equal(logits_of(first), logits_of(first)) and torch.equal(before, _generators(shared.device))
    except REFUSALS:
        return False


def _has_length_dependent_rope(config: Any) -> bool:
    """Whether the frequencies of rotary positions depend on the length of the input
    (https://huggingface.co/docs/transformers/internal/rope_utils).
    """
    found = getattr(config.get_text_config(), "rope_parameters", None) or {}
    kinds = [found, *(value for value in found.values() if isinstance(value, dict))]  # global, or per type of layer
    return any(kind.get("rope_type") in {"dynamic", "longrope"} for kind in kinds)


Only = Callable[[Tensor], AbstractContextManager[object]]


@dataclass(frozen=True)
class Head:
    """The head of a model, from last hidden states to logits: ``softcap(scale * linear(hidden))``.

    Args:
        backbone: ids -> hidden states (B, T, H).
        output: (B, T, H) -> (B, T, V): a linear layer, whose weight may be tied to the embedding's, or peft's wrapper
            of one that is trained as a whole.
        scale: factor before the cap (Cohere, Granite).
        softcap: logits become ``softcap * tanh(logit / softcap)`` (Gemma 2).
        only: positions (N,) -> context manager for a forward pass whose hidden states are only read there.
        scales_input: whether the model applies the factor to the input of ``linear`` (MiniCPM3), not to its output.
    """

    backbone: nn.Module
    output: nn.Module
    scale: float = 1.0
    softcap: float | None = None
    only: Only = nullcontext
    scales_input: bool = False

    @property
    def linear(self) -> nn.Linear:
        """The linear layer in use. In a wrapper it is the trained copy, unless the adapter is disabled."""
        copies: Any = getattr(self.output, "modules_to_save", None)
        if copies is None:
            return cast(nn.Linear, self.output)
        wrapper: Any = self.output
        names = [] if wrapper.disable_adapters else [name for name in wrapper.active_adapters if name in copies]
        return cast(nn.Linear, copies[names[-1]] if names else wrapper.original_module)

    def of_linear_inputs(self) -> Head:
        """The head for inputs of ``linear`` that were captured in the model's own forward pass."""
        return replace(self, scale=1.0) if self.scales_input else self

    def hidden(self, **inputs: Any) -> Tensor:
        states: Tensor = self.backbone(**inputs)[0]
        return states

    def hidden_at(self, positions: Tensor, **inputs: Any) -> Tensor:
        """(N, H) the hidden states at ``positions`` (N,), indices into the flattened rows."""
        with self.only(positions):
            return self.hidden(**inputs).flatten(0, 1).index_select(0, positions)

    def logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.linear(hidden) * self.scale
        return self.softcap * torch.tanh(logits / self.softcap) if self.softcap else logits


@dataclass(frozen=True)
class Capabilities:
    """Results of the probes of a model; false or None if not supported or not probed.

    Args:
        model: the probed model.
        is_padding_free: whether concatenated sequences in one row are independent.
        shares_prefixes: whether common prefixes of sequences may be computed once.
        head: its head, if it is a plain linear layer.
        only: see ``Head``, for a loss without the language model head.
        makes_some_logits: whether it can compute the logits of selected positions only.
        notes: sentences for the user.
    """

    model: nn.Module
    is_padding_free: bool = False
    shares_prefixes: bool = False
    head: Head | None = None
    only: Only = nullcontext
    makes_some_logits: bool = False
    notes: tuple[str, ...] = ()


def find_head(model: nn.Module) -> Head | None:
    """Find the head of a causal language model. None if its logits do not follow the formula of ``Head``.

    Also None if the head is not a plain linear layer (quantized, adapted), or if it has hooks, which would not be
    called. For the comparison the hidden states are multiplied by a thousand, to detect a cap or an offset, which
    hardly changes small logits.
    """
    try:
        head = _claimed_head(model)
        if head is None or type(head.linear) is not nn.Linear or _has_hooks(head.linear) or _has_hooks(head.output):
            return None
        tokens, inputs = random_tokens(model, _LENGTH, seed=3), []
        keep = temporary_hook(head.linear, "forward_pre", lambda module, args: inputs.append(args[0]), _PROBE)
        with probe_mode(model) as logits_of, keep, _scaled_inputs(head.linear):
            output = logits_of(tokens)
            hidden = head.hidden(input_ids=tokens, use_cache=False)
            if not is_close(output, head.logits(hidden), model):
                return None
            return replace(head, scales_input=head.scale != 1.0 and not is_close(inputs[0], hidden, model))
    except REFUSALS:
        return None


def makes_some_logits(model: nn.Module) -> bool:
    """Whether the model can compute the logits of selected positions only: ``logits_to_keep=(N,)``."""
    try:
        tokens, chosen = random_tokens(model, _LENGTH, seed=4), torch.tensor([1, 4, 5], device=_device(model))
        with probe_mode(model) as logits_of:
            whole, some = logits_of(tokens), logits_of(tokens, logits_to_keep=chosen)
        # A trained prompt before the tokens (peft's prompt tuning) shifts the positions.
        return whole.shape[1] == _LENGTH and is_close(some, whole[:, chosen], model)
    except REFUSALS:
        return False


def preserves_logits(model: nn.Module, change: Callable[[], object]) -> bool:
    """Call ``change``, which modifies the model, and return whether its logits stay the same up to rounding. Not
    undone."""
    tokens = random_tokens(model, _LENGTH, seed=5)
    with probe_mode(model) as logits_of:
        before = logits_of(tokens)
        change()
        return is_close(logits_of(tokens), before, model)


def unwrap_peft(model: nn.Module) -> Any:
    """The model itself, or the one inside of a wrapper of the peft library."""
    unwrap = getattr(model, "get_base_model", None)
    return unwrap() if callable(unwrap) else model


def _claimed_head(model: nn.Module) -> Head | None:
    """The head according to the attributes and config of a transformers model."""
    inner = unwrap_peft(model)
    backbone, linear, config = inner.base_model, inner.get_output_embeddings(), inner.config.get_text_config()
    if backbone is inner or linear is None:
        return None
    scale = getattr(config, "logit_scale", None) or 1.0 / (getattr(config, "logits_scaling", None) or 1.0)
    return Head(backbone, linear, float(scale), getattr(config, "final_logit_softcapping", None))


@contextmanager
def probe_mode(model: nn.Module) -> Iterator[Callable[..., Tensor]]:
    """Context of a probe. Yields a function ids (1, T) -> logits (1, T, V). The model is restored afterwards."""
    modes = {module: module.training for module in model.modules()}
    device = _device(model)

    def logits_of(input_ids: Tensor, **inputs: Any) -> Tensor:
        logits: Tensor = model(input_ids=input_ids, use_cache=False, **inputs).logits
        return logits

    try:
        model.eval()
        random = torch.random.fork_rng([device] if device.type == "cuda" else [])
        with random, torch.no_grad(), _one_format(model, device):
            yield logits_of
    finally:
        for module, mode in modes.items():
            module.training = mode


def _one_format(model: nn.Module, device: torch.device) -> AbstractContextManager[Any]:
    """The autocast of a probe. Enabled if only some weights are in half precision, as in training of such a model,
    because a frozen bfloat16 layer and a trained float32 layer cannot be combined without it. Also enabled if all
    weights are in float32 and the attention has no kernel for that. Otherwise disabled, even inside an autocast of the
    caller.
    """
    halves = _formats(model) & {torch.bfloat16, torch.float16}
    is_mixed = bool(halves) and len(_formats(model)) > 1
    return torch.autocast(device.type, halves.pop() if is_mixed else None, enabled=is_mixed)


def _formats(model: nn.Module) -> set[torch.dtype]:
    """The dtypes in which a model computes."""
    formats = {p.dtype for p in model.parameters() if p.is_floating_point()}
    attention = str(getattr(unwrap_peft(model).config, "_attn_implementation", ""))
    # Flash attention, under transformers' names or as a kernel of the hub (owner/name), supports 16 bits only.
    return formats | {torch.bfloat16} if "flash" in attention and formats == {torch.float32} else formats


@contextmanager
def _scaled_inputs(linear: nn.Linear) -> Iterator[None]:
    with temporary_hook(linear, "forward_pre", lambda module, inputs: (inputs[0] * _SCALE, *inputs[1:]), _PROBE):
        yield


def _two_sequences(device: torch.device) -> dict[str, Any]:
    """A padding-free batch of two sequences, without the ids (``data.batches.batching.collate_padding_free``)."""
    position_ids = torch.cat([torch.arange(_NEIGHBOUR), torch.arange(_LENGTH)]).unsqueeze(0).to(device)
    begins = torch.tensor([0, _NEIGHBOUR, _NEIGHBOUR + _LENGTH], dtype=torch.int32, device=device)
    lengths = {"max_length_q": _LENGTH, "max_length_k": _LENGTH}
    return {"position_ids": position_ids, "cu_seq_lens_q": begins, "cu_seq_lens_k": begins, **lengths}


def _shared_prefix_batch(device: torch.device) -> dict[str, Any]:
    """A batch of two sequences with a shared prefix, without the ids (``data.batches.batching``)."""
    whole = _NEIGHBOUR + _LENGTH
    own = torch.arange(_NEIGHBOUR, whole)
    lengths, widths = (_NEIGHBOUR, _LENGTH, _LENGTH), (_NEIGHBOUR, whole, whole)
    begins, key_starts = (
        torch.tensor([0, *accumulate(counts)], dtype=torch.int32, device=device) for counts in (lengths, widths)
    )
    shared = (0, _NEIGHBOUR)
    return {
        "position_ids": torch.cat([torch.arange(_NEIGHBOUR), own, own]).unsqueeze(0).to(device),
        "cu_seq_lens_q": begins, "cu_seq_lens_k": key_starts, "max_length_q": _LENGTH, "max_length_k": whole,
        "key_runs": (shared, shared, (_NEIGHBOUR, _LENGTH), shared, (whole, _LENGTH)),
    }  # fmt: skip


def random_tokens(model: nn.Module, length: int, seed: int) -> Tensor:
    """(1, T) random ids of the vocabulary, the same for a seed."""
    vocabulary = unwrap_peft(model).get_input_embeddings().weight.shape[0]
    drawn = torch.randint(vocabulary, (1, length), generator=torch.Generator().manual_seed(seed))
    return drawn.to(_device(model))


def _generators(device: torch.device) -> Tensor:
    """The state of the random generators that a model on ``device`` uses."""
    own = [torch.cuda.get_rng_state(device)] if device.type == "cuda" else []
    return torch.cat([torch.get_rng_state(), *own])


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


def is_close(a: Tensor, b: Tensor, model: nn.Module) -> bool:
    """Whether both are equal up to rounding in the coarsest dtype of the weights: half of its digits agree."""
    tolerance = max(torch.finfo(dtype).eps for dtype in _formats(model)) ** 0.5
    return bool((a.float() - b.float()).abs().max() <= tolerance * b.float().abs().max())


def _has_hooks(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)
