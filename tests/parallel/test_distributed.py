"""Complete runs of four processes give the weights of one process, for every kind of sharding.

make test-distributed                          # DeepSpeed's where it is installed
"""

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch

from run_outputs import weights_in
from small_run import as_arguments, make_workspace

pytestmark = pytest.mark.distributed

# The settings of LLaMA-Factory's ZeRO examples.
BUCKETS = {"allgather_partitions": True, "allgather_bucket_size": 5e8, "overlap_comm": False, "reduce_scatter": True,
           "reduce_bucket_size": 5e8, "contiguous_gradients": True, "round_robin_gradients": True}  # fmt: skip
THIRD = {"overlap_comm": False, "contiguous_gradients": True, "sub_group_size": 1e9, "reduce_bucket_size": "auto",
         "stage3_prefetch_bucket_size": "auto", "stage3_param_persistence_threshold": 0,
         "stage3_max_live_parameters": 1e9, "stage3_max_reuse_distance": 1e9,
         "stage3_gather_16bit_weights_on_model_save": True}  # fmt: skip
AWAY = {"device": "cpu", "pin_memory": True}
LORA = {"finetuning_type": "lora", "lora_rank": 4, "lora_target": "all"}
HAS_DEEPSPEED = importlib.util.find_spec("deepspeed") is not None
needs_deepspeed = pytest.mark.skipif(not HAS_DEEPSPEED, reason="DeepSpeed is not installed")


def settings_of(zero):
    return {
        "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto", "zero_allow_untested_optimizer": True,
        "fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16,
                 "hysteresis": 2, "min_loss_scale": 1},
        "bf16": {"enabled": "auto"}, "zero_optimization": zero,
    }  # fmt: skip


ENGINES = {
    "ddp": {},
    "fsdp": {"fsdp": "full_shard"},
    "hybrid": {"fsdp": "hybrid_shard", "fsdp_config": '{"dp_replicate_size": 2}'},
    "offload": {"fsdp": "full_shard offload"},
    "zero1": {"deepspeed": "zero1"},
    "zero2": {"deepspeed": json.dumps(settings_of({"stage": 2, **BUCKETS}))},
    "zero2 offload": {"deepspeed": json.dumps(settings_of({"stage": 2, **BUCKETS, "offload_optimizer": AWAY}))},
    "zero3": {"deepspeed": json.dumps(settings_of({"stage": 3, **THIRD}))},
    "zero3 offload": {"deepspeed": "zero3_offload"},
}
KINDS = {"full": {}, "lora": LORA}


