"""A training step on a device reads nothing back and does not mix device and CPU tensors.

torch's meta device stands in for a GPU. Its tensors have shapes but no values, so operations that would make the CPU
wait for a GPU fail here, as does a product of tensors on two devices. Other tests check the values.
"""

from contextlib import nullcontext

import pytest
import torch

from burnish.config.options import RawValue
from burnish.kernels import attention
from burnish.loop.meter import Meter
from burnish.parallel.single import SingleProcess
from burnish.run.build import build_loop
from burnish.run.plan.plan import plan
from burnish.run.prepare import prepare
from small_run import make_workspace

pytestmark = pytest.mark.run


class MetaParallel(SingleProcess):
    """Backend on the meta device that steps without reading ``is_finite``, like a fused optimizer on a GPU."""

    def __init__(self, options):
        super().__init__(options)
        self.device = torch.device("meta")

    def step(self, optimizer, is_finite):
        assert is_finite.device == self.device
        optimizer.step()
        return True


@pytest.fixture(autouse=True)
def meta_as_gpu(monkeypatch):
    """Let the meta device stand in for a GPU. torch has no autocast for it, so the model is entirely in bfloat16."""
    defaults, is_enabled = torch.autocast, torch.is_autocast_enabled

    class Autocast(defaults):
        def __new__(cls, device_type, *args, **kwargs):
            return nullcontext() if device_type == "meta" else defaults(device_type, *args, **kwargs)

    monkeypatch.setattr(torch, "autocast", Autocast)
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device="cuda": device != "meta" and is_enabled(device))
    monkeypatch.setattr(attention, "_WITH_KERNELS", {"meta"})


def make_meta_run(folder, **overrides):
    """Return a run whose model, backend and optimizer are on the meta device."""
    options = make_workspace(folder, **{"pure_bf16": True, **overrides})
    planned = plan({name: RawValue(value, "test") for name, value in options.items()})
    prepared = prepare(planned)
    run = build_loop(planned, prepared, SingleProcess(planned.options), None)
    run.model.to("meta")
    run.parallel, run.meter = MetaParallel(planned.options), Meter(torch.device("meta"))
    run.optimizer = torch.optim.SGD([weight for weight in run.model.parameters() if weight.requires_grad], lr=0.1)
    run.scheduler = torch.optim.lr_scheduler.LambdaLR(run.optimizer, lambda step: 1.0)
    run.model.train()
    return run, planned.options


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"needed_tokens_only": True},
        {"packing": True, "cutoff_len": 48},
        {"max_tokens_per_batch": 64},
        {"gradient_checkpointing": True},
        {"label_smoothing_factor": 0.1, "compute_accuracy": True, "compute_entropy": True},
        {"use_eaft_loss": True},
        {"neftune_noise_alpha": 5.0},
        {"finetuning_type": "lora", "lora_target": "all"},
        {"finetuning_type": "lora", "lora_target": "all", "use_dora": True},
        {"finetuning_type": "freeze", "freeze_trainable_layers": 1},
    ],
    ids=lambda options: " ".join(options) or "full",
)
def test_step_does_not_synchronize_with_device(tmp_path, options):
    run, _ = make_meta_run(tmp_path, **options)
    for group, _ in zip(run.loader.step_batches(), range(2), strict=False):
        run.step(group)
        assert all(weight.device.type == "meta" for weight in run.model.parameters())
    assert run.state.global_step == 2


def test_logging_synchronizes_with_device(tmp_path):
    run, _ = make_meta_run(tmp_path)
    run.step(next(iter(run.loader.step_batches())))
    with pytest.raises(RuntimeError, match="meta"):
        run.log()


def test_evaluation_does_not_synchronize_before_metrics(tmp_path, monkeypatch):
    run, _ = make_meta_run(tmp_path, val_size=0.25, eval_strategy="steps", eval_steps=1)
    batches, recorded = run.eval_sets[""], []
    monkeypatch.setattr(run.callbacks, "fire", lambda event, **values: recorded.append(event))
    with pytest.raises(RuntimeError, match="meta"):
        run.evaluate_set(batches, "eval")
    assert recorded == ["on_prediction_step"] * len(list(batches))


def test_sequence_lengths_are_read_without_a_kernel(tmp_path, monkeypatch):
    monkeypatch.setattr(attention, "_WITH_KERNELS", set())
    run, _ = make_meta_run(tmp_path)
    with pytest.raises(RuntimeError, match="meta"):
        run.step(next(iter(run.loader.step_batches())))
