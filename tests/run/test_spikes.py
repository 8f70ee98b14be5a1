"""Loss spikes: the affected records are named, and a run can go back and skip them."""

import json
import re
from contextlib import nullcontext
from math import inf, nan
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader
from transformers import AutoTokenizer

from burnish import Trainer
from burnish.cli import main
from burnish.config.errors import NonFiniteError, UserError
from burnish.data.batches.loader import RowLoader, order_of
from burnish.loop.spikes import SpikeError, SpikeWatch
from burnish.losses.lm import LmObjective
from run_outputs import same_weights
from small_run import as_arguments, make_workspace, records
from trainer_run import losses, make_trainer, points, same, weights

pytestmark = pytest.mark.run

BAD_RECORD = 9  # index of the only record with "~" in its response


@pytest.fixture
def user(tmp_path):
    """Return the options of a run with two epochs of six steps of four rows."""
    options = make_workspace(tmp_path, save_steps=2, logging_steps=1)
    rows = records(24)
    rows[BAD_RECORD]["output"] = "~"
    (tmp_path / "data.json").write_text(json.dumps(rows))
    return options


def scale_loss(monkeypatch, run_options, factor, only_once=False):
    """Multiply the loss of the odd row by ``factor``."""
    tokenizer = AutoTokenizer.from_pretrained(run_options["model_name_or_path"])
    (odd,) = tokenizer("~", add_special_tokens=False)["input_ids"]
    plain, recorded = LmObjective.loss, []

    def loss(self, module, batch):
        result = plain(self, module, batch)
        if not (batch["labels"] == odd).any() or (only_once and recorded):
            return result
        recorded.append(1)
        return type(result)(result.total * factor, result.sums, result.outputs)

    monkeypatch.setattr(LmObjective, "loss", loss)


def rows_of_bad_step(seed=42):
    order = order_of(24, seed, 0)
    begin = order.index(BAD_RECORD) // 4 * 4
    return order[begin : begin + 4], begin // 4 + 1


def run(run_options):
    return main(["train", *as_arguments(run_options)])


@pytest.mark.parametrize(
    "more", [{}, {"packing": True, "cutoff_len": 64}, {"streaming": True, "max_steps": 6}], ids=str
)
def test_non_finite_step_names_its_records(user, monkeypatch, capsys, more):
    scale_loss(monkeypatch, user, float("nan"))
    assert run({**user, **more}) == 1
    output = re.sub(r"\s+", " ", capsys.readouterr().err)
    assert "is not finite (loss nan" in output
    assert f"{user['dataset']}, record {BAD_RECORD + 1}" in output.split("Examples: ")[1]
    if not more:
        rows, step = rows_of_bad_step()
        assert f"The loss of step {step} is not finite" in output
        assert all(f"record {row + 1}" in output for row in rows)


def test_rolled_back_run_equals_run_without_skipped_rows(user, tmp_path, monkeypatch, capsys):
    rows, step = rows_of_bad_step()
    assert step > 2  # there is a checkpoint to roll back to
    with monkeypatch.context() as patch:
        scale_loss(patch, user, float("nan"))
        assert run({**user, "on_spike": "rollback"}) == 0
    reported = capsys.readouterr().err
    assert f"The loss or gradient of step {step} was not finite" in reported
    assert "Rolling back; the examples of this step are skipped from now on." in re.sub(r"\s+", " ", reported)
    last = json.loads((tmp_path / "out" / "checkpoint-12" / "stream.json").read_text())
    assert last["left_out"] == sorted(rows)

    plain = RowLoader.__init__

    def without_rows(self, *args, **kwargs):
        plain(self, *args, **kwargs)
        self.excluded = frozenset(rows)

    monkeypatch.setattr(RowLoader, "__init__", without_rows)
    assert run({**user, "output_dir": str(tmp_path / "without")}) == 0
    assert same_weights(tmp_path / "out", tmp_path / "without")
    history = [
        json.loads((tmp_path / name / "trainer_state.json").read_text())["log_history"] for name in ("out", "without")
    ]
    losses = [[entry["loss"] for entry in entries if "loss" in entry] for entries in history]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 12


def test_large_gradient_norm_is_a_spike(user, monkeypatch, capsys):
    scale_loss(monkeypatch, user, 1e4, only_once=True)
    monkeypatch.setattr("burnish.loop.spikes._MIN_HISTORY", 2)
    assert run({**user, "on_spike": "rollback", "spike_ratio": 50}) == 0
    assert re.search(r"The gradient of step \d+ was [\d.e+]+ times the usual norm", capsys.readouterr().err)


def test_rollback_requires_a_checkpoint(user, monkeypatch, capsys):
    scale_loss(monkeypatch, user, float("inf"))
    assert run({**user, "on_spike": "rollback", "save_strategy": "no"}) == 1
    assert "There is no checkpoint to roll back to. Reduce save_steps." in re.sub(r"\s+", " ", capsys.readouterr().err)


