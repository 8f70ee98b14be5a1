"""The training loop: definition of a step, order of events, and handling of control flags."""

import math
from dataclasses import replace

import pytest
import torch

from burnish.config.errors import NonFiniteError
from burnish.loop.events import TrainerCallback
from burnish.loop.types import Sum
from regression_run import Regression, RegressionObjective, make_run, rows, same, weights


class Recorder(TrainerCallback):
    """Records the events in order."""

    def __init__(self):
        self.events = []

    def __getattribute__(self, name):
        if name.startswith("on_"):
            return lambda *args, **kwargs: self.events.append(name)
        return super().__getattribute__(name)


@pytest.mark.parametrize(("batch_size", "accumulation"), [(4, 2), (2, 4), (1, 8)])
def test_update_does_not_depend_on_micro_batching(tmp_path, batch_size, accumulation):
    whole, _ = make_run(tmp_path / "a", dropout=0, per_device_train_batch_size=8)
    whole.train()
    cut, _ = make_run(
        tmp_path / "b", dropout=0, per_device_train_batch_size=batch_size, gradient_accumulation_steps=accumulation
    )
    cut.train()
    assert whole.state.global_step == cut.state.global_step == 6
    for a, b in zip(weights(whole).values(), weights(cut).values(), strict=True):
        assert torch.allclose(a, b, atol=1e-6)


def test_step_is_gradient_of_mean_over_its_items(tmp_path):
    run, options = make_run(
        tmp_path, dropout=0, per_device_train_batch_size=3, gradient_accumulation_steps=2, max_steps=1,
        optim="sgd", learning_rate=0.5, max_grad_norm=0, lr_scheduler_type="constant",
        train_sampling_strategy="sequential",
    )  # fmt: skip
    torch.manual_seed(options.seed)
    model = Regression(0)
    inputs, labels = (torch.stack(column) for column in zip(*rows()[:6], strict=True))
    (model(inputs) - labels).square().mean().backward()
    run.train()
    for name, parameter in model.named_parameters():
        assert torch.allclose(weights(run)[name], parameter - 0.5 * parameter.grad, atol=1e-6)


def test_order_of_events_matches_transformers(tmp_path):
    recorder = Recorder()
    run, _ = make_run(
        tmp_path, [recorder], num_rows=6, eval_rows=3, num_train_epochs=1, gradient_accumulation_steps=2,
        eval_strategy="steps", eval_steps=1, save_steps=1, eval_on_start=True, per_device_eval_batch_size=2,
    )  # fmt: skip
    run.train()
    evaluation = ["on_prediction_step", "on_prediction_step", "on_log", "on_evaluate"]
    update = ["on_pre_optimizer_step", "on_optimizer_step", "on_step_end", "on_log", *evaluation, "on_save"]
    assert recorder.events == [
        "on_train_begin", *evaluation, "on_epoch_begin",
        "on_step_begin", "on_substep_end", *update,
        "on_step_begin", *update,
        "on_epoch_end", "on_log", "on_train_end",
    ]  # fmt: skip


def test_logged_learning_rate_is_the_one_used_by_the_step(tmp_path):
    run, _ = make_run(tmp_path, max_steps=4, learning_rate=1.0)
    run.train()
    assert [entry["learning_rate"] for entry in run.state.log_history[:4]] == [1.0, 0.75, 0.5, 0.25]


def test_logged_loss_is_mean_since_last_log(tmp_path):
    each, _ = make_run(tmp_path / "a", max_steps=6)
    each.train()
    pairs, _ = make_run(tmp_path / "b", max_steps=6, logging_steps=3)
    pairs.train()
    losses = [e["loss"] for e in each.state.log_history if "loss" in e]
    assert [e["loss"] for e in pairs.state.log_history if "loss" in e] == pytest.approx(
        [sum(losses[:3]) / 3, sum(losses[3:]) / 3]
    )
    assert pairs.state.log_history[-1]["train_loss"] == pytest.approx(sum(losses) / 6)


def test_evaluation_is_mean_over_items_for_any_batch_size(tmp_path):
    results = []
    for size in (1, 2, 5, 16):
        run, _ = make_run(
            tmp_path / str(size), eval_rows=11, max_steps=2, eval_strategy="steps", per_device_eval_batch_size=size
        )
        run.train()
        results.append(run.state.log_history[-2]["eval_loss"])
    assert results == pytest.approx([results[0]] * 4, rel=1e-6)


class CountingObjective(RegressionObjective):
    """Has a metric with the name of a count of the evaluation."""

    def loss(self, model, batch):
        found = super().loss(model, batch)
        return replace(found, sums={"num_items": Sum(torch.tensor(30.0), torch.tensor(10.0))})


def test_metric_named_like_a_count_does_not_change_the_loss_of_an_evaluation(tmp_path):
    logs = []
    for objective in (RegressionObjective(), CountingObjective()):
        folder = tmp_path / type(objective).__name__
        run, _ = make_run(folder, objective=objective, eval_rows=11, max_steps=2, eval_strategy="steps")
        run.train()
        logs.append(run.state.log_history[-2])
    assert logs[0]["eval_loss"] == logs[1]["eval_loss"]
    assert logs[1]["eval_num_items"] == 3.0


def test_evaluation_does_not_change_weights(tmp_path):
    plain, _ = make_run(tmp_path / "a", max_steps=9)
    plain.train()
    watched, _ = make_run(tmp_path / "b", max_steps=9, eval_rows=7, eval_strategy="steps", eval_steps=2)
    watched.train()
    assert same(weights(plain), weights(watched))


