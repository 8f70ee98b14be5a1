"""Cached reference log-probabilities: reused by a second run, recomputed when a dependency changes."""

import json

import pytest
import torch
from script_runs import losses as script_losses
from script_runs import make

from burnish.losses.kto import KtoObjective
from burnish.losses.pairs import PairObjective
from burnish.run import reference_cache
from burnish.run.reference_cache import RowsWithReference
from pair_runs import losses, make_pair_workspace, pairs
from representative import representative_slow
from small_run import make_model

pytestmark = pytest.mark.run


@pytest.fixture
def workspace(tmp_path):
    return make_pair_workspace(tmp_path)


@pytest.fixture
def reference_counts(monkeypatch):
    """Return a list that gets the number of rows of each computation of reference log-probabilities."""
    requested, fill = [], RowsWithReference.fill

    def counted(self, *args):
        requested.append(len(self))
        fill(self, *args)

    monkeypatch.setattr(RowsWithReference, "fill", counted)
    return requested


BEFORE = {"precompute_ref_log_probs": True}


@pytest.mark.parametrize(
    "changes", representative_slow([{}, {"stage": "kto"}, {"finetuning_type": "lora"}, {"ref_model": "other"}], 1),
    ids=lambda options: "-".join(options) or "full",
)  # fmt: skip
def test_second_run_reads_cached_reference_values(workspace, monkeypatch, reference_counts, changes):
    first = losses(workspace, monkeypatch, **BEFORE, **changes)
    assert len(reference_counts) == 1
    assert losses(workspace, monkeypatch, **BEFORE, **changes) == first
    assert len(reference_counts) == 1


def test_new_adapter_with_another_seed_has_the_same_reference(workspace, monkeypatch, reference_counts):
    for seed in (1, 2):
        losses(workspace, monkeypatch, finetuning_type="lora", seed=seed, **BEFORE)
    assert len(reference_counts) == 1


def other_weights(workspace):
    make_model(workspace / "model", seed=3)
    return {}


def more_pairs(workspace):
    path = workspace / "more.json"
    path.write_text(json.dumps(pairs(13)))
    return {"dataset": str(path)}


def damaged(workspace):
    (path,) = (workspace / "cache" / "reference").glob("*/rows.arrow")
    content = bytearray(path.read_bytes())
    content[9] ^= 1
    path.write_bytes(content)
    return {}


def cut_off(workspace):
    (path,) = (workspace / "cache" / "reference").glob("*/rows.json")
    path.write_bytes(path.read_bytes()[:40])
    return {}


CHANGES = {
    "weights": other_weights, "damaged": damaged, "ld_alpha": lambda workspace: {"ld_alpha": 0.5},
    "rows": more_pairs, "cut_off": cut_off, "ref_model": lambda workspace: {"ref_model": "other"},
    "template": lambda workspace: {"template": "llama2"},
    "overwrite_cache": lambda workspace: {"overwrite_cache": True}, "bf16": lambda workspace: {"bf16": True},
}  # fmt: skip


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", representative_slow(CHANGES, 3))
def test_changed_reference_is_computed_again(workspace, monkeypatch, reference_counts, name):
    losses(workspace, monkeypatch, **BEFORE)
    options = CHANGES[name](workspace)
    cached = losses(workspace, monkeypatch, **BEFORE, **options)
    assert len(reference_counts) == 2
    monkeypatch.setattr(reference_cache, "cache_home", lambda: workspace / "elsewhere")
    assert losses(workspace, monkeypatch, **BEFORE, **options) == cached


def interrupt_after(count, monkeypatch):
    """Interrupt the computation of reference values after ``count`` batches. Returns a list of the rows of each."""
    computed = []

    def counting(columns):
        def counted(self, module, rows, parallel):
            if len(computed) == count:
                raise KeyboardInterrupt
            computed.append(len(rows))
            return columns(self, module, rows, parallel)

        return counted

    for kind in (PairObjective, KtoObjective):
        monkeypatch.setattr(kind, "reference_columns", counting(kind.reference_columns))
    return computed


def reference_files(workspace):
    """Return the names of all files of the cache but locks."""
    return {path.name for path in (workspace / "cache" / "reference").rglob("*") if not path.name.endswith(".lock")}


