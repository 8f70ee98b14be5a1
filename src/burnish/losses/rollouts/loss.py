"""The loss of sampled completions, per token or per completion, as sums that are added over a step.

Input: for each token of a padding-free micro-batch the log-probability of the policy, with gradient, and its entropy;
the batch has the values at the time of generation and those of the reference. Output: a sum. Its quotient by
``num_items`` of the entire step is the loss of the step, so results do not depend on how a step is divided into
micro-batches.

Letters: ℓ = log π - log π_old per token, q = e^ℓ, A the advantage of a completion, m the mask of trained tokens.

Sources: GRPO 2402.03300, Dr. GRPO 2503.20783, DAPO 2503.14476, GSPO 2507.18071, CISPO 2506.13585, SAPO 2511.20347, RLOO
2402.14740; names and constants as in TRL 1.16. Means over all tokens or completions are means over the step; TRL
computes some of them per micro-batch.
"""

# S completions in a micro-batch, N tokens of completions in it

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from burnish.loop.protocols import Parallel
from burnish.loop.types import Batch, Loss, Metric, Sum
from burnish.losses.rollouts.options import CLIPPED_LOSSES, RolloutLossOptions
from burnish.losses.sequence_logps import owner_sums

BATCH_KEYS = frozenset(
    {
        "advantages", "token_mask", "token_weights", "old_logps", "ref_logps", "sampler_logps", "entropy_mask",
        "entropy_scale", "logp_gradients", "token_advantages",
    }
)  # fmt: skip
"""Keys of a batch that the loss reads, besides ``owner`` and ``items``; they are not passed to the model.

- ``owner``: (N,) index of the completion of a token.
- ``items``: (S,) 1, or 0 for a completion that only fills an empty micro-batch.
- ``advantages``: (S,).
- ``token_mask``: (N,) 1 for a trained token, 0 for one of a tool result or of a masked truncated completion.
- ``token_weights``: (N,) ``RolloutLoss.token_weights``.
- ``token_advantages``: (N,) advantages of the tokens, of a script; default: those of their completions.
- ``old_logps``: (N,) in nats, at the weights that sampled the completions; absent if those are the current weights.
- ``ref_logps``: (N,) in nats, of the reference model, if β is not 0.
- ``sampler_logps``: (N,) in nats, under the sampling distribution, for the off-policy mask; default: ``old_logps``.
- ``entropy_mask``: (N,) 1 for a token among those with the highest entropy; absent if all are.
- ``entropy_scale``: () factor that turns the sum of entropies into a mean over the tokens of the step.
- ``logp_gradients``: (N,) gradient of the loss with respect to the log-probabilities; absent if it depends on them.
"""
_TOKENS_SHARE = ("dapo", "bnpo", "cispo", "vespo")
_LOSSES_WITH_COMPLETION_MEANS = ("grpo", "sapo")
_ENTROPY_TIE_MARGIN = 1e-6
_LEAST_LOG, _MOST_LOG = math.log(1e-8), 20.0


class RolloutLossChoices(RolloutLossOptions):
    """The options of the loss."""

    max_completion_length: int


class _Tokens(NamedTuple):
    """Values of a micro-batch for the loss; each is (N,), except ``advantages`` and ``lengths`` (S,)."""

    logps: Tensor
    log_ratio: Tensor  # ℓ
    ratio: Tensor  # q, of the token or of its completion
    advantage: Tensor  # of the token, usually that of its completion
    mask: Tensor
    owner: Tensor
    lengths: Tensor  # Σ m of each completion
    advantages: Tensor


