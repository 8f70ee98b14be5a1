"""Objectives that do more than compute a loss: prepare a step, run rollouts, return metrics, train custom modules, take
images. Each runs in the training loop.
"""

import dataclasses

import pytest
import torch
from torch import nn

import regression_run
from burnish.config.errors import UserError
from burnish.data.batches.loader import RowLoader, StepPartition
from burnish.loop.meter import EvalSums
from burnish.loop.modes import evaluating
from burnish.loop.types import ContentPart, Loss, Message, Sum
from regression_run import Regression, RegressionObjective, make_run, same, weights


def trained(folder, objective, **options):
    run, _ = make_run(folder, objective=objective, **{"dropout": 0.0, **options})
    output = run.train()
    return run, output


class CenteredObjective(RegressionObjective):
    """Subtracts half the mean error of the step from each error; a single micro-batch does not have that mean."""

    def prepare_step(self, module, batches, engine):
        with evaluating(module):
            assert not module.training
            errors = [module(batch["input_ids"]) - batch["labels"] for batch in batches]
        mean = torch.cat(errors).mean()
        return [{**batch, "labels": batch["labels"] + mean / 2} for batch in batches]


@pytest.mark.parametrize(("batch_size", "accumulation"), [(4, 1), (2, 2), (1, 4)])
def test_step_mean_does_not_depend_on_micro_batching(tmp_path, batch_size, accumulation):
    options = {"per_device_train_batch_size": batch_size, "gradient_accumulation_steps": accumulation, "max_steps": 4}
    run, _ = trained(tmp_path / "cut", CenteredObjective(), **options)
    whole, _ = trained(tmp_path / "whole", CenteredObjective(), per_device_train_batch_size=4, max_steps=4)
    other, _ = trained(tmp_path / "plain", RegressionObjective(), per_device_train_batch_size=4, max_steps=4)
    for name, weight in weights(whole).items():
        assert torch.allclose(weight, weights(run)[name], atol=1e-6)
    assert not same(weights(whole), weights(other))


class TwiceTrained(RegressionObjective):
    """Rollout that samples labels around those of a step batch and trains on them twice."""

    inner_steps = 2

    def rollout(self, module, step_batch, engine, step, more=None):
        drawn = [
            {**batch, "labels": batch["labels"] + torch.randn(len(batch["labels"]))} for batch in step_batch.batches
        ]
        return [dataclasses.replace(step_batch, batches=drawn)] * 2


def test_step_batch_split_in_two_gives_two_steps_and_advances_loader_once(tmp_path):
    positions = []

    class PositionRecorder(TwiceTrained):
        def loss(self, model, batch):
            positions.append(run.loader.state_dict()["position"])
            return super().loss(model, batch)

    run, _ = make_run(tmp_path, objective=PositionRecorder(), num_rows=8, max_steps=6, dropout=0.0)
    run.train()
    assert run.state.global_step == 6
    assert positions == sorted(positions)
    assert [positions.count(position) for position in dict.fromkeys(positions)] == [2, 2, 2]


def test_planned_steps_include_inner_steps(tmp_path):
    once, _ = make_run(tmp_path / "once", num_rows=8, num_train_epochs=3)
    twice, _ = make_run(tmp_path / "twice", objective=TwiceTrained(), num_rows=8, num_train_epochs=3)
    assert (once.state.max_steps, twice.state.max_steps) == (12, 24)
    twice.train()
    assert (twice.loader.epoch, twice.loader.position, twice.loader.is_in_epoch) == (3, 0, False)


