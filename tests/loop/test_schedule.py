"""Step arithmetic and learning-rate schedules compared with transformers'."""

import math

import pytest
import torch

from burnish.config.errors import UserError
from burnish.loop.schedule import (
    LRScheduleOptions,
    StepOptions,
    check_schedule,
    lr_factor,
    plan_steps,
    schedule_notes,
    warmup_steps_of,
)


def test_incomplete_last_group_of_an_epoch_is_a_step():
    options = StepOptions(per_device_train_batch_size=2, gradient_accumulation_steps=8, num_train_epochs=3)
    plan = plan_steps(options, rows=900)
    assert (plan.rows_per_step, plan.steps_per_epoch, plan.max_steps) == (16, 57, 171)


def test_max_steps_overrides_epochs():
    plan = plan_steps(StepOptions(per_device_train_batch_size=1, max_steps=25), rows=10)
    assert (plan.max_steps, plan.num_train_epochs) == (25, 3)


def test_dataset_without_length_requires_max_steps():
    with pytest.raises(UserError, match="max_steps"):
        plan_steps(StepOptions(), rows=None)
    assert plan_steps(StepOptions(max_steps=7), rows=None).max_steps == 7


def test_drop_last_skips_rows_of_an_incomplete_batch():
    options = StepOptions(per_device_train_batch_size=4, num_train_epochs=1, dataloader_drop_last=True)
    assert plan_steps(options, rows=11).max_steps == 2
    with pytest.raises(UserError, match="no training step would run"):
        plan_steps(options, rows=3)


def test_warmup_below_one_is_a_fraction_of_steps_rounded_up():
    assert warmup_steps_of(LRScheduleOptions(warmup_steps=0.1), 171) == 18
    assert warmup_steps_of(LRScheduleOptions(warmup_ratio=0.1), 171) == 18
    assert warmup_steps_of(LRScheduleOptions(warmup_steps=5, warmup_ratio=0.5), 171) == 5


def test_warmup_longer_than_training_is_a_problem():
    assert "never reach" in str(next(check_schedule(LRScheduleOptions(warmup_steps=1000), 3)))
    assert list(check_schedule(LRScheduleOptions(warmup_steps=2), 3)) == []
    assert schedule_notes(LRScheduleOptions(warmup_steps=1000), 3) == []


def test_warmup_ratio_rounded_up_to_all_steps_gives_a_note():
    options = LRScheduleOptions(warmup_ratio=0.1)
    assert list(check_schedule(options, 1)) == []
    assert "never reaches its peak: warmup_ratio 0.1" in schedule_notes(options, 1)[0]
    assert schedule_notes(options, 2) == []


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("linear", {}),
        ("cosine", {}),
        ("cosine", {"num_cycles": 1.5}),
        ("cosine_with_restarts", {"num_cycles": 3}),
        ("polynomial", {}),
        ("polynomial", {"power": 2.0, "lr_end": 1e-5}),
        ("constant", {}),
        ("constant_with_warmup", {}),
        ("inverse_sqrt", {}),
        ("inverse_sqrt", {"timescale": 20}),
        ("cosine_with_min_lr", {"min_lr": 1e-4}),
        ("cosine_with_min_lr", {"min_lr_rate": 0.2}),
        ("cosine_warmup_with_min_lr", {"min_lr": 1e-4}),
        ("cosine_warmup_with_min_lr", {"min_lr_rate": 0.1, "warmup_lr_rate": 0.3}),
        ("warmup_stable_decay", {"num_decay_steps": 10}),
        ("warmup_stable_decay", {"num_decay_steps": 12, "num_stable_steps": 4, "decay_type": "1-sqrt"}),
        ("warmup_stable_decay", {"num_decay_steps": 12, "warmup_type": "cosine", "decay_type": "linear"}),
    ],
)
@pytest.mark.parametrize("warmup", [0, 7])
def test_every_schedule_matches_transformers(name, arguments, warmup):
    from transformers.optimization import get_scheduler

    def optimizer():
        return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1e-3)

    theirs = optimizer()
    schedule = get_scheduler(name, theirs, warmup, 40, scheduler_specific_kwargs=arguments)
    ours = lr_factor(
        LRScheduleOptions(lr_scheduler_type=name, warmup_steps=warmup, lr_scheduler_kwargs=arguments), 40, 1e-3
    )
    for step in range(42):
        assert math.isclose(theirs.param_groups[0]["lr"], 1e-3 * ours(step), rel_tol=1e-12, abs_tol=1e-15), step
        theirs.step()
        schedule.step()


def test_unsupported_scheduler_argument_is_named():
    with pytest.raises(UserError, match="num_cycle_s"):
        lr_factor(LRScheduleOptions(lr_scheduler_type="cosine", lr_scheduler_kwargs={"num_cycle_s": 2}), 10, 1e-3)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("warmup_stable_decay", {"decay_type": "slow"}),
        ("cosine_with_min_lr", {"min_lr": "low"}),
        ("cosine_with_min_lr", {"min_lr": 1.0}),
        ("polynomial", {"power": -1}),
        ("polynomial", {"lr_end": 1.0}),
        ("inverse_sqrt", {"timescale": -5}),
        ("cosine_with_min_lr", {}),
        ("cosine_with_min_lr", {"min_lr": 1e-4, "min_lr_rate": 0.1}),
        ("cosine_warmup_with_min_lr", {"min_lr_rate": 1.5}),
        ("warmup_stable_decay", {"num_decay_steps": -3}),
        ("warmup_stable_decay", {"num_decay_steps": 2.5}),
        ("cosine", {"num_cycles": True}),
    ],
    ids=str,
)
def test_invalid_scheduler_value_is_rejected(name, arguments):
    options = LRScheduleOptions(lr_scheduler_type=name, lr_scheduler_kwargs=arguments)
    with pytest.raises(UserError, match=f'invalid lr_scheduler_kwargs for lr_scheduler_type "{name}": '):
        lr_factor(options, 100, 1e-3)


def test_scheduler_value_may_be_text():
    options = LRScheduleOptions(lr_scheduler_type="cosine_with_min_lr", lr_scheduler_kwargs={"min_lr": "1e-4"})
    assert math.isclose(lr_factor(options, 100, 1e-3)(100), 0.1)


def test_phases_longer_than_the_run_give_a_note():
    decay = {"num_decay_steps": 30, "num_stable_steps": 65}
    options = LRScheduleOptions(lr_scheduler_type="warmup_stable_decay", warmup_steps=5, lr_scheduler_kwargs=decay)
    (note,) = schedule_notes(options, 99)
    assert "(warmup_steps 5, num_stable_steps 65, num_decay_steps 30) are longer than the run of 99 steps" in note
    assert schedule_notes(options, 100) == []
    whole = LRScheduleOptions(lr_scheduler_type="warmup_stable_decay", warmup_ratio=1.0)
    assert "never reaches its peak" in schedule_notes(whole, 10)[0]


def test_warmup_over_all_steps_has_no_decay():
    factor = lr_factor(LRScheduleOptions(lr_scheduler_type="polynomial", warmup_ratio=1.0), 10, 1e-3)
    assert [factor(0), factor(5), factor(10)] == [0.0, 0.5, 1.0]
