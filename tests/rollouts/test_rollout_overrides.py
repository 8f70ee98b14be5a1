"""Overridden methods of ``GRPOTrainer`` and ``RLOOTrainer`` receive TRL's padded batch and the model itself; an
override that only calls the original changes nothing.
"""

import math
import shutil
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file
from test_rollout_trainers import prompts, trainer_of
from torch.utils.data import Sampler, SequentialSampler
from transformers import AutoTokenizer, MixtralForCausalLM

from burnish import GRPOTrainer, RLOOTrainer, UserError
from run_outputs import same_weights
from small_run import make_model
from tiny_models import mixtral_config
from two_processes import in_two_processes

pytestmark = [pytest.mark.run, pytest.mark.filterwarnings("ignore::UserWarning")]

KEYS = {"prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "advantages"}
METHODS = ["compute_loss", "training_step", "prediction_step", "_compute_loss", "_get_per_token_logps_and_entropies"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("overrides")
    make_model(folder / "model")
    return folder


def recording(kind, name):
    def method(self, model, inputs, *args, **kwargs):
        vars(self).setdefault("seen", []).append((model, inputs))
        return getattr(super(mine, self), name)(model, inputs, *args, **kwargs)

    mine = type(f"Noting{name}", (kind,), {name: method})
    return mine


def run(folder, output, kind, **options):
    options = {"max_steps": 2, "gradient_accumulation_steps": 2, "num_generations": 2, **options}
    trainer = trainer_of(
        folder,
        kind,
        output_dir=str(output),
        trainer_args={"eval_dataset": prompts(2)},
        num_generations_eval=2,
        **options,
    )
    trainer.train()
    logs = [log for log in trainer.state.log_history if "loss" in log]
    evaluated = {n: v for n, v in trainer.evaluate().items() if "runtime" not in n and "per_second" not in n}
    return trainer, logs, evaluated


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("kind", [GRPOTrainer, RLOOTrainer])
def test_override_receives_trl_batch_and_model_and_changes_nothing(kind, name, folder, tmp_path):
    mine, logs, evaluated = run(folder, tmp_path / "mine", recording(kind, name))
    _, expected, expected_evaluated = run(folder, tmp_path / "usual", kind)
    for log, other in zip(logs, expected, strict=True):
        for value in ("loss", "grad_norm", "entropy", "reward", "completions/mean_length"):
            assert log[value] == pytest.approx(other[value], rel=1e-4, abs=1e-6), value
    assert evaluated == {n: pytest.approx(v, rel=1e-4, abs=1e-6) for n, v in expected_evaluated.items()}
    model, inputs = mine.seen[0]
    assert model.config.vocab_size == model.get_input_embeddings().num_embeddings
    if name in ("training_step", "prediction_step"):
        assert {*map(frozenset, inputs)} == {frozenset({"prompt", "answer"})}
    elif isinstance(inputs, dict):
        assert inputs.keys() >= KEYS
        assert inputs["completion_ids"].shape == inputs["completion_mask"].shape
        assert ("old_logps" if kind is RLOOTrainer else "num_items_in_batch") in inputs


@pytest.mark.parametrize("kind", [GRPOTrainer, RLOOTrainer])
def test_constant_loss_override_is_reported(kind, folder, tmp_path):
    class CustomTrainer(kind):
        def _compute_loss(self, model, inputs):
            return model.get_output_embeddings().weight.sum() * 0 + 42

    _, logs, evaluated = run(folder, tmp_path, CustomTrainer, gradient_accumulation_steps=1)
    assert [log["loss"] for log in logs] == [42, 42]
    assert evaluated["eval_loss"] == 42
    assert all({"reward", "rewards/variety/mean", "completions/mean_length"} <= log.keys() for log in logs)
    assert {"eval_reward", "eval_completions/mean_length"} <= evaluated.keys()


@pytest.mark.parametrize("loss_type", ["dapo", "grpo"])
def test_loss_written_for_trl_equals_trainer_loss(loss_type, folder, tmp_path):
    """The loss is the formula of TRL's method, which reads attributes of the trainer and the batch."""

    class CustomTrainer(GRPOTrainer):
        def _compute_loss(self, model, inputs):
            ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
            mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
            kept, counted = inputs["completion_ids"].size(1), inputs["completion_mask"]
            logps, entropies, aux = self._get_per_token_logps_and_entropies(
                model, ids, mask, kept, compute_entropy=True
            )
            assert entropies.shape == logps.shape
            assert aux is None
            old = inputs.get("old_per_token_logps", logps.detach())
            ratio = (logps - old).exp()
            clipped = ratio.clamp(1 - self.epsilon_low, 1 + self.epsilon_high)
            advantages = inputs["advantages"].unsqueeze(1)
            loss = -torch.min(ratio * advantages, clipped * advantages)
            distance = inputs["ref_per_token_logps"] - logps
            loss = loss + self.beta * (distance.exp() - distance - 1) * ratio
            accumulation = self.current_gradient_accumulation_steps if model.training else 1
            if self.loss_type == "grpo":
                return ((loss * counted).sum(1) / counted.sum(1).clamp(min=1)).mean() / accumulation
            items = inputs["num_items_in_batch"].clamp(min=1) / self.accelerator.num_processes
            if model.training:
                items = items * accumulation / self.args.steps_per_generation
            return (loss * counted).sum() / items

    options = {"loss_type": loss_type, "beta": 0.1, "steps_per_generation": 4, "max_steps": 4}
    _, logs, _ = run(folder, tmp_path / "mine", CustomTrainer, **options)
    _, expected, _ = run(folder, tmp_path / "usual", GRPOTrainer, **options)
    assert [log["loss"] for log in logs] == pytest.approx([log["loss"] for log in expected], rel=1e-3, abs=1e-6)
    assert [log["grad_norm"] for log in logs] == pytest.approx([log["grad_norm"] for log in expected], rel=1e-3)


@pytest.mark.parametrize("kind", [GRPOTrainer, RLOOTrainer])
def test_overrides_of_evaluation_receive_trl_arguments(kind, folder, tmp_path):
    class CustomTrainer(kind):
        def _prepare_input(self, data):
            batches.append(isinstance(data, dict) and data.keys() >= KEYS)
            return super()._prepare_input(data)

        def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys):
            assert prediction_loss_only is True
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)

        def num_examples(self, dataloader):
            sizes.append(super().num_examples(dataloader))
            return sizes[-1]

    batches, sizes = [], []
    trainer, _, _ = run(folder, tmp_path, CustomTrainer)
    batches.clear()
    sizes.clear()
    trainer.evaluate()
    assert any(batches)
    assert sizes == [2]


