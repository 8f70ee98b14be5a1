"""Preference training with sharded weights: the losses of one process, or an error message."""

import importlib.util
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

import burnish.run.build  # noqa: F401 - before two processes are forked, not in each of them
from burnish.cli import main
from burnish.config.errors import UserError
from burnish.losses.sequence_logps import mean_row
from burnish.parallel.options import ParallelOptions
from burnish.parallel.single import SingleProcess
from pair_runs import losses, make_pair_workspace, run_options, train_on_pairs
from two_processes import in_two_processes

KINDS = {
    "the start": {},
    "dpo, lora": {"finetuning_type": "lora"},
    "a second model": {"ref_model": "other"},
    "asked beforehand": {"precompute_ref_log_probs": True},
    "kto": {"stage": "kto"},
    "kto, lora": {"stage": "kto", "finetuning_type": "lora"},
    "orpo": {"pref_loss": "orpo"},
    "rm": {"stage": "rm"},
    "rm, lora": {"stage": "rm", "finetuning_type": "lora"},
}
THIRD = {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0, "reduce_bucket_size": "auto"}}
ENGINES = [
    pytest.param({"fsdp": "full_shard"}, marks=pytest.mark.slow),
    pytest.param({"deepspeed": json.dumps(THIRD)}, marks=[pytest.mark.distributed, pytest.mark.skipif(
        importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed")]),
]  # fmt: skip


@pytest.fixture
def workspace(tmp_path):
    return make_pair_workspace(tmp_path)


def run(argv):
    assert main(argv) == 0


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("engine", ENGINES)
def test_run_sharded_over_two_processes_matches_one_and_resumes_alone(workspace, monkeypatch, name, engine):
    one = losses(workspace, monkeypatch, **KINDS[name])
    made = run_options(workspace, **KINDS[name], **engine, ddp_backend="gloo", per_device_train_batch_size=1,
                       output_dir=str(workspace / "two"), save_strategy="steps", save_steps=2)  # fmt: skip
    in_two_processes(run, ["train", *(f"{option}={value.value}" for option, value in made.items())],
                     environment={"DS_ACCELERATOR": "cpu"})  # fmt: skip
    assert _losses(workspace / "two") == pytest.approx(one, rel=1e-5)
    assert_same_files(workspace / "two", workspace / "out")
    shutil.copytree(workspace / "two" / "checkpoint-2", workspace / "then one" / "checkpoint-2")
    train_on_pairs(
        workspace, monkeypatch, **KINDS[name], output_dir=str(workspace / "then one"), overwrite_output_dir=False
    )
    assert _losses(workspace / "then one") == pytest.approx(one, rel=1e-5)
    assert_same_files(workspace / "then one", workspace / "out")


def _losses(folder):
    history = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    return [log["loss"] for log in history if "loss" in log]


def assert_same_files(ours, theirs):
    """Compare the weights of all files, including the reward head; sums over ranks are added in another order."""
    names = sorted(file.name for file in theirs.glob("*.safetensors"))
    assert names == sorted(file.name for file in ours.glob("*.safetensors"))
    for name in names:
        for key, weight in load_file(theirs / name).items():
            torch.testing.assert_close(load_file(ours / name)[key], weight, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [({"sync_ref_model": True}, "updates full weights"), ({"stage": "rm", "reward_head": "score"}, "one process")],
)
def test_options_that_need_full_weights_are_rejected_by_name(workspace, monkeypatch, change, message):
    monkeypatch.setattr(SingleProcess, "shards_weights", True)
    with pytest.raises(UserError, match=message):
        losses(workspace, monkeypatch, **change)


def test_mean_row_without_head_is_none():
    engine = SingleProcess(ParallelOptions(use_cpu=True))
    engine.shards_weights = True
    assert mean_row(None, engine) is None
