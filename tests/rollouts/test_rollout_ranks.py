"""Rollouts on two processes equal one process, and an error on one rank ends both."""

import importlib.util
import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from test_ppo_runs import user as ppo_user
from test_rollout_runs import train, user

from burnish.config.errors import UserError
from burnish.rollouts.completions import SlotSource
from run_outputs import weights_in
from two_processes import in_two_processes

pytestmark = pytest.mark.distributed


def options(folder: str, **overrides):
    """Return the options of four steps on two generations of 16 completions, for any number of processes. The optimizer
    is SGD, because Adam amplifies rounding of gradients that are nearly 0."""
    more = {"steps_per_generation": 2, "gradient_accumulation_steps": 2, "num_iterations": 2, "max_steps": 4,
            "save_strategy": "no", "beta": 0.04, "use_cpu": True, "scale_rewards": "batch",
            "optim": "sgd", "learning_rate": 1.0, **overrides}  # fmt: skip
    return user(Path(folder), **more)


def run(folder: str, output_dir: str) -> None:
    train(options(folder, output_dir=output_dir))


def run_failing(folder: str, output_dir: str, message: str) -> None:
    try:
        train(options(folder, output_dir=output_dir, reward_funcs=[f"{folder}/fails.py:fails"]))
    except UserError as error:
        (Path(message) / os.environ["RANK"]).write_text(str(error))


def lines_of(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "completions.jsonl").read_text().splitlines()]


def test_two_processes_sample_the_completions_and_update_of_one(tmp_path):
    overrides = options(str(tmp_path), per_device_train_batch_size=8, output_dir=str(tmp_path / "one"))
    train(overrides)
    in_two_processes(run, str(tmp_path), str(tmp_path / "two"))
    one, two = (lines_of(tmp_path / name) for name in ("one", "two"))
    assert [(line["record"], line["sample"], line["completion"]) for line in one] == [
        (line["record"], line["sample"], line["completion"]) for line in two
    ]
    for a, b in zip(one, two, strict=True):
        assert a["advantage"] == pytest.approx(b["advantage"], abs=1e-9)
    start, ours, theirs = (weights_in(tmp_path / name) for name in ("model", "one", "two"))
    for name, weight in ours.items():
        assert torch.allclose(weight, theirs[name], rtol=0, atol=1e-6), name
    assert max(float((weight - start[name]).abs().max()) for name, weight in ours.items()) > 0.01


FAILS = """
import os
calls = 0
def fails(completions, **kwargs):
    global calls
    calls += 1
    return [1 / (1 - int(os.environ["RANK"]) * (calls > {calls}))] * len(completions)
"""


@pytest.mark.parametrize("calls", [0, 1])
def test_failing_reward_on_one_rank_stops_both_with_its_message(tmp_path, calls):
    options(str(tmp_path))  # create the model and the data
    (tmp_path / "fails.py").write_text(FAILS.format(calls=calls))
    in_two_processes(run_failing, str(tmp_path), str(tmp_path / "out"), str(tmp_path))
    message = [(tmp_path / rank).read_text() for rank in "01"]
    assert all("fails.py:fails, line 7: ZeroDivisionError" in each for each in message), message
    saved = f"Safe: {tmp_path / 'out' / 'checkpoint-2'}." if calls else "No checkpoint was saved."
    assert saved in message[0]


def run_failing_source(folder: str, message: str) -> None:
    def fails(self, prompts, keys, limits):
        if os.environ["RANK"] == "1":
            raise RuntimeError("no completions")
        return whole(self, prompts, keys, limits)

    whole, SlotSource.complete = SlotSource.complete, fails
    try:
        train(options(folder, output_dir=f"{folder}/out"))
    except RuntimeError as error:
        (Path(message) / os.environ["RANK"]).write_text(str(error))


def test_failing_completion_source_on_one_rank_stops_both_with_its_message(tmp_path):
    options(str(tmp_path))
    in_two_processes(run_failing_source, str(tmp_path), str(tmp_path))
    assert (tmp_path / "1").read_text() == "no completions"
    assert (tmp_path / "0").read_text() == "Rank 1 failed. RuntimeError: no completions"