def test_overridden_prepare_input_alone_receives_trl_batch_in_evaluation(folder, tmp_path):
    class CustomTrainer(GRPOTrainer):
        def _prepare_input(self, data):
            batches.append(isinstance(data, dict) and data.keys() >= KEYS)
            return super()._prepare_input(data)

    batches = []
    trainer, _, _ = run(folder, tmp_path, CustomTrainer)
    batches.clear()
    trainer.evaluate()
    assert any(batches)


def test_sampling_strategy_has_no_effect_on_prompts(folder, tmp_path):
    note = '"train_sampling_strategy" has no effect: shuffle_dataset selects the order of prompts.'
    assert note in GRPOTrainer.config_class(use_cpu=True, bf16=False, train_sampling_strategy="group_by_length").notes()
    _, by_length, evaluated = run(folder, tmp_path / "a", GRPOTrainer, train_sampling_strategy="group_by_length")
    _, usual, usual_evaluated = run(folder, tmp_path / "b", GRPOTrainer)
    assert [log["loss"] for log in by_length] == [log["loss"] for log in usual]
    assert evaluated["eval_reward"] == usual_evaluated["eval_reward"]


@pytest.mark.parametrize("kind", [GRPOTrainer, RLOOTrainer])
def test_batch_changed_by_a_script_is_trained(kind, folder, tmp_path):
    class CustomTrainer(kind):
        def _prepare_inputs(self, inputs):
            inputs = super()._prepare_inputs(inputs)
            return {**inputs, "advantages": inputs["advantages"] * 0}

    class InPlaceTrainer(kind):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            inputs["advantages"] = torch.zeros_like(inputs["advantages"])
            return super().compute_loss(model, inputs)

    for own in (CustomTrainer, InPlaceTrainer):
        _, logs, _ = run(folder, tmp_path / own.__name__, own, beta=0.0)
        assert [log["grad_norm"] for log in logs] == [0, 0]