@pytest.mark.parametrize("stage", ["dpo", "kto"])
def test_interrupted_computation_continues(workspace, monkeypatch, stage):
    options = {**BEFORE, "stage": stage, "per_device_eval_batch_size": 3}
    with monkeypatch.context() as patch:
        interrupt_after(2, patch)
        with pytest.raises(KeyboardInterrupt):
            losses(workspace, patch, **options)
    (partial,) = (workspace / "cache" / "reference").glob(".*.partial.jsonl")
    with partial.open("a") as file:
        file.write('{"index": 2, "ro')  # incomplete: the process was killed while it was written
    with monkeypatch.context() as patch:
        computed = interrupt_after(None, patch)
        found = losses(workspace, patch, **options)
    assert len(computed) == -(-(12 if stage == "dpo" else 24) // 3) - 2
    assert {"rows.arrow", "rows.json"} < reference_files(workspace)
    assert not any("partial" in name for name in reference_files(workspace))
    continued = [path.read_bytes() for path in sorted((workspace / "cache" / "reference").glob("*/*"))]
    monkeypatch.setattr(reference_cache, "cache_home", lambda: workspace / "elsewhere")
    assert losses(workspace, monkeypatch, **options) == found
    assert [path.read_bytes() for path in sorted((workspace / "elsewhere" / "reference").glob("*/*"))] == continued


@pytest.mark.parametrize("name", ["weights", "rows", "overwrite_cache"])
def test_values_of_another_reference_are_not_continued(workspace, monkeypatch, name):
    with monkeypatch.context() as patch:
        interrupt_after(1, patch)
        with pytest.raises(KeyboardInterrupt):
            losses(workspace, patch, **BEFORE, per_device_eval_batch_size=4)
    options = CHANGES[name](workspace)
    computed = interrupt_after(None, monkeypatch)
    losses(workspace, monkeypatch, **BEFORE, **options, per_device_eval_batch_size=4)
    assert sum(computed) == (13 if name == "rows" else 12)


def test_interrupted_computation_of_a_script_continues(workspace, tmp_path, monkeypatch):
    monkeypatch.setenv("BURNISH_CACHE", str(tmp_path / "cache"))
    with monkeypatch.context() as patch:
        interrupt_after(1, patch)
        with pytest.raises(KeyboardInterrupt):
            make("DPOTrainer", workspace / "model", tmp_path, **BEFORE, precompute_ref_batch_size=4)
    computed = interrupt_after(None, monkeypatch)
    make("DPOTrainer", workspace / "model", tmp_path, **BEFORE, precompute_ref_batch_size=4)
    assert computed == [4, 4]


def test_full_disk_does_not_stop_the_computation(workspace, monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    expected = losses(workspace, monkeypatch, **BEFORE, overwrite_cache=True)
    with monkeypatch.context() as patch:
        patch.setattr("burnish.run.partial_results.write_text_atomically", full)
        assert losses(workspace, patch, **BEFORE, overwrite_cache=True) == expected


def test_unwritable_cache_does_not_stop_the_run(workspace, monkeypatch, reference_counts, capsys):
    (workspace / "cache").mkdir()
    (workspace / "cache" / "reference").write_text("a file")
    assert losses(workspace, monkeypatch, **BEFORE)
    assert "Reference log-probabilities cannot be cached" in capsys.readouterr().out


def test_script_reads_cached_reference_values(workspace, tmp_path, reference_counts, monkeypatch):
    shown, track = [], reference_cache.track
    monkeypatch.setattr(
        reference_cache, "track", lambda items, what, unit: shown.append(what) or track(items, what, unit)
    )
    result = [script_losses(make("DPOTrainer", workspace / "model", tmp_path, **BEFORE)) for _ in range(2)]
    assert result[0] == result[1]
    assert shown == ["Looking for cached reference values"] * 2
    assert len(reference_counts) == 1
    trainer = make("DPOTrainer", workspace / "model", tmp_path, **BEFORE)
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.mul_(1.1)
    make("DPOTrainer", trainer.model, tmp_path, **BEFORE)
    assert len(reference_counts) == 2