def train(options, output_dir, python=sys.executable, **more):
    command = [python, "-m", "burnish", "train", *as_arguments({**options, **more, "output_dir": str(output_dir)})]
    process = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert process.returncode == 0, process.stderr
    return process.stdout


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Train in one process. Return the folder, and the options for four processes."""
    folder = tmp_path_factory.mktemp("alone")
    overrides = make_workspace(
        folder, max_steps=4, save_steps=2, plot_loss=False, per_device_train_batch_size=4, gradient_accumulation_steps=2
    )
    os.environ["BURNISH_CACHE"] = str(folder / "cache")
    for kind, options in KINDS.items():
        train({**overrides, **options}, folder / kind)
    return folder, {**overrides, "per_device_train_batch_size": 1, "num_processes": 4}


def assert_same(ours, theirs):
    ours, theirs = weights_in(ours), weights_in(theirs)
    assert ours.keys() == theirs.keys()
    for name, weight in theirs.items():  # sums over ranks are added in another order
        torch.testing.assert_close(ours[name], weight, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("engine", ENGINES)
def test_four_processes_give_weights_of_one_and_their_checkpoint_resumes_on_one(engine, kind, alone, tmp_path):
    if engine.startswith("zero") and not HAS_DEEPSPEED:
        pytest.skip("DeepSpeed is not installed")
    folder, four = alone
    train({**four, **ENGINES[engine], **KINDS[kind]}, tmp_path / "four")
    assert_same(tmp_path / "four", folder / kind)
    shutil.copytree(tmp_path / "four" / "checkpoint-2", tmp_path / "then one" / "checkpoint-2")
    one = {**four, "per_device_train_batch_size": 4, "num_processes": 1}
    train({**one, **KINDS[kind]}, tmp_path / "then one")
    assert_same(tmp_path / "then one", folder / kind)


# The FSDP settings of LLaMA-Factory's two accelerate configs.
ACCELERATE_SETTINGS = {
    "FSDP1": {"fsdp_backward_prefetch": "BACKWARD_PRE", "fsdp_forward_prefetch": False, "fsdp_offload_params": True,
              "fsdp_sharding_strategy": "FULL_SHARD", "fsdp_sync_module_states": True, "fsdp_use_orig_params": False},
    "FSDP2": {"fsdp_offload_params": False, "fsdp_reshard_after_forward": True, "fsdp_version": 2},
}  # fmt: skip


@pytest.mark.parametrize("version", ACCELERATE_SETTINGS)
def test_two_processes_of_accelerate_launch_give_weights_of_one(version, alone, tmp_path):
    folder, four = alone
    sharding = {"fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "fsdp_cpu_ram_efficient_loading": True,
                "fsdp_state_dict_type": "FULL_STATE_DICT", **ACCELERATE_SETTINGS[version]}  # fmt: skip
    file = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "FSDP", "fsdp_config": sharding,
            "machine_rank": 0, "mixed_precision": "no", "num_machines": 1, "num_processes": 2, "main_process_port": 0,
            "rdzv_backend": "static", "use_cpu": False}  # fmt: skip
    (tmp_path / "fsdp.yaml").write_text(json.dumps(file))
    options = {**four, "per_device_train_batch_size": 2, "num_processes": "auto", "output_dir": str(tmp_path / "two")}
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(tmp_path / "fsdp.yaml"),
               "-m", "burnish.train", *as_arguments(options)]  # fmt: skip
    process = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert process.returncode == 0, process.stderr
    assert "2 processes" in process.stdout
    assert_same(tmp_path / "two", folder / "full")


@pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")
@pytest.mark.parametrize("engine", ["ddp", "fsdp", pytest.param("zero2", marks=needs_deepspeed)])
def test_adapter_over_4_bit_base_gives_weights_of_one_process(engine, alone, tmp_path):
    _, four = alone
    quantized = {**four, **LORA, "quantization_bit": 4, "max_steps": 2}
    train({**quantized, "per_device_train_batch_size": 4, "num_processes": 1}, tmp_path / "one")
    train({**quantized, **ENGINES[engine]}, tmp_path / "four")
    assert_same(tmp_path / "four", tmp_path / "one")


@pytest.mark.parametrize("engine", ["fsdp", pytest.param("zero3", marks=needs_deepspeed)])
def test_responses_of_ranks_with_unequal_prompts_match_one_process(engine, alone, tmp_path):
    folder, four = alone
    (tmp_path / "held.json").write_text(json.dumps(json.loads((folder / "data.json").read_text())[:5]))
    options = {**four, "eval_dataset": str(tmp_path / "held.json"), "do_predict": True, "predict_with_generate": True,
               "max_new_tokens": 8, "do_sample": False, "per_device_eval_batch_size": 2, "max_steps": 2,
               "predict_metrics": "exact_match"}  # fmt: skip
    train({**options, "num_processes": 1, "per_device_train_batch_size": 4}, tmp_path / "one")
    train({**options, **ENGINES[engine], "num_processes": 2, "per_device_train_batch_size": 2}, tmp_path / "two")
    ours, theirs = ((tmp_path / name / "generated_predictions.jsonl").read_text() for name in ("two", "one"))
    assert len(theirs.splitlines()) == 5
    assert ours == theirs


@needs_deepspeed
def test_run_resumes_from_zero3_with_fsdp_and_then_one_process(alone, tmp_path):
    folder, four = alone
    train({**four, "save_steps": 1, **ENGINES["zero3"]}, tmp_path / "zero3")
    shutil.copytree(tmp_path / "zero3" / "checkpoint-1", tmp_path / "fsdp" / "checkpoint-1")
    two = {**four, "save_steps": 1, "num_processes": 2, "per_device_train_batch_size": 2}
    train({**two, **ENGINES["fsdp"]}, tmp_path / "fsdp")
    shutil.copytree(tmp_path / "fsdp" / "checkpoint-3", tmp_path / "one" / "checkpoint-3")
    train({**four, "per_device_train_batch_size": 4, "num_processes": 1}, tmp_path / "one")
    assert_same(tmp_path / "one", folder / "full")


@pytest.mark.parametrize("seconds", [0.0, 0.4, 0.9, 1.6])
def test_killed_rank_leaves_only_complete_checkpoints_and_run_resumes(seconds, alone, tmp_path):
    folder, four = alone
    options = {**four, "save_steps": 1, "num_processes": 2, "per_device_train_batch_size": 2, **ENGINES["fsdp"]}
    options["output_dir"] = str(tmp_path / "out")
    running = subprocess.Popen(
        [sys.executable, "-m", "burnish", "train", *as_arguments(options)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    until = time.monotonic() + 120
    while not (tmp_path / "out").is_dir() and time.monotonic() < until:
        time.sleep(0.05)
    time.sleep(seconds)
    ranks = subprocess.run(["pgrep", "-P", str(running.pid)], capture_output=True, text=True).stdout.split()
    if ranks and running.poll() is None:
        os.kill(int(ranks[-1]), signal.SIGKILL)
    began = time.monotonic()
    running.communicate(timeout=60)
    assert time.monotonic() - began < 30
    train({name: value for name, value in options.items() if name != "output_dir"}, tmp_path / "out")
    assert_same(tmp_path / "out", folder / "full")
