"""Golden rollout cases as steps on given completions: models, rows, forward passes, updates.

The rows of a step can be split into any micro-batches and over processes; the losses must be the same.
"""

import json
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import torch

from burnish.config.options import union
from burnish.data.batches.batching import BatchingOptions, collator
from burnish.kernels.probe import find_head
from burnish.kernels.token_logps import LogpRules
from burnish.loop.metrics import join_metrics_by_name
from burnish.loop.types import IGNORE_INDEX
from burnish.losses.rollouts.loss import BATCH_KEYS, RolloutLoss
from burnish.losses.sequence_logps import SequenceModel, collate_sequences
from burnish.models.patches.attention import make_padding_free
from burnish.parallel.create import create_parallel
from burnish.parallel.options import ParallelOptions
from burnish.rollouts.advantages import advantages
from burnish.rollouts.options import RolloutOptions
from burnish.utils.patching import PatchOptions

GOLDEN = Path(__file__).parents[1] / "golden"
Options = union("Options", RolloutOptions, BatchingOptions, ParallelOptions, PatchOptions)
NAMES = {"loss_type": "rl_loss_type", "beta": "rl_beta"}


@cache
def golden():
    return json.loads((GOLDEN / "rollouts.json").read_text(encoding="utf-8"))


def make_models(folder):
    """Create the models of the golden cases, whose weights are determined by their names."""
    made = {"__name__": "preference_models", "__file__": str(GOLDEN / "preference_models.py")}
    exec(compile((GOLDEN / "preference_models.py").read_text(), "preference_models.py", "exec"), made)
    made["main"](folder)
    return folder


def load(folder, name):
    return deepcopy(_loaded(folder, name))


@cache
def _loaded(folder, name):
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(folder / ("policy" if name == "adapter" else name), dtype=torch.float32)
    assert make_padding_free(base).is_padding_free
    if name != "adapter":
        return base.eval()
    from peft import PeftModel

    return PeftModel.from_pretrained(base, folder / "adapter", is_trainable=True).eval()


def options_of(case):
    config = dict(case["config"])
    temperature = config.pop("temperature", 1.0)
    made = {NAMES.get(name, name): value for name, value in config.items()}
    made.setdefault("rl_beta", 0.05 if case["trainer"] == "rloo" else 0.0)
    return Options(num_generations=made.pop("num_generations", 4), max_completion_length=12, **made), temperature


@dataclass
class Outcome:
    losses: list = field(default_factory=list)
    norms: list = field(default_factory=list)
    norms_of: list = field(default_factory=list)
    logged: list = field(default_factory=list)
    coefficients: list = field(default_factory=list)
    advantages: list = field(default_factory=list)
    moved: float = 0.0


