"""The log-probability of each trained token, from hidden states and the head, without the logits of all tokens.

In: hidden states, the head's weight, the token that each position should predict. Out: a value per token, each with its
own gradient. For example, a preference loss sums them over a sequence and determines its factor after the forward pass.

``kernels.cross_entropy`` in contrast computes gradients in the forward pass for one common factor. If only the hidden
states need a gradient (frozen head), it is computed in the forward pass here as well, one vector per token, and
multiplied by the token's factor later: two matrix products in total. If the head is trained, its gradient is a sum in
which each token has its own factor, so the chunks of logits are recomputed in the backward pass: four products instead
of three, and no additional memory. If the caller knows these factors beforehand (``expected``), all gradients are
computed in the forward pass with three products. ``plain_token_logps`` computes the same from given logits.
"""

# N trained tokens, H hidden size, V vocabulary

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from burnish.kernels.cpu import buffer_pool
from burnish.kernels.cross_entropy import (
    Gradients,
    TokenLoss,
    chunk_length,
    even_length,
    logits_into,
    product_dtype,
    token_values,
)


@dataclass(frozen=True)
class LogpRules:
    """The values that are computed for each token.

    Args:
        softcap: logits become ``softcap * tanh(logit / softcap)``.
        accuracy: whether the most probable candidate is correct; takes one more pass over the logits.
        entropy: entropy of the prediction, in nats; takes one more.
        sum_squared_probs: log p(token) - ln Σ_v p(v)²; takes one more (WPO).
        temperature: logits are divided by it, after a softcap.
        entropy_gradient: whether the entropy has a gradient; chunks of logits are then recomputed in the backward pass.
    """

    softcap: float | None = None
    accuracy: bool = False
    entropy: bool = False
    sum_squared_probs: bool = False
    temperature: float = 1.0
    entropy_gradient: bool = False

    @property
    def of_loss(self) -> TokenLoss:
        return TokenLoss(softcap=self.softcap, accuracy=self.accuracy, entropy=self.entropy)


class TokenLogps(NamedTuple):
    """Values per token, all (N,) float32; zero if not requested. Only ``logps`` has a gradient, and ``entropy`` if
    requested.
    """

    logps: Tensor  # in nats, at most 0
    correct: Tensor  # 1 or 0
    entropy: Tensor  # in nats
    sum_squared_probs: Tensor  # log p(token) - ln Σ_v p(v)²


def linear_token_logps(
    hidden: Tensor, weight: Tensor, targets: Tensor, rules: LogpRules | None = None, bias: Tensor | None = None,
    expected: Tensor | None = None,
) -> TokenLogps:  # fmt: skip
    """Compute the values of each token from hidden states.

    Args:
        hidden: (N, H); N may be 0.
        weight: (V, H) the head. Products use autocast's dtype if enabled, else the weight's.
        targets: (N,) token ids.
        rules: which values are computed.
        bias: (V,) of the head.
        expected: (N,) gradient of the loss with respect to ``logps`` up to a common factor, if it is known. If the
            backward pass receives another one, the logits are recomputed. Only used on a CPU.
    """
    needs = tuple(
        torch.is_grad_enabled() and tensor is not None and tensor.requires_grad for tensor in (hidden, weight, bias)
    )
    dtype, rules = product_dtype(hidden.device, weight), rules or LogpRules()
    if rules.temperature != 1.0:  # c tanh(z / c) / T is c' tanh(z' / c') with z' = z / T and c' = c / T
        hidden, bias = hidden / rules.temperature, None if bias is None else bias / rules.temperature
        rules = replace(rules, softcap=rules.softcap / rules.temperature if rules.softcap else None)
    if hidden.device.type != "cpu" or rules.entropy_gradient or not (needs[1] or needs[2]):
        expected = None  # on a GPU, the comparison in the backward pass would wait for the device
    values = _LinearTokenLogps.apply(hidden, weight, bias, targets, rules, dtype, needs, expected)  # type: ignore[no-untyped-call]
    return TokenLogps(*values)


def plain_token_logps(logits: Tensor, targets: Tensor, rules: LogpRules | None = None) -> TokenLogps:
    """Compute the values from given logits (N, V), to which a cap has been applied; in float32."""
    rules = rules or LogpRules()
    every = torch.log_softmax(logits.float() / rules.temperature, -1)
    logps = every.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    measured, none = every.detach(), torch.zeros_like(logps.detach())
    return TokenLogps(
        logps,
        (measured.argmax(-1) == targets).float() if rules.accuracy else none,
        _entropy(every if rules.entropy_gradient else measured) if rules.entropy else none,
        logps.detach() - torch.logsumexp(2 * measured, -1) if rules.sum_squared_probs else none,
    )


def _entropy(logps: Tensor) -> Tensor:
    return -(logps.exp() * logps).sum(-1)