class RolloutLoss:
    """The loss of a run.

    Args:
        options: options of the run.
        leave_one_out: use RLOO's loss: one clipped ratio per completion, no KL term (it is part of the reward).
    """

    def __init__(self, options: RolloutLossChoices, leave_one_out: bool = False) -> None:
        self.options = options
        self.name = "rloo" if leave_one_out else options.rl_loss_type
        self.leave_one_out = leave_one_out
        self.epsilon_high = options.epsilon if options.epsilon_high is None else options.epsilon_high
        self.is_per_completion = leave_one_out or options.importance_sampling_level == "sequence"
        self.entropy = EntropyController(options)
        self.masks_entropy = not leave_one_out and options.top_entropy_quantile < 1
        self.has_bonus = not leave_one_out and (options.use_adaptive_entropy or options.entropy_coef > 0)

    # --- what shares the mean ---

    @property
    def beta(self) -> float:
        """Coefficient of the KL divergence; a script may change it during a run."""
        return 0.0 if self.leave_one_out else self.options.rl_beta or 0.0

    def token_weights(self, mask: Tensor, owner: Tensor, num_completions: int) -> Tensor:
        """Return (N,) the weight of each token in the sum, from ``token_mask`` (N,) and ``owner`` (N,)."""
        if self.name in _LOSSES_WITH_COMPLETION_MEANS:
            return mask / owner_sums(mask, owner, num_completions).clamp(min=1)[owner]
        return mask / self.options.max_completion_length if self.name == "dr_grpo" else mask

    def num_items(self, batch: Batch) -> Tensor:
        """Return () the divisor of the mean: trained tokens, or completions including masked ones."""
        items: Tensor = batch["token_mask"] if self.name in _TOKENS_SHARE else batch["items"]
        return items.sum()

    # --- what depends on the whole step ---

    def prepare_step(
        self, batches: Sequence[Batch], parallel: Parallel, entropies: Sequence[Tensor] | None = None
    ) -> list[Batch]:
        """Add ``entropy_mask`` and ``entropy_scale`` to each micro-batch if the loss needs them, and
        ``logp_gradients`` if they are known. Also ends the previous step for an adaptive entropy coefficient.
        Collective if one of the first two is needed.

        Args:
            entropies: (N,) of each micro-batch, in nats, at the weights that sampled the completions. Needed if
                ``masks_entropy``, unless the batches already have ``entropy_mask``.
        """
        made = list(batches)
        if self.masks_entropy and not all("entropy_mask" in batch for batch in made):
            assert entropies is not None, "entropies are needed for top_entropy_quantile"
            masks = high_entropy_masks(
                entropies, [batch["token_mask"] for batch in made], self.options.top_entropy_quantile, parallel
            )
            made = [{**batch, "entropy_mask": mask} for batch, mask in zip(made, masks, strict=True)]
        if self.has_bonus:
            self.entropy.end_step(parallel)
            counts = [torch.stack([self.num_items(batch).float(), _bonus_mask(batch).sum()]) for batch in made]
            items, tokens = parallel.sum(torch.stack(counts).sum(0)).unbind()
            made = [{**batch, "entropy_scale": items / tokens.clamp(min=1)} for batch in made]
        return [self._with_logp_gradients(batch) for batch in made]

    def _with_logp_gradients(self, batch: Batch) -> Batch:
        """Add ``logp_gradients`` if the gradient of the loss does not depend on the log-probabilities.

        Without ``old_logps`` the completions are those of the weights that train. Each ratio is 1, whatever the
        log-probabilities are, so the gradient is known before the forward pass.
        """
        if self.beta or self.has_bonus or {"old_logps", "ref_logps", "sampler_logps"} & batch.keys():
            return batch
        with torch.enable_grad():
            logps = torch.zeros_like(batch["token_mask"]).requires_grad_()
            loss = self(logps, torch.zeros_like(logps), batch, is_training=False)
            return {**batch, "logp_gradients": torch.autograd.grad(loss.total, logps)[0]}

    # --- the loss of a micro-batch ---

    def __call__(self, logps: Tensor, entropy: Tensor, batch: Batch, is_training: bool = True) -> Loss:
        """Return the part of a micro-batch in the loss of its step.

        Args:
            logps: (N,) of the policy, in nats, with gradient, at the temperature of the run.
            entropy: (N,) in nats; with gradient if ``has_bonus``.
            batch: with the keys of ``BATCH_KEYS``.
            is_training: whether the micro-batch belongs to a training step; only these update an adaptive entropy
                coefficient.
        """
        tokens = self._tokens(logps, batch)
        metrics: dict[str, Metric] = {"entropy": _mean_of_tokens(entropy, tokens.mask)}
        if self.name == "rloo":
            if "ref_logps" in batch:  # part of the reward, computed when the completions were sampled
                drawn = batch.get("old_logps", logps.detach())
                metrics["kl"] = _mean_of_tokens(drawn - batch["ref_logps"], tokens.mask)
            return Loss(self._of_completions(tokens, batch), metrics | self._clip_shares(tokens))
        per_token = self._policy_loss(tokens, metrics)
        if self.options.off_policy_mask_threshold is not None:
            per_token = per_token * self._off_policy_mask(tokens, batch)
        if "entropy_mask" in batch:
            per_token = per_token * batch["entropy_mask"]
        if self.beta:
            distance = batch["ref_logps"] - logps
            kl = distance.exp() - distance - 1  # k3 of http://joschu.net/blog/kl-approx.html
            kl = kl * tokens.ratio if self.options.use_bias_correction_kl else kl
            per_token = per_token + self.beta * kl
            metrics["kl"] = _mean_of_tokens(kl, tokens.mask)
        # The ratio of a masked token may be infinite, and infinity times 0 is NaN.
        total = torch.where(tokens.mask > 0, per_token * batch["token_weights"], 0).sum()
        if self.has_bonus:
            total = self._with_entropy_bonus(total, entropy, batch, metrics, is_training)
        return Loss(total, metrics)

    def _of_completions(self, tokens: _Tokens, batch: Batch) -> Tensor:
        """Return () the sum of RLOO's losses: one clipped ratio per completion, 1 for a completion without trained
        tokens."""
        log_ratio = owner_sums(tokens.log_ratio * tokens.mask, tokens.owner, len(tokens.lengths))
        ratio, advantages = log_ratio.exp(), tokens.advantages
        clipped = ratio.clamp(1 - self.options.epsilon, 1 + self.epsilon_high)
        losses: Tensor = torch.minimum(ratio * advantages, clipped * advantages) * batch["items"]
        return -losses.sum()

    def _tokens(self, logps: Tensor, batch: Batch) -> _Tokens:
        mask, owner, advantages = batch["token_mask"], batch["owner"], batch["advantages"].to(logps.dtype)
        log_ratio = logps - batch.get("old_logps", logps.detach())
        lengths = owner_sums(mask, owner, len(advantages))
        log_weight = log_ratio
        if self.is_per_completion:
            sums = owner_sums(log_ratio * mask, owner, len(advantages))
            log_weight = (sums if self.name == "rloo" else sums / lengths.clamp(min=1))[owner]
        advantage = batch["token_advantages"].to(logps.dtype) if "token_advantages" in batch else advantages[owner]
        return _Tokens(logps, log_ratio, log_weight.exp(), advantage, mask, owner, lengths, advantages)

    def _policy_loss(self, tokens: _Tokens, metrics: dict[str, Metric]) -> Tensor:
        """Return (N,) the loss of each token."""
        options, ratio, advantage = self.options, tokens.ratio, tokens.advantage
        if self.name in CLIPPED_LOSSES:
            metrics |= self._clip_shares(tokens)
            clipped = ratio.clamp(1 - options.epsilon, 1 + self.epsilon_high)
            bounded = ratio.clamp(max=options.delta) if options.delta else ratio
            return -torch.minimum(bounded * advantage, clipped * advantage)
        if self.name == "cispo":
            is_clipped = (ratio > self.epsilon_high) & (advantage > 0)
            metrics["cispo_clip_ratio"] = self._fraction(is_clipped.float(), tokens)
            return -ratio.clamp(max=self.epsilon_high).detach() * advantage * tokens.logps
        if self.name == "sapo":
            tau = torch.where(advantage > 0, options.sapo_temperature_pos, options.sapo_temperature_neg)
            return -torch.sigmoid(tau * (ratio - 1)) * 4 / tau * advantage
        phi = self._vespo_factors(tokens)
        metrics["vespo/phi_seq_mean"] = Sum(phi.sum(), torch.tensor(float(len(phi)), device=phi.device))
        return -phi[tokens.owner] * advantage * tokens.logps

    def _vespo_factors(self, tokens: _Tokens) -> Tensor:
        """Return (S,) the factor of each completion."""
        options, is_good = self.options, tokens.advantages >= 0
        clipped = tokens.log_ratio.detach().clamp(-_MOST_LOG, _MOST_LOG) * tokens.mask
        k = torch.where(is_good, options.vespo_k_pos, options.vespo_k_neg)
        decay = torch.where(is_good, options.vespo_lambda_pos, options.vespo_lambda_neg)
        return vespo_factors(owner_sums(clipped, tokens.owner, len(is_good)), k, decay)

    def _off_policy_mask(self, tokens: _Tokens, batch: Batch) -> Tensor:
        """Return (N,) 0 for tokens of a completion with A < 0 whose mean log-ratio to the sampling distribution is too
        large, else 1."""
        most, drawn = self.options.off_policy_mask_threshold, batch.get("sampler_logps")
        away = -tokens.log_ratio.detach() if drawn is None else drawn - tokens.logps.detach()
        mean = owner_sums(away * tokens.mask, tokens.owner, len(tokens.lengths)) / tokens.lengths.clamp(min=1)
        is_near: Tensor = (tokens.advantages >= 0) | (mean <= (math.inf if most is None else most))
        each: Tensor = is_near.to(away.dtype)[tokens.owner]
        return each

    def _with_entropy_bonus(
        self, total: Tensor, entropy: Tensor, batch: Batch, metrics: dict[str, Metric], is_training: bool
    ) -> Tensor:
        counted = _bonus_mask(batch)
        summed = (entropy * counted).sum()
        if is_training:
            self.entropy.add(summed, counted.sum())
        one = torch.ones((), device=total.device)
        metrics["policy_loss"] = total.detach()
        metrics["entropy_coef"] = Sum(one * self.entropy.coefficient, one, "last")
        scale: Tensor = batch["entropy_scale"]
        return total - self.entropy.current * scale * summed

    def _clip_shares(self, tokens: _Tokens) -> dict[str, Metric]:
        low = (tokens.ratio < 1 - self.options.epsilon) & (tokens.advantage < 0)
        high = (tokens.ratio > 1 + self.epsilon_high) & (tokens.advantage > 0)
        found: dict[str, Metric] = {
            f"clip_ratio/{name}_mean": self._fraction(clipped.float(), tokens)
            for name, clipped in (("low", low), ("high", high), ("region", low | high))
        }
        counts = (tokens.lengths > 0).sum().float()
        for name, clipped, reduction in (("low_min", low, "min"), ("high_max", high, "max")):
            shares = owner_sums(clipped * tokens.mask, tokens.owner, len(tokens.lengths)) / tokens.lengths.clamp(min=1)
            shares = shares[tokens.lengths > 0] if len(shares) else shares
            extreme = (shares.amin() if reduction == "min" else shares.amax()) if len(shares) else counts
            found[f"clip_ratio/{name}"] = Sum(extreme.detach(), counts, reduction)  # type: ignore[arg-type]
        return found

    def _fraction(self, values: Tensor, tokens: _Tokens) -> Sum:
        """Return the mean over tokens, or over completions for ratios per completion."""
        if not self.is_per_completion:
            return _mean_of_tokens(values, tokens.mask)
        has_tokens = (tokens.lengths > 0).float()
        shares = owner_sums(values * tokens.mask, tokens.owner, len(tokens.lengths)) / tokens.lengths.clamp(min=1)
        return Sum(shares.detach().sum(), has_tokens.sum())