class GoldenCase:
    """A running case. Args: cut: number of rows per micro-batch, or the numbers of rows of a step's micro-batches."""

    def __init__(self, case, folder, cut):
        self.case, self.cut = case, cut
        self.options, self.temperature = options_of(case)
        self.is_rloo = case["trainer"] == "rloo"
        self.loss = RolloutLoss(self.options, leave_one_out=self.is_rloo)
        self.parallel = create_parallel(Options(use_cpu=True))
        self.model = load(folder, "adapter" if case["model"] == "policy+adapter" else "policy")
        self.module = self._sequence_model(self.model)
        self.trained, _ = self.parallel.prepare(self.module, None)
        self.reference = self.module
        if self.options.rl_beta:
            name = {"policy+reference": "reference", "policy+adapter": "adapter"}.get(case["model"], "policy")
            self.reference = self._sequence_model(load(folder, name))
        self.collate = collator(Options(), 0, True)
        self.outcome = Outcome()

    def _sequence_model(self, model):
        head = find_head(model)
        assert head is not None
        rules = LogpRules(entropy=True, temperature=self.temperature, entropy_gradient=self.loss.has_bonus)
        return SequenceModel(model, head, False, rules, False, self.options, BATCH_KEYS | {"rows"})

    def batch(self, rows):
        sequences = [
            {"input_ids": row["prompt_ids"] + row["completion_ids"],
             "labels": [IGNORE_INDEX] * len(row["prompt_ids"]) + row["completion_ids"]}
            for row in rows
        ]  # fmt: skip
        batch = collate_sequences(self.collate, sequences)
        mask = torch.tensor([float(m) for row in rows for m in self.mask(row)])
        batch |= {"items": torch.ones(len(rows)), "token_mask": mask}
        return batch | {"token_weights": self.loss.token_weights(mask, batch["owner"], len(rows))}

    def mask(self, row):
        ids = row["completion_ids"]
        if self.options.mask_truncated_completions and ids[-1] != golden()["end_token"]:
            return [0] * len(ids)
        return row.get("env_mask") or [1] * len(ids)

    @torch.no_grad()
    def with_sampled_values(self, rows):
        """Return the rows with their values under the weights that sampled them."""
        batch = self.batch(rows)
        values, reference = self.module(batch), self.reference(batch)
        lengths = [len(row["completion_ids"]) for row in rows]
        columns = {"old": values.logps, "token_old": values.token_logps, "token_ref": reference.token_logps,
                   "entropy": values.token_entropy}  # fmt: skip
        per_row = {name: values.split(lengths) for name, values in columns.items() if name != "old"}
        rewards = torch.tensor([[float("nan") if r is None else r for r in row["rewards"]] for row in rows])
        groups = torch.arange(len(rows)) // self.options.num_generations
        penalties = None
        if self.is_rloo and self.options.rl_beta:
            difference = (values.token_logps - reference.token_logps) * batch["token_mask"]
            penalties = self.options.rl_beta * torch.zeros(len(rows)).index_add(0, batch["owner"], difference)
        weights = self.options.reward_weights or [1.0, 1.0]
        result = advantages(rewards, weights, groups, self.options, self.is_rloo, penalties)
        self.outcome.advantages.append(result.values)
        return [
            {**row, "advantage": result.values[index], **{name: column[index] for name, column in per_row.items()}}
            for index, row in enumerate(rows)
        ]

    def micro_batches(self):
        """Yield the rows of each micro-batch in the order of the case, generations ``num_iterations`` times."""
        case, generations, index = self.case, golden()["sets"][self.case["set"]], 0
        while True:
            rows = self.with_sampled_values(generations[index % len(generations)])
            index += 1
            for _ in range(self.options.num_iterations):
                size = case["per_device_train_batch_size"]
                yield from (rows[start : start + size] for start in range(0, len(rows), size))

    def cuts(self, rows):
        sizes = [self.cut] * len(rows) if isinstance(self.cut, int) else [*self.cut, len(rows)]
        while rows:
            size = sizes.pop(0)
            yield rows[:size]
            rows = rows[size:]

    def run(self):
        micro_batches = self.micro_batches()
        start = {name: p.detach().clone() for name, p in self.model.named_parameters() if p.requires_grad}
        for _ in range(self.case["max_steps"]):
            self.step([row for _ in range(self.case["gradient_accumulation_steps"]) for row in next(micro_batches)])
        squares = [(p.detach() - start[n]).square().sum() for n, p in self.model.named_parameters() if n in start]
        self.outcome.moved = float(torch.stack(squares).sum().sqrt())
        return self.outcome

    def _means(self, sums):
        """Return the means over the step of the metrics that are averaged over their own counts."""
        metrics = {n: m for n, m in join_metrics_by_name(sums).items() if getattr(m, "reduction", "") == "mean"}
        pairs = self.parallel.sum(torch.stack([torch.stack([m.total, m.count]) for m in metrics.values()]).double())
        return {name: total / count for name, (total, count) in zip(metrics, pairs.tolist(), strict=True)}

    def rows_of_rank(self, rows):
        """Return this rank's part of the rows of a step."""
        rank, world = self.parallel.rank, self.parallel.world_size
        return rows[len(rows) * rank // world : len(rows) * (rank + 1) // world]

    def step(self, rows):
        cuts = list(self.cuts(self.rows_of_rank(rows)))
        batches = [
            {
                **self.batch(part),
                "advantages": torch.stack([row["advantage"] for row in part]).float(),
                "old_logps": torch.cat([row["token_old"] for row in part]),
                "ref_logps": torch.cat([row["token_ref"] for row in part]),
            }
            for part in cuts
        ]
        entropies = [torch.cat([row["entropy"] for row in part]) for part in cuts]
        batches = self.loss.prepare_step(batches, self.parallel, entropies)
        items = self.parallel.sum(torch.stack([self.loss.num_items(batch) for batch in batches]).sum())
        self.model.zero_grad()
        total, sums = torch.zeros(()), []
        for at, batch in enumerate(batches):
            with self.parallel.microbatch(self.trained, last=at == len(batches) - 1):
                values = self.trained(batch)
                loss = self.loss(values.token_logps, values.token_entropy, batch)
                self.parallel.backward(loss.total * (self.parallel.world_size / items))
            total += loss.total.detach() / items
            sums.append(loss.sums)
        if self.loss.has_bonus:
            self.loss.entropy.end_step(self.parallel)
        self.outcome.coefficients.append(self.loss.entropy.coefficient)
        gradients = {n: p.grad for n, p in self.model.named_parameters() if p.grad is not None}
        self.outcome.losses.append(float(self.parallel.sum(total)))
        self.outcome.norms.append(float(torch.stack([g.norm() for g in gradients.values()]).norm()))
        self.outcome.norms_of.append({name: float(g.norm()) for name, g in gradients.items()})
        self.outcome.logged.append(self._means(sums))
        with torch.no_grad():
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    parameter -= self.case["learning_rate"] * parameter.grad