class _LinearTokenLogps(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, rules: LogpRules,
        dtype: torch.dtype, needs: tuple[bool, bool, bool], expected: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        is_recomputed = needs[1] or needs[2] or rules.entropy_gradient
        makes_gradient = needs[0] and not is_recomputed
        with torch.autocast(hidden.device.type, enabled=False):
            h, w, b = hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
            slopes = torch.empty_like(hidden) if makes_gradient else None  # (N, H) gradient of each token's logp
            gradients = None if expected is None else Gradients.zero(hidden, weight, bias, needs)
            factors = None if expected is None else -expected.float()
            found = []
            for part, logits in _chunks(h, w, b):
                sum_squared_probs = _sum_of_squares(logits, targets[part], rules)
                losses, correct, entropy = token_values(
                    logits, targets[part], None if factors is None else factors[part], rules.of_loss,
                    makes_gradient or gradients is not None,
                )  # fmt: skip
                found.append(
                    (
                        -losses,
                        correct,
                        entropy,
                        sum_squared_probs - losses if rules.sum_squared_probs else sum_squared_probs,
                    )
                )
                if slopes is not None:
                    slopes[part] = torch.mm(logits, w).neg_()
                if gradients is not None:
                    gradients.add(part, logits, h[part], w, is_first=part.start == 0)
        if is_recomputed:
            ctx.save_for_backward(hidden, weight, targets, *(() if bias is None else (bias,)))
        else:
            ctx.save_for_backward(*(() if slopes is None else (slopes,)))
        ctx.rules, ctx.dtype, ctx.needs, ctx.is_recomputed = rules, dtype, needs, is_recomputed
        ctx.expected, ctx.gradients = expected, gradients
        none = [hidden.new_zeros(0, dtype=torch.float32) for _ in TokenLogps._fields]
        values = tuple(map(torch.cat, zip(none, *found, strict=True)))
        ctx.mark_non_differentiable(values[1], values[3], *(() if rules.entropy_gradient else (values[2],)))
        return values  # type: ignore[return-value]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor, _: Tensor, grad_entropy: Tensor, *__: Tensor) -> tuple[Tensor | None, ...]:
        if not ctx.is_recomputed:
            slopes = ctx.saved_tensors[0] if ctx.saved_tensors else None
            of_hidden = None if slopes is None else slopes * upstream.unsqueeze(-1).to(slopes.dtype)
            return (of_hidden, *[None] * 7)
        gradients, ctx.gradients = ctx.gradients, None
        factor = None if gradients is None else _common_factor(upstream, ctx.expected)
        if factor is not None:
            return (*(None if each is None else each.mul_(factor) for each in gradients), *[None] * 5)
        hidden, weight, targets, *more = ctx.saved_tensors
        bias = more[0] if more else None
        with torch.autocast(hidden.device.type, enabled=False):
            h, w, b = hidden.to(ctx.dtype), weight.to(ctx.dtype), None if bias is None else bias.to(ctx.dtype)
            gradients = Gradients.zero(hidden, weight, bias, ctx.needs)
            for part, logits in _chunks(h, w, b):
                if ctx.rules.entropy_gradient:
                    _write_logit_gradients(logits, targets[part], upstream[part], grad_entropy[part], ctx.rules.softcap)
                else:  # d(-logp) / d(logits) times -upstream; the token's other values are not needed again
                    rules = TokenLoss(softcap=ctx.rules.softcap)
                    token_values(logits, targets[part], -upstream[part].float(), rules, True)
                gradients.add(part, logits, h[part], w, is_first=part.start == 0)
        return (*gradients, *[None] * 5)


_RELATIVE_TOLERANCE = 1e-5
"""Relative difference of two gradients that are the same but for rounding errors in float32."""


def _common_factor(upstream: Tensor, expected: Tensor) -> float | None:
    """Return f with ``upstream`` = f · ``expected``, both (N,); None if there is no such factor."""
    received, known = upstream.double(), expected.double()
    square = known.square().sum()
    factor = float((received * known).sum() / square) if square > 0 else 0.0
    is_same = (
        bool(((received - factor * known).abs() <= _RELATIVE_TOLERANCE * received.abs().max()).all())
        if len(known)
        else True
    )
    return factor if is_same else None


def _chunks(h: Tensor, w: Tensor, bias: Tensor | None) -> Iterator[tuple[slice, Tensor]]:
    """Yield (part, logits) of some tokens at a time. The next logits overwrite them."""
    size = even_length(len(h), chunk_length(len(w), h.device))
    whole = buffer_pool.empty((min(size, len(h)), len(w)), h.dtype, h.device)
    for begin in range(0, len(h), size):
        part = slice(begin, min(begin + size, len(h)))
        yield part, logits_into(h[part], w, bias, whole)


def _write_logit_gradients(
    logits: Tensor, targets: Tensor, grad_logps: Tensor, grad_entropy: Tensor, softcap: float | None
) -> None:
    """Overwrite logits (n, V) with the gradient of Σ grad_logps · log p(target) + grad_entropy · H:
    grad_logps (one_hot(target) - p) - grad_entropy p (log p + H), times ``1 - (logit / softcap)²`` if logits are
    capped."""
    capped = softcap * torch.tanh(logits.float() / softcap) if softcap else logits.float()
    logps = torch.log_softmax(capped, -1)
    grad_logps, grad_entropy = grad_logps.float().unsqueeze(-1), grad_entropy.float().unsqueeze(-1)
    slopes = -logps.exp() * (grad_logps + grad_entropy * (logps + _entropy(logps).unsqueeze(-1)))
    slopes.scatter_add_(-1, targets.unsqueeze(-1), grad_logps)
    logits.copy_(slopes * (1 - (capped / softcap).square()) if softcap else slopes)


def _sum_of_squares(logits: Tensor, targets: Tensor, rules: LogpRules) -> Tensor:
    """(n,) -ln Σ_v p(v)², before the logits are overwritten; zero if not requested."""
    if not rules.sum_squared_probs:
        return torch.zeros(len(targets), device=logits.device)
    wide = logits.float()
    if rules.softcap:
        wide = rules.softcap * torch.tanh(wide / rules.softcap)
    return 2 * torch.logsumexp(wide, -1) - torch.logsumexp(2 * wide, -1)