def test_records_of_a_micro_batch_are_those_of_its_completions(folder, tmp_path):
    class CustomTrainer(GRPOTrainer):
        def training_step(self, model, inputs, num_items_in_batch=None):
            texts.append([record["prompt"] for record in inputs])
            return super().training_step(model, [{**record} for record in inputs], num_items_in_batch)

        def _prepare_inputs(self, generation_batch):
            assert [record["prompt"] for record in generation_batch] == texts[-1] or not self.model.training
            batch = super()._prepare_inputs(generation_batch)
            prompts = self.processing_class.batch_decode(batch["prompt_ids"])
            for record, prompt in zip(generation_batch, prompts, strict=True):
                assert record["prompt"].split()[-1] in prompt
            return batch

    texts = []
    _, logs, evaluated = run(folder, tmp_path / "mine", CustomTrainer)
    _, expected, expected_evaluated = run(folder, tmp_path / "usual", GRPOTrainer)
    assert len({str(prompts) for prompts in texts}) > 1
    assert [log["loss"] for log in logs] == pytest.approx([log["loss"] for log in expected], rel=1e-4, abs=1e-6)
    assert evaluated["eval_reward"] == expected_evaluated["eval_reward"]


def test_training_after_a_failed_evaluation_has_the_records_of_training(folder, tmp_path):
    class CustomTrainer(GRPOTrainer):
        def training_step(self, model, inputs, num_items_in_batch=None):
            texts.extend(record["prompt"] for record in inputs)
            return super().training_step(model, inputs, num_items_in_batch)

    def fails_once(completions, **columns):
        if not failures:
            failures.append(1)
            raise ValueError("unavailable")
        return [float(len(set(completion))) for completion in completions]

    texts, failures, dataset = [], [], prompts(8)
    trainer = trainer_of(
        folder, CustomTrainer, fails_once, dataset, output_dir=str(tmp_path), max_steps=2,
        trainer_args={"eval_dataset": Dataset.from_list([{"prompt": "evaluated only", "answer": ""}] * 2)},
    )  # fmt: skip
    with pytest.raises(Exception, match="unavailable"):
        trainer.evaluate()
    trainer.train()
    assert texts
    assert set(texts) <= {record["prompt"] for record in dataset}


def test_changed_records_of_a_micro_batch_are_refused(folder, tmp_path):
    class CustomTrainer(GRPOTrainer):
        def training_step(self, model, inputs, num_items_in_batch=None):
            return super().training_step(model, inputs[:1], num_items_in_batch)

    with pytest.raises(UserError, match="records of a micro-batch cannot be changed"):
        run(folder, tmp_path, CustomTrainer)