@pytest.mark.parametrize("step", [3, 4])
def test_run_stopped_inside_a_rollout_continues_with_its_samples(tmp_path, step):
    options = {"num_rows": 8, "num_train_epochs": 2, "dropout": 0.1, "save_strategy": "no"}
    whole, _ = make_run(tmp_path / "whole", objective=TwiceTrained(), **options)
    whole.train()
    stopped, _ = make_run(tmp_path / "cut", [regression_run.StopAt(step)], objective=TwiceTrained(), **options)
    stopped.train()
    again, _ = make_run(tmp_path / "cut", objective=TwiceTrained(), **options)
    again.load(tmp_path / "cut" / f"checkpoint-{step}")
    assert len(list(again.rollout_buffer.remaining())) == step % 2
    again.train()
    assert again.state.global_step == 16
    assert same(weights(whole), weights(again))


def test_rollout_cannot_resume_with_another_number_of_processes(tmp_path):
    stopped, _ = make_run(tmp_path, [regression_run.StopAt(3)], objective=TwiceTrained(), num_rows=8)
    stopped.train()
    again, _ = make_run(tmp_path, objective=TwiceTrained(), num_rows=8)
    again.rollout_buffer.world_size = 2
    with pytest.raises(UserError, match="saved in the middle of a rollout by 1 processes"):
        again.load(tmp_path / "checkpoint-3")


class MetricsObjective(RegressionObjective):
    """Returns metrics with separate counts: over rows with a positive label, and the minimum and maximum error."""

    def loss(self, model, batch):
        error = model(batch["input_ids"]) - batch["labels"]
        positive = batch["labels"] > 0
        one = torch.ones(())
        sums = {
            "positive_error": Sum((error.abs() * positive).sum(), positive.sum().float()),
            "smallest": Sum(error.amin(), one, "min"),
            "largest": Sum(error.amax(), one, "max"),
            "latest": Sum(error[-1], one, "last"),
            "abs_error": error.abs().sum(),
        }
        return Loss(error.square().sum(), sums)


def test_metrics_use_their_own_counts_or_are_not_averaged(tmp_path):
    run, _ = make_run(tmp_path, dropout=0.0, eval_rows=7, per_device_eval_batch_size=3)
    run.objective = MetricsObjective()
    with evaluating(run.model):
        rows = regression_run.rows(7, seed=9)
        labels = torch.stack([label for _, label in rows])
        errors = run.model(torch.stack([inputs for inputs, _ in rows])) - labels
    metrics = run.evaluate_set(run.eval_sets[""], "eval")
    expected = {
        "eval_positive_error": errors[labels > 0].abs().mean(), "eval_smallest": errors.amin(),
        "eval_largest": errors.amax(), "eval_abs_error": errors.abs().mean(), "eval_loss": errors.square().mean(),
    }  # fmt: skip
    for name, value in expected.items():
        assert metrics[name] == pytest.approx(value.item(), abs=1e-6), name


def test_logged_metrics_cover_all_micro_batches_since_last_log(tmp_path):
    run, _ = trained(tmp_path, MetricsObjective(), logging_steps=4, max_steps=4, gradient_accumulation_steps=2)
    logged = next(entry for entry in run.state.log_history if "loss" in entry)
    assert logged["smallest"] < logged["latest"] < logged["largest"]
    assert logged["positive_error"] > 0
    assert logged["positive_error"] != logged["abs_error"]


def test_metric_without_counts_is_omitted(tmp_path):
    totals, (run, _) = EvalSums(), make_run(tmp_path)
    nothing = {"never": Sum(torch.zeros(()), torch.zeros(())), "none": Sum(torch.zeros(()), torch.zeros(()), "min")}
    totals.add(Loss(torch.ones(()), nothing), torch.ones(()))
    assert totals.means(run.parallel) == {"loss": 1.0}


