"""Preferences where each process holds a part of the weights: the losses of one process, or a refusal by name."""

import json

import pytest

import burnish.app.build  # noqa: F401 - before two processes are forked, not in each of them
from burnish.cli import main
from burnish.core.errors import UserError
from burnish.engine.base import SingleEngine
from burnish.engine.options import EngineOptions
from burnish.objectives.reference import refuse_pieces
from burnish.objectives.sequence_logps import mean_row
from pair_runs import given, losses, make_workplace
from two_processes import in_two_processes

KINDS = {
    "dpo, lora": {"finetuning_type": "lora"},
    "a second model": {"ref_model": "other"},
    "asked beforehand": {"precompute_ref_log_probs": True},
    "kto, lora": {"stage": "kto", "finetuning_type": "lora"},
    "orpo": {"pref_loss": "orpo"},
}


@pytest.fixture
def workplace(tmp_path):
    return make_workplace(tmp_path)


def run(words):
    assert main(words) == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_sharded_over_two_processes_the_losses_are_those_of_one(workplace, monkeypatch, name):
    one = losses(workplace, monkeypatch, **KINDS[name])
    made = given(workplace, **KINDS[name], fsdp="full_shard", ddp_backend="gloo", per_device_train_batch_size=1,
                 output_dir=str(workplace / "two"))  # fmt: skip
    in_two_processes(run, ["train", *(f"{option}={value.value}" for option, value in made.items())])
    history = json.loads((workplace / "two" / "trainer_state.json").read_text())["log_history"]
    assert [log["loss"] for log in history if "loss" in log] == pytest.approx(one, rel=1e-5)


def test_the_start_of_a_run_in_pieces_is_no_reference():
    engine = SingleEngine(EngineOptions(use_cpu=True))
    refuse_pieces(engine)
    engine.splits_weights = True
    with pytest.raises(UserError, match="precompute_ref_log_probs"):
        refuse_pieces(engine)
    assert mean_row(None, engine) is None


@pytest.mark.parametrize(("change", "words"), [({}, "each process holds a part"), ({"stage": "rm"}, "writes its head")])
def test_what_needs_whole_weights_is_refused_by_name(workplace, monkeypatch, change, words):
    monkeypatch.setattr(SingleEngine, "splits_weights", True)
    with pytest.raises(UserError, match=words):
        losses(workplace, monkeypatch, **change)
