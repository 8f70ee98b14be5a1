"""Memory estimates of ``explain`` for one of several processes compared with the measured peak.

The peak of a process includes memory that no estimate counts: gloo's send buffers and allocator fragmentation. With a
small model, these are up to a fifth of the peak.
"""

import importlib.util
import json
from pathlib import Path

import pytest

from small_run import make_model, records
from two_processes import in_processes

pytestmark = [pytest.mark.distributed, pytest.mark.run]

SHAPE = {"vocab_size": 2000, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 4,
         "num_attention_heads": 8, "num_key_value_heads": 4}  # fmt: skip
THIRD = {"stage": 3, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto",
         "stage3_param_persistence_threshold": 0}  # fmt: skip
ENGINES = {
    "one": (1, {}), "ddp": (2, {}), "fsdp": (2, {"fsdp": "full_shard"}), "zero2": (2, {"deepspeed": "zero2"}),
    "zero3": (2, {"deepspeed": json.dumps({"zero_optimization": THIRD})}),
}  # fmt: skip
LORA = {"finetuning_type": "lora", "lora_rank": 16}


def resident(which):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(which))


def measure(argv, place):
    """Train, and write this rank's peak memory above that before the model was loaded, and the predicted peak."""
    from burnish.explain.explain import memory_terms_of
    from burnish.parallel.create import create_parallel
    from burnish.run.build import build_loop
    from burnish.run.plan.config_files import merge, read_arguments
    from burnish.run.plan.plan import aliases, plan
    from burnish.run.prepare import prepare

    planned = plan(merge(*read_arguments(argv), aliases()))
    prepared, engine = prepare(planned), create_parallel(planned.options)
    before = resident("VmRSS")
    loop = build_loop(planned, prepared, engine, None)
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak (proc(5))
    loop.train()
    predicted = sum(term.num_bytes for term in memory_terms_of(planned, prepared))
    Path(f"{place}.{engine.rank}").write_text(json.dumps([resident("VmHWM") - before, predicted]))


@pytest.fixture(scope="module")
def user(tmp_path_factory):
    folder = tmp_path_factory.mktemp("user")
    make_model(folder / "model", **SHAPE)
    rows = [{**record, "output": " ".join([record["output"]] * 12)} for record in records(16)]
    (folder / "data.json").write_text(json.dumps(rows))
    return folder


@pytest.mark.parametrize("kind", ["full", "lora"])
@pytest.mark.parametrize("engine", ENGINES)
def test_process_uses_memory_predicted_by_explain(engine, kind, user, tmp_path):
    if engine.startswith("zero") and importlib.util.find_spec("deepspeed") is None:
        pytest.skip("DeepSpeed is not installed")
    count, options = ENGINES[engine]
    overrides = {
        "model_name_or_path": user / "model", "dataset": user / "data.json", "template": "qwen", "use_cpu": "true",
        "output_dir": tmp_path / "out", "per_device_train_batch_size": 4, "max_steps": 3, "save_strategy": "no",
        "logging_steps": 3, "report_to": "none", "plot_loss": False, "finetuning_type": "full", **options,
    }  # fmt: skip
    overrides |= LORA if kind == "lora" else {}
    argv = [f"{name}={value}" for name, value in overrides.items()]
    in_processes(count, measure, argv, str(tmp_path / "rank"), environment={"BURNISH_CACHE": str(tmp_path / "cache")})
    for rank in range(count):
        measured, predicted = json.loads((tmp_path / f"rank.{rank}").read_text())
        assert 0.8 * predicted < measured < 1.2 * predicted, (measured, predicted)