def test_pending_metrics_of_every_kind_survive_a_checkpoint(tmp_path):
    whole, _ = trained(tmp_path / "a", MetricsObjective(), logging_steps=4, max_steps=4)
    cut, _ = make_run(
        tmp_path / "b",
        [regression_run.StopAt(2)],
        objective=MetricsObjective(),
        dropout=0.0,
        logging_steps=4,
        max_steps=4,
    )
    cut.train()
    from burnish.checkpoint.checkpoint import load

    again, _ = make_run(tmp_path / "b", objective=MetricsObjective(), dropout=0.0, logging_steps=4, max_steps=4)
    load(tmp_path / "b" / "checkpoint-2", again.parts)
    again.train()
    logs = [next(e for e in run.state.log_history if "loss" in e and e["step"] == 4) for run in (whole, again)]
    assert regression_run.without_times(logs[:1]) == regression_run.without_times(logs[1:])


class WithHead(nn.Module):
    """A model with an additional head that belongs to the objective."""

    def __init__(self, model):
        super().__init__()
        self.model, self.head = model, nn.Linear(1, 1)

    def forward(self, inputs):
        return self.head(self.model(inputs)[:, None]).squeeze(-1)


def test_objective_module_is_trained_saved_and_loaded(tmp_path):
    from burnish.checkpoint.checkpoint import load

    class HeadObjective(RegressionObjective):
        def module(self, model):
            return WithHead(model)

    torch.manual_seed(0)
    run, _ = make_run(tmp_path, [regression_run.StopAt(3)], model=HeadObjective().module(Regression(0.0)))
    before = weights(run)
    run.train()
    assert not torch.equal(before["head.weight"], weights(run)["head.weight"])
    again, _ = make_run(tmp_path, model=HeadObjective().module(Regression(0.0)))
    load(tmp_path / "checkpoint-3", again.parts)
    assert same(weights(run), weights(again))


class ImageObjective(RegressionObjective):
    """A row is (inputs, label, image); an image is a tensor of patches of shape (num_patches, 4)."""

    def encode(self, rows, messages):
        """Return the rows with their images. The value of an image part is the image's number."""
        numbers = [int(part.value) for message in messages for part in message.content if part.kind == "image"]
        images = [torch.full((1 + number % 3, 4), number / 22) for number in numbers]
        return [(*row, image) for row, image in zip(rows, images, strict=True)]

    def collate(self, rows):
        images = [image for *_, image in rows]
        return {
            **super().collate(rows), "patches": torch.cat(images),
            "num_patches": torch.tensor([len(image) for image in images]),
        }  # fmt: skip

    def loss(self, model, batch):
        each = batch["patches"].split(batch["num_patches"].tolist())
        recorded = torch.stack([patches.mean(0) for patches in each])
        return super().loss(model, {**batch, "input_ids": batch["input_ids"] + recorded})


@pytest.mark.parametrize(("batch_size", "accumulation"), [(4, 1), (2, 2), (1, 4)])
def test_row_may_hold_tensors_made_from_message_parts(tmp_path, batch_size, accumulation):
    messages = [
        Message("user", (ContentPart("text", "How many?"), ContentPart("image", str(number)))) for number in range(22)
    ]
    with_images = ImageObjective().encode(regression_run.rows(), messages)
    summed = [(inputs + image.mean(0), label) for inputs, label, image in with_images]
    result = []
    for items, objective, cut in (
        (with_images, ImageObjective(), (batch_size, accumulation)), (summed, RegressionObjective(), (4, 1))
    ):  # fmt: skip
        run, options = make_run(tmp_path, dropout=0.0, max_steps=4)
        run.objective = objective
        run.loader = RowLoader(items, objective.collate, StepPartition(*cut), seed=42, options=options)
        run.train()
        result.append(weights(run))
    for name, weight in result[1].items():
        torch.testing.assert_close(result[0][name], weight)


def test_non_text_content_parts_are_rejected_in_text_training():
    assert Message("user", "one two").text == "one two"
    assert Message("user", (ContentPart("text", "one "), ContentPart("text", "two"))).text == "one two"
    with pytest.raises(UserError, match="a message contains audio; only text, images and videos are supported here"):
        _ = Message("user", (ContentPart("text", "one"), ContentPart("audio", "1.wav"))).text
