"""The reference's numbers on disk: read by a second run, asked anew when anything that they depend on is another."""

import json

import pytest
import torch
from script_runs import losses as script_losses
from script_runs import make

from burnish.data.rows.reference_logps import RowsWithReference
from burnish.run import reference_cache
from few import few_slow
from pair_runs import losses, make_workplace, pairs
from small_run import make_model

pytestmark = pytest.mark.run


@pytest.fixture
def workplace(tmp_path):
    return make_workplace(tmp_path)


@pytest.fixture
def asked(monkeypatch):
    """The number of rows of each set about which the reference was asked."""
    asked, fill = [], RowsWithReference.fill

    def counted(self, *given):
        asked.append(len(self))
        fill(self, *given)

    monkeypatch.setattr(RowsWithReference, "fill", counted)
    return asked


BEFORE = {"precompute_ref_log_probs": True}


@pytest.mark.parametrize(
    "changes", few_slow([{}, {"stage": "kto"}, {"finetuning_type": "lora"}, {"ref_model": "other"}], 1),
    ids=lambda given: "-".join(given) or "full",
)  # fmt: skip
def test_second_run_reads_cached_reference_values(workplace, monkeypatch, asked, changes):
    first = losses(workplace, monkeypatch, **BEFORE, **changes)
    assert len(asked) == 1
    assert losses(workplace, monkeypatch, **BEFORE, **changes) == first
    assert len(asked) == 1


def test_new_adapter_with_another_seed_has_the_same_reference(workplace, monkeypatch, asked):
    for seed in (1, 2):
        losses(workplace, monkeypatch, finetuning_type="lora", seed=seed, **BEFORE)
    assert len(asked) == 1


def other_weights(workplace):
    make_model(workplace / "model", seed=3)
    return {}


def more_pairs(workplace):
    path = workplace / "more.json"
    path.write_text(json.dumps(pairs(13)))
    return {"dataset": str(path)}


def damaged(workplace):
    (path,) = (workplace / "cache" / "reference").glob("*/rows.arrow")
    content = bytearray(path.read_bytes())
    content[9] ^= 1
    path.write_bytes(content)
    return {}


def cut_off(workplace):
    (path,) = (workplace / "cache" / "reference").glob("*/rows.json")
    path.write_bytes(path.read_bytes()[:40])
    return {}


CHANGES = {
    "weights": other_weights, "damaged": damaged, "ld_alpha": lambda workplace: {"ld_alpha": 0.5},
    "rows": more_pairs, "cut_off": cut_off, "ref_model": lambda workplace: {"ref_model": "other"},
    "template": lambda workplace: {"template": "llama2"},
    "overwrite_cache": lambda workplace: {"overwrite_cache": True}, "bf16": lambda workplace: {"bf16": True},
}  # fmt: skip


@pytest.mark.parametrize("name", few_slow(CHANGES, 3))
def test_changed_reference_is_computed_again(workplace, monkeypatch, asked, name):
    losses(workplace, monkeypatch, **BEFORE)
    given = CHANGES[name](workplace)
    cached = losses(workplace, monkeypatch, **BEFORE, **given)
    assert len(asked) == 2
    monkeypatch.setattr(reference_cache, "cache_home", lambda: workplace / "elsewhere")
    assert losses(workplace, monkeypatch, **BEFORE, **given) == cached


def test_unwritable_cache_does_not_stop_the_run(workplace, monkeypatch, asked, capsys):
    (workplace / "cache").mkdir()
    (workplace / "cache" / "reference").write_text("a file")
    assert losses(workplace, monkeypatch, **BEFORE)
    assert "Reference log-probabilities cannot be cached" in capsys.readouterr().out


def test_script_reads_cached_reference_values(workplace, tmp_path, asked):
    found = [script_losses(make("DPOTrainer", workplace / "model", tmp_path, **BEFORE)) for _ in range(2)]
    assert found[0] == found[1]
    assert len(asked) == 1
    trainer = make("DPOTrainer", workplace / "model", tmp_path, **BEFORE)
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.mul_(1.1)
    make("DPOTrainer", trainer.model, tmp_path, **BEFORE)
    assert len(asked) == 2