def test_non_finite_step_is_not_applied_and_stops_the_run(tmp_path):
    class SpoilGradient(TrainerCallback):
        def on_step_begin(self, args, state, control, model=None, **kwargs):
            if state.global_step == 3:
                self.before = weights(run)
                model.net[0].bias.data[0] = math.nan
                self.spoiled = weights(run)

    spoil = SpoilGradient()
    run, _ = make_run(tmp_path, [spoil])
    with pytest.raises(NonFiniteError, match="step 4"):
        run.train()
    for name, value in weights(run).items():
        assert torch.equal(value.nan_to_num(7), spoil.spoiled[name].nan_to_num(7))


def test_non_finite_step_can_be_skipped_and_is_not_logged(tmp_path):
    class SpoilGradient(TrainerCallback):
        def on_step_begin(self, args, state, control, model=None, **kwargs):
            bias = model.net[3].bias.data
            if state.global_step == 3:
                self.kept = bias.clone()
                bias.fill_(math.nan)

        def on_step_end(self, args, state, control, model=None, **kwargs):
            if state.global_step == 4:
                model.net[3].bias.data.copy_(self.kept)

    run, _ = make_run(tmp_path, [SpoilGradient()], on_non_finite="skip", logging_steps=4, max_steps=8)
    run.train()
    assert all(math.isfinite(e["loss"]) for e in run.state.log_history if "loss" in e)
    assert [e.get("skipped_steps") for e in run.state.log_history if "loss" in e] == [1, None]
    assert all(torch.isfinite(value).all() for value in weights(run).values())
    assert run.state.global_step == 8


def test_gradients_are_clipped_and_unclipped_norm_is_logged(tmp_path):
    run, _ = make_run(tmp_path, max_steps=1, max_grad_norm=1e-3, optim="sgd", learning_rate=1.0, dropout=0)
    before = weights(run)
    run.train()
    moved = math.sqrt(sum((weights(run)[n] - before[n]).square().sum().item() for n in before))
    assert moved == pytest.approx(1e-3, rel=1e-2)
    assert run.state.log_history[0]["grad_norm"] > 1e-2


def test_callback_can_stop_the_epoch_and_the_run(tmp_path):
    class StopEpochAtTwo(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_epoch_stop = state.global_step == 2

    run, _ = make_run(tmp_path, [StopEpochAtTwo()], num_train_epochs=2)
    run.train()
    assert run.state.global_step == 2 + run.state.max_steps // 2
    assert run.loader.state_dict() == {
        "epoch": 2, "position": 0, "is_in_epoch": False, "is_ended_early": False, "has_short_epochs": True
    }  # fmt: skip


def test_best_weights_are_loaded_at_the_end(tmp_path):
    run, _ = make_run(
        tmp_path, eval_rows=8, learning_rate=0.3, eval_strategy="steps", eval_steps=2, save_steps=2, max_steps=12,
        load_best_model_at_end=True, save_total_limit=1,
    )  # fmt: skip
    run.train()
    losses = {e["step"]: e["eval_loss"] for e in run.state.log_history if "eval_loss" in e}
    best = min(losses, key=losses.get)
    assert run.state.best_metric == losses[best]
    assert run.state.best_model_checkpoint == str(tmp_path / f"checkpoint-{best}")

    assert run.evaluate_set(run.eval_sets[""], "eval")["eval_loss"] == pytest.approx(losses[best])


def test_objective_metrics_are_means_over_items(tmp_path):
    run, _ = make_run(tmp_path, max_steps=1, dropout=0, train_sampling_strategy="sequential")
    with torch.no_grad():
        errors = [abs(run.model(x[None]).item() - y.item()) for x, y in rows()[:2]]
    run.train()
    assert run.state.log_history[0]["abs_error"] == pytest.approx(sum(errors) / 2, rel=1e-5)


def test_run_killed_before_epoch_end_event_fires_it_on_resume(tmp_path):
    from burnish.checkpoint.checkpoint import load

    def history(run):
        return [(e["step"], sorted(k for k in e if k.endswith("loss"))) for e in run.state.log_history]

    options = {"eval_rows": 4, "eval_strategy": "epoch", "save_steps": 11, "save_strategy": "steps"}
    whole, _ = make_run(tmp_path, **options)
    whole.train()
    resumed, _ = make_run(tmp_path / "b", **options)
    load(tmp_path / "checkpoint-11", resumed.parts)
    resumed.train()
    assert same(weights(whole), weights(resumed))
    assert history(resumed) == history(whole)


def test_nan_in_first_evaluation_does_not_stay_the_best(tmp_path):
    from burnish.loop.best import remember_best

    run, options = make_run(tmp_path, load_best_model_at_end=True)
    run.state.global_step = 1
    assert not remember_best(run.state, run.checkpoints, {"eval_loss": math.nan}, options)
    assert remember_best(run.state, run.checkpoints, {"eval_loss": 2.0}, options)


def test_foreign_callback_finds_complete_checkpoint_in_on_save(tmp_path):
    from burnish.checkpoint.manifest import integrity_errors

    result = []

    class Upload(TrainerCallback):
        def on_save(self, args, state, control, **kwargs):
            result.append(integrity_errors(tmp_path / f"checkpoint-{state.global_step}"))

    run, _ = make_run(tmp_path, [Upload()], model=Regression(width=20000), save_steps=2, max_steps=6)
    run.train()
    assert result == [[], [], []]


def test_unknown_metric_is_rejected_with_available_ones(tmp_path):
    from burnish.config.errors import UserError

    run, _ = make_run(
        tmp_path, eval_rows=4, eval_strategy="steps", eval_steps=1, metric_for_best_model="acuracy", max_steps=2
    )
    with pytest.raises(UserError, match=r"eval_acuracy.*\n.*eval_abs_error"):
        run.train()
