"""``stage: ppo``: training on rewards with a value head, which predicts the remaining return before each token.

Input: prompts; each completion has one reward. A step batch of prompts becomes a rollout of one completion each. The
policy and the value head train on it for ``ppo_epochs`` epochs, in steps of ``per_device_train_batch_size`` x
``gradient_accumulation_steps`` completions. The formulas are in ``losses/rollouts/ppo.py``.

The options are LLaMA-Factory's, whose PPO does not run with current versions of its libraries. Its means per
micro-batch are means over the step here.
"""

# C completions of a rollout, N tokens of completions

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from burnish.checkpoint.parts import Part, Stateful
from burnish.config.errors import UserError
from burnish.config.options import option
from burnish.kernels.probe import Capabilities, unwrap_peft
from burnish.loop.modes import evaluating
from burnish.loop.protocols import Parallel
from burnish.loop.types import Batch, Loss, Sum
from burnish.losses.base import OBJECTIVES, Collate, RowEncoder
from burnish.losses.lm import aux_coefficient
from burnish.losses.preference_options import ReferenceOptions
from burnish.losses.reward import HeadState, ValueHead
from burnish.losses.rollouts.ppo import KlController, PpoLossOptions, ScoreMoments, estimates, ppo_loss
from burnish.models.generate import GenerationOptions
from burnish.models.reward_files import CRITIC
from burnish.rollouts.generation import reward_metrics, score_metrics, weighted_rewards
from burnish.rollouts.metrics import as_metrics, logp_difference
from burnish.rollouts.objective import RolloutObjective
from burnish.rollouts.options import DefaultsChoices, RolloutOptions
from burnish.rollouts.prompts import ObjectiveChoices
from burnish.rollouts.samples import ScoredCompletion

_LONGEST = 1024  # tokens of a completion by default; LLaMA-Factory's max_new_tokens


@dataclass
class PpoOptions(PpoLossOptions):
    """Proximal policy optimization."""

    ppo_buffer_size: int = option(
        1, "Number of steps per rollout: a rollout has ppo_buffer_size x per_device_train_batch_size x "
        "gradient_accumulation_steps prompts.", ge=1,
    )  # fmt: skip
    ppo_epochs: int = option(4, "Number of training passes over each rollout.", ge=1, aliases=("num_ppo_epochs",))
    ppo_score_norm: bool = option(False, "Normalize scores by the running mean and standard deviation.")
    ppo_ratio_threshold: float | None = option(
        10.0, "Skip the loss of steps whose mean probability ratio exceeds this value. none: do not check, which saves "
        "a forward pass per step.", gt=1,
    )  # fmt: skip


class PpoRunChoices(ObjectiveChoices, PpoOptions):
    """The options of the objective."""

    stage: str