@pytest.mark.slow
def test_resumed_run_still_skips_excluded_rows(user, tmp_path, monkeypatch):
    options = {**user, "on_spike": "go_back", "lr_scheduler_type": "constant"}  # the earlier name of the option value
    scale_loss(monkeypatch, user, float("nan"))
    assert run({**options, "max_steps": 12}) == 0
    assert run({**options, "max_steps": 12, "output_dir": str(tmp_path / "two")}) == 0
    assert run({**options, "max_steps": 8, "output_dir": str(tmp_path / "three")}) == 0
    assert run({**options, "max_steps": 12, "output_dir": str(tmp_path / "three")}) == 0
    assert same_weights(tmp_path / "out", tmp_path / "two")
    assert same_weights(tmp_path / "out", tmp_path / "three")


def test_rolled_back_script_equals_script_without_skipped_rows(tmp_path, library_log):
    def trained(name, at, **options):
        trainer = make_trainer(
            tmp_path / name, train=rows, save_strategy="steps", save_steps=2, num_train_epochs=3, **options
        )
        plain = trainer.get_train_dataloader

        def without_rows():
            loader = plain()
            loader.sampler.excluded.extend(at)
            return loader

        trainer.get_train_dataloader = without_rows
        trainer.train()
        return trainer

    rows = points(22)
    order = order_of(22, 42, 0)
    rows[order[13]]["x"] = rows[order[13]]["x"] * float("inf")  # of step 4
    back = trained("back", [], on_spike="rollback")
    assert "The loss or gradient of step 4 was not finite" in library_log.text
    assert f"Examples: rows {', '.join(map(str, order[12:16]))} of train_dataset. Rolling back" in library_log.text
    never = trained("never", [(0, 12, order[12:16])], max_steps=18)
    assert same(weights(back), weights(never))
    assert losses(back) == losses(never)
    assert back.state.global_step == 18
    again = make_trainer(tmp_path / "back", train=rows, num_train_epochs=3, on_spike="rollback")
    again.train(resume_from_checkpoint=str(tmp_path / "back" / "checkpoint-6"))
    assert same(weights(again), weights(never))


def test_script_with_custom_dataloader_cannot_roll_back(tmp_path):
    class Loading(Trainer):
        def get_train_dataloader(self):
            return DataLoader(points(8), batch_size=2)

    trainer = make_trainer(tmp_path, Loading, on_spike="rollback")
    with pytest.raises(UserError, match="`on_spike` requires a map-style"):
        trainer.train()


def engine_of(loss_scale):
    return SimpleNamespace(scales_loss=loss_scale, sum=lambda value: value)


@pytest.mark.parametrize(
    ("loss", "norm", "scaled", "message"),
    [(1.0, inf, True, None), (nan, inf, True, "step 7 was not finite"), (1.0, 90.0, True, "gradient of step 7"),
     (1.0, inf, False, "step 7 was not finite"), (1.0, 2.0, True, None)],
)  # fmt: skip
def test_loss_scale_reduction_is_not_a_spike_but_others_are(loss, norm, scaled, message):
    watch = SpikeWatch(ratio=50)
    watch.norms.extend([1.0] * 9)
    group = SimpleNamespace(indices=[3])
    with nullcontext() if message is None else pytest.raises(SpikeError, match=message):
        watch.check(engine_of(scaled), 7, group, torch.tensor(loss), torch.tensor(norm))
    assert len(watch.norms) == (10 if norm == 2.0 else 9)


def test_script_error_names_rows_of_train_dataset(tmp_path):
    rows = points(22)
    rows[5]["x"] = rows[5]["x"] * float("inf")
    trainer = make_trainer(tmp_path, train=rows, on_non_finite="stop")
    with pytest.raises(NonFiniteError) as failed:
        trainer.train()
    order, step = order_of(22, 42, 0), trainer.state.global_step
    assert f"Examples: rows {', '.join(map(str, order[4 * step - 4 : 4 * step]))} of train_dataset." in str(
        failed.value
    )
    assert 5 in order[4 * step - 4 : 4 * step]


def test_run_ends_when_all_examples_are_skipped(tmp_path, capsys):
    options = make_workspace(
        tmp_path, count=8, on_spike="rollback", spike_ratio=1.0001, save_steps=1, save_total_limit=2,
        num_train_epochs=60, gradient_accumulation_steps=1, per_device_train_batch_size=4, learning_rate=1e-5,
        lr_scheduler_type="constant",
    )  # fmt: skip
    assert main(["train", *as_arguments(options)]) == 2
    assert "An epoch has no training step left." in capsys.readouterr().err