@dataclass
class EntropyController:
    """The coefficient of the entropy bonus; with ``use_adaptive_entropy`` it follows the entropy of each step.

    The sums of the last step are those of this rank until ``end_step`` adds them up, so a checkpoint stores them for
    each rank.
    """

    options: RolloutLossChoices
    coefficient: float = field(init=False)
    last: float = field(init=False, default=math.inf)  # entropy of the last finished step, in nats
    _sums: list[float] = field(init=False, default_factory=lambda: [0.0, 0.0])
    _pending: list[Tensor] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self.coefficient = self.options.entropy_coef

    @property
    def current(self) -> float:
        """Return the coefficient of this step: an adaptive one is 0 while the entropy is above its target."""
        is_active = not self.options.use_adaptive_entropy or self.last <= self.options.entropy_target
        return self.coefficient if is_active else 0.0

    def add(self, total: Tensor, count: Tensor) -> None:
        """Add a micro-batch. Args: total: () sum of entropies in nats. count: () number of tokens."""
        if self.options.use_adaptive_entropy:
            self._pending.append(torch.stack([total.detach(), count.detach()]).double())

    def end_step(self, parallel: Parallel) -> None:
        """Update the coefficient from the entropy of the step whose micro-batches were added. Collective."""
        if not self.options.use_adaptive_entropy:
            return
        own = torch.tensor(self._collect_state(), dtype=torch.float64, device=parallel.device)
        total, count = parallel.sum(own).tolist()  # one device read per step, in this mode only
        self._sums = [0.0, 0.0]
        if count > 0 and math.isfinite(total):  # not in a step that is skipped (on_non_finite)
            options, self.last = self.options, total / count
            change = options.entropy_coef_delta * (1 if self.last <= options.entropy_target else -1)
            self.coefficient = min(max(self.coefficient + change, options.entropy_coef_min), options.entropy_coef_max)

    def _collect_state(self) -> list[float]:
        if self._pending:
            self._sums = torch.stack([*self._pending, self._pending[0].new_tensor(self._sums)]).sum(0).tolist()
            self._pending = []
        return self._sums

    def state_dict(self) -> dict[str, Any]:
        return {"coefficient": self.coefficient, "last": self.last, "sums": list(self._collect_state())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.coefficient, self.last, self._sums = state["coefficient"], state["last"], list(state["sums"])
        self._pending = []


def high_entropy_masks(
    entropies: Sequence[Tensor], masks: Sequence[Tensor], share: float, parallel: Parallel
) -> list[Tensor]:
    """Return (N,) for each micro-batch: 1 for the ``share`` of the trained tokens of the step with the highest entropy.

    The first tokens of a group have equal entropies, so the threshold may be a tie: tokens within a relative 1e-6 below
    it are included.

    Args:
        entropies, masks: (N,) of each micro-batch of this rank. Collective.
    """
    own = torch.cat([entropy[mask > 0] for entropy, mask in zip(entropies, masks, strict=True)]).detach().float()
    every = parallel.gather(own)
    threshold = linear_quantile(every, 1 - share) if len(every) else 0.0
    least = threshold - _ENTROPY_TIE_MARGIN * abs(threshold)
    return [(entropy.detach() >= least).to(mask.dtype) * mask for entropy, mask in zip(entropies, masks, strict=True)]


def vespo_factors(sums: Tensor, k: Tensor, decay: Tensor) -> Tensor:
    """Return φ = exp(λ + k w - λ e^w) of completions.

    Args:
        sums: w, the sum of the log-ratios of a completion, each within ±20.
        k, decay: k and λ of each completion.
    """
    w = sums.clamp(_LEAST_LOG, _MOST_LOG)
    factors: Tensor = (decay + k * w - decay * w.exp()).exp().nan_to_num(0.0)
    return factors


def linear_quantile(values: Tensor, quantile: float) -> float:
    """Return the quantile of ``values`` with linear interpolation; ``torch.quantile`` is limited to 2²⁴ values."""
    place = quantile * (len(values) - 1)
    low = int(place)
    below = float(values.kthvalue(low + 1).values)
    above = float(values.kthvalue(min(low + 2, len(values))).values)
    return below + (place - low) * (above - below)


def _bonus_mask(batch: Batch) -> Tensor:
    mask: Tensor = batch["token_mask"]
    return mask * batch["entropy_mask"] if "entropy_mask" in batch else mask


def _mean_of_tokens(values: Tensor, mask: Tensor) -> Sum:
    return Sum(torch.where(mask > 0, values.detach() * mask, 0).sum(), mask.sum())