ONE = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4, "steps_per_generation": 4}
TWO = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "steps_per_generation": 2}


def run_with(folder: str, run_options: dict) -> None:
    train(options(folder, **run_options))


@pytest.mark.parametrize("first", [1, 2])
def test_generation_is_redistributed_when_resumed_on_other_number_of_ranks(tmp_path, first):
    here = str(tmp_path)
    saves = {"save_strategy": "steps", "save_steps": 1}
    train(options(here, **ONE, max_steps=2, output_dir=f"{here}/whole"))
    parts = [{**ONE, **saves, "output_dir": f"{here}/part", "max_steps": 1},
             {**TWO, **saves, "output_dir": f"{here}/part", "max_steps": 2}]  # fmt: skip
    if first == 2:
        parts = [{**parts[1], "max_steps": 1}, {**parts[0], "max_steps": 2}]
    for processes, overrides in zip((first, 3 - first), parts, strict=True):
        if processes == 1:
            run_with(here, overrides)
        else:
            in_two_processes(run_with, here, overrides)
    lines = [lines_of(tmp_path / name) for name in ("whole", "part")]
    assert [line["completion"] for line in lines[0]] == [line["completion"] for line in lines[1]]
    whole, parted = (weights_in(tmp_path / name) for name in ("whole", "part"))
    for name, weight in whole.items():
        assert torch.allclose(weight, parted[name], rtol=0, atol=1e-6), name


THIRD = {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}


SHARDED = pytest.mark.parametrize(
    "sharding",
    [
        {"fsdp": "full_shard"},
        pytest.param(
            {"deepspeed": json.dumps(THIRD), "ddp_backend": "gloo"},
            marks=pytest.mark.skipif(
                importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed"
            ),
        ),
    ],
    ids=["FSDP2", "ZeRO-3"],
)


@SHARDED
def test_sharded_weights_give_the_same_completions_and_update(tmp_path, sharding):
    here = str(tmp_path)
    train(options(here, **ONE, max_steps=2, output_dir=f"{here}/one"))
    sharded = {**TWO, **sharding, "max_steps": 2, "output_dir": f"{here}/two"}
    in_two_processes(run_with, here, sharded, environment={"DS_ACCELERATOR": "cpu"})
    lines = [lines_of(tmp_path / name) for name in ("one", "two")]
    assert [line["completion"] for line in lines[0]] == [line["completion"] for line in lines[1]]
    whole, sharded = (weights_in(tmp_path / name) for name in ("one", "two"))
    for name, weight in whole.items():
        assert torch.allclose(weight, sharded[name], rtol=0, atol=1e-6), name


def run_ppo(folder: str, run_options: dict) -> None:
    train(ppo_user(Path(folder), **run_options))


@SHARDED
def test_ppo_with_sharded_weights_updates_policy_and_value_head_equally(tmp_path, sharding):
    here = str(tmp_path)
    options = {"max_steps": 2, "optim": "sgd", "learning_rate": 0.1, "use_cpu": True, "save_strategy": "no"}
    train(ppo_user(tmp_path, **options, output_dir=f"{here}/one", gradient_accumulation_steps=2))
    two = {**options, "gradient_accumulation_steps": 1, **sharding, "output_dir": f"{here}/two"}
    in_two_processes(run_ppo, here, two, environment={"DS_ACCELERATOR": "cpu"})
    lines = [lines_of(tmp_path / name) for name in ("one", "two")]
    assert [line["completion"] for line in lines[0]] == [line["completion"] for line in lines[1]]
    for file in ("model.safetensors", "value_head.safetensors"):
        whole, sharded = (load_file(tmp_path / name / file) for name in ("one", "two"))
        for name, weight in whole.items():
            assert torch.allclose(weight, sharded[name], rtol=0, atol=1e-6), name
    start, moved = weights_in(tmp_path / "model"), weights_in(tmp_path / "two")
    assert max(float((weight - start[name]).abs().max()) for name, weight in moved.items()) > 1e-4
