"""DeepSpeed configuration as filled in by transformers. Runs under ZeRO are in ``test_distributed.py``."""

import json
import os
import time

import pytest

from burnish.config.errors import UserError
from burnish.parallel.checks import check_parallel, parallel_notes
from burnish.parallel.deepspeed.parallel import raise_if_locked
from burnish.parallel.deepspeed.settings import fill_settings, zero_preset
from burnish.parallel.options import DEEPSPEED_NAMES
from burnish.parallel.selection import parallel_name
from burnish.run.plan.plan import RunOptions


def problems(**options):
    return [
        str(problem) for problem in check_parallel(RunOptions(use_cpu=True, **options)) if "library" not in str(problem)
    ]


def test_auto_values_are_filled_as_in_transformers():
    options = RunOptions(
        use_cpu=True,
        deepspeed=zero_preset("zero3"),
        per_device_train_batch_size=3,
        gradient_accumulation_steps=4,
        max_grad_norm=0.5,
        bf16=True,
    )
    settings = fill_settings(options, hidden_size=100, world_size=2)
    assert settings["train_micro_batch_size_per_gpu"] == 3
    assert settings["gradient_clipping"] == 0.5
    assert settings["bf16"] == {"enabled": True}
    assert settings["fp16"] == {"enabled": False}
    zero = settings["zero_optimization"]
    assert (zero["reduce_bucket_size"], zero["stage3_prefetch_bucket_size"]) == (10_000, 9_000)
    assert zero["stage3_param_persistence_threshold"] == 1_000
    assert "auto" not in json.dumps(settings)


def test_values_in_config_file_are_kept(tmp_path):
    own = {
        **zero_preset("zero2"),
        "zero_optimization": {"stage": 2, "reduce_bucket_size": 5e8, "round_robin_gradients": True},
    }
    (tmp_path / "ds.json").write_text(json.dumps(own))
    settings = fill_settings(
        RunOptions(use_cpu=True, deepspeed=str(tmp_path / "ds.json")), hidden_size=100, world_size=2
    )
    assert settings["zero_optimization"] == own["zero_optimization"]
    assert settings["zero_allow_untested_optimizer"] is True


@pytest.mark.parametrize("name", DEEPSPEED_NAMES)
def test_zero_stages_are_selected_by_name(name):
    options = RunOptions(use_cpu=True, deepspeed=name)
    assert not problems(deepspeed=name)
    assert parallel_name(options) == ("single" if name == "zero0" else "deepspeed")
    zero = fill_settings(options, 64, 2, on_cpu=True)["zero_optimization"]
    assert zero["stage"] == int(name[4])
    assert ("offload_optimizer" in zero) is name.endswith("offload")
    assert any("stage 0" in note for note in parallel_notes(options)) is (name == "zero0")


def test_settings_that_change_results_are_rejected(tmp_path):
    (tmp_path / "zero.json").write_text('{"optimizer": {"type": "Lamb"}, "bf16": {"enabled": true}}')
    (tmp_path / "torn.json").write_text('{"optimizer": ')
    (tmp_path / "twice.json").write_text('{"bf16": {"enabled": true, "enabled": false}}')
    (tmp_path / "list.json").write_text('[{"bf16": true}]')
    optimizer, bf16 = problems(deepspeed=str(tmp_path / "zero.json"))
    assert '"optimizer"' in optimizer
    assert 'the option "bf16" is false' in bf16
    assert not problems(deepspeed={"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}})
    assert '"optimizer"' in problems(deepspeed={"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}})[0]
    assert '"autotuning"' in problems(deepspeed={"autotuning": {"enabled": True}})[0]
    assert "only to the CPU" in problems(deepspeed={"zero_optimization": {"offload_param": {"device": "nvme"}}})[0]
    assert "not JSON" in problems(deepspeed=str(tmp_path / "torn.json"))[0]
    assert 'has the duplicate key "enabled"' in problems(deepspeed=str(tmp_path / "twice.json"))[0]
    assert "does not contain a JSON object" in problems(deepspeed=str(tmp_path / "list.json"))[0]
    missing = problems(deepspeed=str(tmp_path / "zerO.json"))[0]
    assert "does not exist" in missing
    assert "zero.json" in missing
    assert 'Did you mean "zero2"' in problems(deepspeed="zero22")[0]
    assert '"deepspeed" and "fsdp" cannot be combined' in problems(deepspeed="zero2", fsdp=True)[0]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"zero_optimization": "2"}, 'an object as "zero_optimization"'),
        ({"zero_optimization": None}, 'an object as "zero_optimization"'),
        ({"zero_optimization": {"stage": 2, "offload_optimizer": "cpu"}}, 'an object as "offload_optimizer"'),
        ({"optimizer": {"type": "Adam", "params": [1]}}, '"optimizer" of the DeepSpeed config is not supported'),
    ],
)
def test_section_that_is_not_an_object_is_reported(settings, message):
    problems = check_parallel(RunOptions(use_cpu=True, deepspeed=settings))
    assert any(message in problem.what for problem in problems)


def test_missing_file_of_llamafactory_is_replaced_by_a_built_in_config():
    (message,) = problems(deepspeed="examples/deepspeed/ds_z3_offload_config.json")
    assert "Set deepspeed: zero3_offload, the built-in config like LLaMA-Factory's" in message
    (message,) = problems(deepspeed="examples/deepspeed/ds_z3_fp8_config.json")
    assert "Built-in configs: zero0," in message


def test_key_of_an_inline_config_is_to_be_removed_from_the_config():
    (message,) = problems(deepspeed={"zero_stage": 2})
    assert message.endswith('"zero_stage" of the DeepSpeed config is not supported.\n  Remove it from the config.')


def test_optimizer_that_is_the_one_of_torch_is_accepted():
    params = {"lr": "auto", "weight_decay": "auto", "torch_adam": True, "adam_w_mode": True}
    assert not problems(deepspeed={"optimizer": {"type": "AdamW", "params": params}})
    (message,) = problems(deepspeed={"optimizer": {"type": "Adam", "params": {**params, "adam_w_mode": False}}})
    assert "not supported" in message


def test_monitors_and_comments_are_dropped_and_monitors_reported():
    options = {**zero_preset("zero2"), "_comment": "ours", "monitor_config": {"enabled": True}, "comms_config": {}}
    overrides = RunOptions(use_cpu=True, deepspeed=options)
    assert not problems(deepspeed=options)
    assert not {"_comment", "monitor_config", "comms_config"} & fill_settings(overrides, 64, 2).keys()
    assert [note.split('"')[1] for note in parallel_notes(overrides)] == ["comms_config", "monitor_config"]
    assert '"tensor_parallel"' in problems(deepspeed={**options, "tensor_parallel": {"autotp_size": 2}})[0]


def test_accelerate_settings_are_used(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_ZERO_STAGE", "3")
    assert parallel_name(RunOptions(use_cpu=True)) == "deepspeed"
    assert fill_settings(RunOptions(use_cpu=True), 64, 2)["zero_optimization"]["stage"] == 3
    (tmp_path / "ds.json").write_text(json.dumps(zero_preset("zero1")))
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", str(tmp_path / "ds.json"))
    assert fill_settings(RunOptions(use_cpu=True), 64, 2)["zero_optimization"]["stage"] == 1


def test_stale_lock_of_killed_compilation_is_reported(tmp_path):
    lock = tmp_path / "py311_cpu" / "deepspeed_shm_comm_op" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    raise_if_locked(tmp_path)
    os.utime(lock, (time.time() - 600,) * 2)
    with pytest.raises(UserError, match="began 10 minutes ago"):
        raise_if_locked(tmp_path)