class CriticState(HeadState):
    """The value head as a part of a checkpoint, which is not a checkpoint of a reward model."""

    def state_dict(self) -> dict[str, Tensor]:
        return {**super().state_dict(), CRITIC: torch.ones(1)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict({name: value for name, value in state.items() if name != CRITIC})


@OBJECTIVES.register(
    "ppo", options=PpoOptions, reads=(RolloutOptions, ReferenceOptions, GenerationOptions, "disable_dropout")
)
class PpoObjective(RolloutObjective):
    """Training on completions of the model itself, with one reward each (proximal policy optimization)."""

    batch_keys = RolloutObjective.batch_keys | {"old_values", "returns", "token_advantages"}
    compares_completions = False
    min_generations = 1
    choices: PpoRunChoices

    def __init__(self, options: PpoRunChoices, template: RowEncoder, tokenizer: Any = None) -> None:
        super().__init__(options, template, tokenizer)
        self.needs_reference = options.kl_coef != 0
        self.coefficient = KlController(options)
        self.scores = ScoreMoments()
        self.value_head: ValueHead | None = None

    @classmethod
    def default_options(cls, choices: DefaultsChoices, /) -> Mapping[str, Any]:
        longest = choices.max_new_tokens if choices.max_new_tokens > 0 else _LONGEST
        return {"temperature": 0.95, "top_p": 0.7, "top_k": 50, "rl_beta": 0.0, "num_generations": 1,
                "max_completion_length": longest}  # fmt: skip

    # --- sizes --------------------------------------------------------------------------------------------------------

    @property
    def micro_batches(self) -> int:
        return self.choices.gradient_accumulation_steps * self.choices.ppo_buffer_size

    @property
    def inner_steps(self) -> int:
        return self.steps_per_pass * self.choices.ppo_epochs

    @property
    def counts_rollouts(self) -> bool:
        """Whether ``max_steps`` counts rollouts: it does, as in LLaMA-Factory, and all steps of a rollout have the same
        learning rate."""
        return True

    @property
    def needs_old_logps(self) -> bool:
        return True

    # --- the model ----------------------------------------------------------------------------------------------------

    def configure(self, capabilities: Capabilities, collate: Collate) -> list[str]:
        notes, inner = super().configure(capabilities, collate), unwrap_peft(capabilities.model)
        if self.head is None or aux_coefficient(inner, self.options.router_aux_loss_coef):
            what = "stage: ppo requires a model with a plain linear LM head and no router loss."
            remedy = (
                "Set fused_loss: auto and router_aux_loss_coef: 0. With an adapter, lm_head cannot be trained in full "
                "(additional_target, or resize_vocab with new tokens)."
            )
            raise UserError(what, remedy=remedy, option="stage")
        embedding = inner.get_input_embeddings().weight
        self.value_head = ValueHead(embedding.shape[1]).to(embedding.device)
        return notes

    def own_parameters(self) -> list[tuple[str, nn.Parameter]]:
        assert self.value_head is not None
        return [(f"v_head.{name}", parameter) for name, parameter in self.value_head.named_parameters()]

    @property
    def parts(self) -> Mapping[str, Stateful | Part]:
        assert self.value_head is not None
        own: dict[str, Stateful | Part] = {
            "value_head": Part(CriticState(self.value_head), "value_head", is_of_model=True),
            "kl_coefficient": self.coefficient,
            "scores": self.scores,
        }
        return {**super().parts, **own}

    # --- a rollout ----------------------------------------------------------------------------------------------------

    def set_advantages(self, samples: Sequence[ScoredCompletion], is_eval: bool = False) -> dict[str, float]:
        """Set the advantage and the return of each token of a rollout, and update the KL coefficient. A completion
        without a score is not trained on."""
        names = [function.name for function in self.functions]
        metrics = score_metrics(weighted_rewards(samples, self.functions)) | reward_metrics(samples, names)
        if is_eval:
            return metrics
        self._set_estimates([sample for sample in samples if sample.is_scored])
        for sample in (sample for sample in samples if not sample.is_scored):
            sample.mask = [0] * len(sample.ids)
            sample.token_advantages = sample.returns = [0.0] * len(sample.ids)
        coefficient, kl = self.coefficient.coefficient, 0.0
        if self.needs_reference:
            old, ref = (_join_values([getattr(s, name) for s in samples]) for name in ("old_logps", "ref_logps"))
            kl = float((old - ref).sum()) / len(samples)
        self.coefficient.update(kl, len(samples))
        return {"objective/kl": kl, "kl_coef": coefficient, **metrics}

    def _set_estimates(self, samples: Sequence[ScoredCompletion]) -> None:
        """Set the advantage and the return of each token of completions with a score."""
        scores, lengths = self._scores(samples), torch.tensor([len(sample.ids) for sample in samples])
        old, values = (_join_values([getattr(s, name) for s in samples]) for name in ("old_logps", "old_values"))
        ref = _join_values([s.ref_logps for s in samples]) if self.needs_reference else old
        found = estimates(old, ref, values, scores, lengths, self.coefficient.coefficient, self.choices)
        sizes = lengths.tolist()
        for sample, advantages, returns in zip(
            samples, torch.split(found.advantages, sizes), torch.split(found.returns, sizes), strict=True
        ):
            sample.token_advantages, sample.returns = advantages.tolist(), returns.tolist()

    def _scores(self, samples: Sequence[ScoredCompletion]) -> Tensor:
        """Return (C,) the scores that a rollout is trained on."""
        found = weighted_rewards(samples, self.functions)
        if self.choices.ppo_score_norm:
            found = self.scores.normalize(found)
        if self.choices.missing_eos_penalty is not None:
            found -= self.choices.missing_eos_penalty * torch.tensor([not s.is_ended for s in samples]).double()
        return found

    def shuffle_number(self, generation: int, number_of_pass: int) -> int:
        return generation * self.choices.ppo_epochs + number_of_pass

    # --- a step -------------------------------------------------------------------------------------------------------

    def prepare_step(self, module: nn.Module, batches: Sequence[Batch], parallel: Parallel) -> Sequence[Batch]:
        prepared = super().prepare_step(module, batches, parallel)
        threshold = self.choices.ppo_ratio_threshold
        is_first = any(batch["metrics"] for batch in prepared)  # during a rollout: the ratio of each token is 1
        if threshold is None or is_first or not module.training:
            return prepared
        sums = torch.zeros(2, device=parallel.device)
        with torch.no_grad(), evaluating(module), parallel.precision():
            for batch in prepared:
                ratio = (module(_inputs(batch)).token_logps - batch["old_logps"]).exp()
                sums += torch.stack([(ratio * batch["token_mask"]).sum(), batch["token_mask"].sum()])
        total, count = parallel.sum(sums).tolist()
        if total <= threshold * count:
            return prepared
        return [{**batch, "token_weights": torch.zeros_like(batch["token_weights"])} for batch in prepared]

    def num_items(self, batch: Batch) -> Tensor:
        """Return () the number of tokens of completions."""
        items: Tensor = batch["token_mask"].sum()
        return items

    def loss(self, module: nn.Module, batch: Batch) -> Loss:
        values = module(_inputs(batch))
        if "token_advantages" in batch:
            loss = ppo_loss(values.token_logps, values.token_values, batch, self.choices)
        else:  # during an evaluation, which has no advantages
            loss = Loss(values.token_logps.sum() * 0)
        one, mask = torch.ones((), device=loss.total.device), batch["token_mask"]
        metrics = as_metrics(batch["metrics"], loss.total.device) | logp_difference(values.token_logps, batch)
        metrics["ppo/entropy"] = Sum((values.token_entropy.detach() * mask).sum(), mask.sum())
        is_skipped = (batch["token_weights"] == 0).all() & mask.any()
        metrics["ppo/skipped"] = Sum(is_skipped.float(), one)
        return replace(loss, sums={**loss.sums, **metrics})


def _inputs(batch: Batch) -> Batch:
    return {name: value for name, value in batch.items() if name != "metrics"}


def _join_values(columns: Sequence[list[float] | None]) -> Tensor:
    """Return (N,) the values of all tokens."""
    return torch.tensor([value for column in columns for value in column or ()], dtype=torch.float64)