@pytest.mark.parametrize("shift", [0.5, -0.1])
def test_old_log_probabilities_changed_by_a_script_are_used_in_ratio(shift, folder, tmp_path):
    """RLOO's log-probabilities are sums over completions; a ratio of exp(-0.5) is clipped for negative advantages."""

    class CustomTrainer(RLOOTrainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            ratio = torch.full_like(inputs["old_logps"], math.exp(-shift))
            clipped, advantages = ratio.clamp(0.8, 1.2), inputs["advantages"]
            expected.append(float(-torch.minimum(ratio * advantages, clipped * advantages).mean()))
            losses.append(super().compute_loss(model, {**inputs, "old_logps": inputs["old_logps"] + shift}))
            return losses[-1]

    expected, losses = [], []
    run(folder, tmp_path / "mine", CustomTrainer, beta=0.0, disable_dropout=True)
    assert [float(loss) for loss in losses] == pytest.approx(expected, abs=1e-5)
    assert shift < 0 or max(map(abs, expected)) > 1e-3


def test_token_values_of_a_script_are_trained(folder, tmp_path):
    class CustomTrainer(GRPOTrainer):
        def _get_per_token_logps_and_entropies(self, *args, **kwargs):
            logps, entropies, *rest = super()._get_per_token_logps_and_entropies(*args, **kwargs)
            return logps * 2, entropies + 1, *rest

    _, logs, _ = run(folder, tmp_path / "mine", CustomTrainer)
    _, expected, _ = run(folder, tmp_path / "usual", GRPOTrainer)
    assert logs[0]["grad_norm"] == pytest.approx(2 * expected[0]["grad_norm"], rel=1e-4)
    assert logs[0]["entropy"] == pytest.approx(expected[0]["entropy"] + 1, rel=1e-4)


@pytest.mark.parametrize("kind", [GRPOTrainer, RLOOTrainer])
def test_router_loss_is_trained_with_and_without_override(kind, folder, tmp_path):
    torch.manual_seed(0)
    config = mixtral_config()
    config.vocab_size, config.router_aux_loss_coef = 320, 1.0
    MixtralForCausalLM(config).save_pretrained(tmp_path / "model")
    AutoTokenizer.from_pretrained(folder / "model").save_pretrained(tmp_path / "model")
    result = {}
    for own in (kind, recording(kind, "_compute_loss")):
        _, logs, _ = run(folder, tmp_path / own.__name__, own, model=str(tmp_path / "model"), learning_rate=0.0)
        result[own.__name__] = [(log["aux_loss"], log["loss"]) for log in logs]
    (defaults, mine) = result.values()
    assert mine == [pytest.approx(each, rel=1e-2) for each in defaults]
    assert all(loss > 0.9 * aux > 0 for aux, loss in defaults)


@pytest.mark.parametrize("options", [{}, {"beta": 0.1}], ids=["plain", "kl"])
def test_copy_of_trl_loss_method_equals_trainer_loss(options, folder, tmp_path):
    trl = pytest.importorskip("trl", reason="TRL is not installed")
    mine = type("Mine", (GRPOTrainer,), {"_compute_loss": trl.GRPOTrainer._compute_loss})
    (_, logs, evaluated), (_, others, others_evaluated) = (
        run(folder, tmp_path / kind.__name__, kind, gradient_accumulation_steps=1, **options)
        for kind in (mine, GRPOTrainer)
    )
    for log, other in zip(logs, others, strict=True):
        assert [log[n] for n in ("loss", "grad_norm", "reward")] == pytest.approx(
            [other[n] for n in ("loss", "grad_norm", "reward")], rel=1e-5, abs=1e-6
        )
    assert evaluated["eval_reward"] == pytest.approx(others_evaluated["eval_reward"])


@pytest.mark.parametrize(("threshold", "expected"), [(0.0, 5), (0.5, 3), (1.0, 1)])
def test_high_entropy_mask_selects_tokens_above_quantile(threshold, expected, folder, tmp_path):
    trainer = trainer_of(folder, GRPOTrainer, output_dir=str(tmp_path))
    entropies, mask = torch.tensor([[0.1, 0.2, 0.3], [0.4, 0.5, 9.0]]), torch.tensor([[1, 1, 1], [1, 1, 0]])
    result = trainer.get_high_entropy_mask(entropies, mask, threshold)
    assert (result.dtype, int(result.sum()), bool(result[1, 2])) == (torch.bool, expected, False)
    assert not trainer.get_high_entropy_mask(entropies, mask * 0, threshold).any()


def test_off_policy_mask_drops_bad_completions_far_from_the_sampler():
    nan = float("nan")
    logps = torch.tensor([[-2.0, -2.0, 9.0], [-0.5, -0.5, 9.0], [-2.0, -2.0, 9.0], [nan, -0.5, 9.0]])
    mask, advantages = torch.tensor([[1.0, 1.0, 0.0]] * 4), torch.tensor([[1.0], [-1.0], [-1.0], [-1.0]])
    kept = GRPOTrainer.get_off_policy_mask(advantages, logps, torch.zeros(4, 3), mask, 1.0)
    assert kept.tolist() == [[1.0], [1.0], [0.0], [1.0]]


def test_vespo_factor_is_1_at_the_sampling_policy_and_small_far_from_it():
    ratios = torch.tensor([[0.0, 0.0], [0.0, 0.0], [1.0, 1.0], [-3.0, 9.0]])
    mask, advantages = torch.tensor([[1.0, 1.0]] * 3 + [[1.0, 0.0]]), torch.tensor([[1.0], [-1.0], [1.0], [-1.0]])
    found = GRPOTrainer.get_gamma_weights(advantages, ratios, mask, None)
    by_hand = [1.0, 1.0, math.exp(3 + 2 * 2 - 3 * math.e**2), math.exp(2 - 3 * 3 - 2 * math.e**-3)]
    assert found.flatten().tolist() == pytest.approx(by_hand, rel=1e-5)


class RepeatSampler(Sampler):
    """A sampler as in TRL: prompts are repeated for their completions, and generation batches for their iterations."""

    def __init__(self, numbers, count, size, repeats):
        self.numbers, self.count, self.size, self.repeats = numbers, count, size, repeats

    def __len__(self):
        return len(self.numbers) * self.count * self.repeats

    def __iter__(self):
        unique = self.size // self.count
        for first in range(0, len(self.numbers), unique):
            for _ in range(self.repeats):
                for number in self.numbers[first : first + unique]:
                    yield from [number] * self.count


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", [GRPOTrainer, RLOOTrainer])
def test_sampler_written_for_trl_gives_each_prompt_once(kind, folder, tmp_path):
    class CustomTrainer(kind):
        def _get_train_sampler(self, dataset=None):
            uses = self.num_iterations * self.args.steps_per_generation
            return RepeatSampler(range(len(dataset)), self.num_generations, self.args.generation_batch_size, uses)

    class Plain(kind):
        def _get_train_sampler(self):
            return SequentialSampler(self.train_dataset)

    options = {"num_iterations": 2, "shuffle_dataset": False, "max_steps": -1, "num_train_epochs": 1}
    found = [run(folder, tmp_path / each.__name__, each, **options)[1] for each in (CustomTrainer, Plain, kind)]
    assert len(found[0]) == len(found[1]) == len(found[2])
    for name in ("loss", "reward", "grad_norm"):
        first, *others = [[log.get(name) for log in logs] for logs in found]
        assert others == [first, first]


# --- _generate_and_score_completions ----------------------------------------------------------------------------------


class CallsOriginal:
    """Override that only calls the original."""

    def _generate_and_score_completions(self, inputs):
        vars(self).setdefault("seen", []).append((inputs, self.model.training))
        return super()._generate_and_score_completions(inputs)


@pytest.mark.sample(2)
@pytest.mark.parametrize("options", [{}, {"num_iterations": 2, "steps_per_generation": 4, "max_steps": 4, "beta": 0.1}])
@pytest.mark.parametrize("kind", [GRPOTrainer, RLOOTrainer])
def test_override_of_generation_receives_records_and_changes_nothing(kind, options, folder, tmp_path):
    mine, logs, evaluated = run(folder, tmp_path / "mine", type("Mine", (CallsOriginal, kind), {}), **options)
    _, expected, expected_evaluated = run(folder, tmp_path / "usual", kind, **options)
    for log, other in zip(logs, expected, strict=True):
        assert log.keys() == other.keys()
        for value in ("loss", "grad_norm", "entropy"):
            assert log[value] == pytest.approx(other[value], rel=1e-4, abs=1e-6), value
    assert evaluated == {n: pytest.approx(v, rel=1e-4, abs=1e-6) for n, v in expected_evaluated.items()}
    (records, is_training), (_, is_training_in_evaluation) = mine.seen[0], mine.seen[-1]
    assert records[0] == records[1] != records[2]
    assert records[0].keys() == {"prompt", "answer"}
    assert is_training
    assert not is_training_in_evaluation


def test_values_of_an_override_reach_the_loss(folder, tmp_path):
    """The override returns its own completions, with an advantage per token and an additional tensor."""

    class CustomTrainer(GRPOTrainer):
        def _generate_and_score_completions(self, inputs):
            count, shape = len(inputs), (len(inputs), 3)
            mask = torch.ones(shape, dtype=torch.long)
            mask[0, 2] = 0
            advantages = torch.linspace(-1, 1, count)
            if per_token:
                advantages = advantages[:, None].expand(shape).clone()
            self._metrics["train"]["script/count"].append(count)
            return {"prompt_ids": torch.full((count, 2), 5), "prompt_mask": torch.ones(count, 2, dtype=torch.long),
                    "completion_ids": torch.arange(count * 3).view(shape) % 20 + 3, "completion_mask": mask,
                    "advantages": advantages, "number": torch.arange(count), "ignored": None}  # fmt: skip

        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            numbers.extend(inputs["number"].tolist())
            assert (inputs["completion_ids"][:, 0] == inputs["number"] * 3 % 20 + 3).all()
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    numbers, found = [], {}
    for per_token in (False, True):
        numbers.clear()
        _, logs, _ = run(folder, tmp_path / str(per_token), CustomTrainer, loss_type="dr_grpo")
        found[per_token] = [(log["loss"], log["grad_norm"]) for log in logs]
        assert sorted(numbers[:8]) == list(range(8))
        assert [log["script/count"] for log in logs] == [8, 8]
        assert all(log["grad_norm"] > 0 for log in logs)
    assert found[True] == [pytest.approx(pair, rel=1e-5) for pair in found[False]]


def test_resume_inside_a_generation_keeps_values_of_an_override(folder, tmp_path):
    class CustomTrainer(GRPOTrainer):
        def _generate_and_score_completions(self, inputs):
            output = super()._generate_and_score_completions(inputs)
            return {**output, "doubled": output["advantages"] * 2}

        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            inputs["advantages"] = inputs["doubled"]
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    options = {"num_iterations": 2, "max_steps": 4, "save_strategy": "steps", "save_steps": 1}
    whole, other = tmp_path / "whole", tmp_path / "other"
    trainer_of(folder, CustomTrainer, output_dir=str(whole), **options).train()
    other.mkdir()
    shutil.copytree(whole / "checkpoint-1", other / "checkpoint-1")
    trainer_of(folder, CustomTrainer, output_dir=str(other), **options).train(resume_from_checkpoint=True)
    assert same_weights(whole / "checkpoint-4", other / "checkpoint-4")


def test_generation_that_the_loss_cannot_use_is_refused(folder):
    class ChangedCompletions(GRPOTrainer):
        def _generate_and_score_completions(self, inputs):
            return super()._generate_and_score_completions([{**one, "prompt": "other"} for one in inputs])

    class MissingKeys(GRPOTrainer):
        def _generate_and_score_completions(self, inputs):
            output = super()._generate_and_score_completions(inputs)
            return {name: output[name] for name in ("prompt_ids", "completion_ids")}

    class NoCompletions(GRPOTrainer):
        def _generate_and_score_completions(self, inputs):
            super()._generate_and_score_completions(inputs)

    with pytest.raises(UserError, match="must return a dict of tensors"):
        trainer_of(folder, NoCompletions).train()
    with pytest.raises(UserError, match="must pass on its inputs unchanged"):
        trainer_of(folder, ChangedCompletions).train()
    with pytest.raises(UserError, match="Missing: prompt_mask, completion_mask, advantages"):
        trainer_of(folder, MissingKeys).train()


def train_with_override(folder, output, per_device):
    kind = type("Mine", (CallsOriginal, GRPOTrainer), {})
    options = {"per_device_train_batch_size": per_device, "num_generations": 4, "max_steps": 2, "optim": "sgd"}
    trainer = trainer_of(Path(folder), kind, output_dir=output, **options)
    trainer.train()
    assert len(trainer.seen[0][0]) == per_device
    trainer.save_model(output)


@pytest.mark.slow
def test_override_of_generation_in_two_processes_gives_the_weights_of_one(folder, tmp_path):
    train_with_override(str(folder), str(tmp_path / "one"), 8)
    in_two_processes(train_with_override, str(folder), str(tmp_path / "two"), 4)
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, rtol=1e-4, atol=1e-6)
