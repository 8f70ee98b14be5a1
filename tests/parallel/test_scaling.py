"""Throughput forecasts for several devices, and the page that shows them."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from burnish.run.plan.memory import DecoderShape, Formats, Term
from burnish.run.plan.memory_per_device import Sharing, peaks, sharing_of, terms_per_device
from burnish.run.plan.plan import RunOptions

ROOT = Path(__file__).parents[2]
SHAPE = DecoderShape(layers=10, hidden=64, intermediate=256, keys=64, vocabulary=1000)
FLOAT32, BF16 = Formats(4, 4, 4, 8), Formats(2, 4, 2, 8)
SIZES = {"weights": 400, "gradients": 400, "optimizer": 800, "activations": 50}
TERMS = [Term(name, size, "") for name, size in SIZES.items()]


def parts(sharing, formats=FLOAT32):
    return {term.name: term.num_bytes for term in terms_per_device(TERMS, sharing, SHAPE, formats, 100, 100)}


def test_each_zero_stage_shards_one_more_part():
    assert parts(Sharing("ddp", 4)) == SIZES
    assert parts(Sharing("deepspeed", 4, 1))["optimizer"] == 200
    assert parts(Sharing("deepspeed", 4, 2))["gradients"] == 100
    fully = parts(Sharing("fsdp", 4, 3))
    assert (fully["weights"], fully["gradients"], fully["optimizer"]) == (100, 100, 200)
    assert fully["activations"] == 50
    assert fully["gathered"] > 0
    assert parts(Sharing("fsdp", 4, 3, keeps_gathered=True))["gathered"] >= fully["gathered"]
    offloaded = parts(Sharing("deepspeed", 4, 3, offloads_states=True, offloads_weights=True))
    assert not {"weights", "gradients", "optimizer"} & offloaded.keys()


def test_zero_updates_float32_copies_of_weights_and_gradients():
    result = parts(Sharing("deepspeed", 4, 2), BF16)
    assert (result["weights"], result["gradients"], result["float32 copies"]) == (200, 50, 200)
    assert parts(Sharing("deepspeed", 4, 2))["float32 copies"] == 200


def test_zero_buckets_gradients_and_stage_3_keeps_reused_parameters():
    assert parts(Sharing("deepspeed", 4, 2, bucket=5000), BF16)["buckets"] == 10_000
    assert parts(Sharing("deepspeed", 4, 2, bucket=5000, is_on_cpu=True), BF16)["buckets"] == 200
    assert parts(Sharing("deepspeed", 4, 2, bucket=None), BF16)["buckets"] == 2 * SHAPE.hidden**2
    assert parts(Sharing("deepspeed", 4, 3, live=10**9), BF16)["gathered"] >= 200


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, Sharing("ddp", 8)),
        ({"fsdp": "full_shard"}, Sharing("fsdp", 8, 3)),
        ({"fsdp": "shard_grad_op"}, Sharing("fsdp", 8, 3, keeps_gathered=True)),
        ({"deepspeed": "zero2"}, Sharing("deepspeed", 8, 2, bucket=5 * 10**8, is_on_cpu=True)),
        ({"deepspeed": "zero3_offload"}, Sharing("deepspeed", 8, 3, False, True, True, 10**9, None, True)),
    ],
)
def test_sharding_is_derived_from_options(options, expected):
    assert sharing_of(RunOptions(use_cpu=True, **options), 8) == expected


def test_hybrid_shard_shares_memory_within_a_machine_only(monkeypatch):
    monkeypatch.setenv("NNODES", "2")
    assert sharing_of(RunOptions(use_cpu=True, fsdp="hybrid_shard"), 16).num_processes == 8
    assert sharing_of(RunOptions(use_cpu=True, fsdp="full_shard"), 16).num_processes == 16


def test_sharded_loading_and_saving_use_part_of_the_memory():
    alone, four = (peaks(Sharing("fsdp", n, 3), 100, 100, FLOAT32, 2) for n in (1, 4))
    assert [term.num_bytes for term in alone] == [400, 1200]
    assert [term.num_bytes for term in four] == [100, 300]


@pytest.mark.slow
def test_scaling_page_is_generated_by_its_script():
    subprocess.run([sys.executable, ROOT / "scripts" / "make_scaling_page.py", "--check"], check=True, timeout=300)


@pytest.mark.run
def test_scheduler_examples_can_be_parsed():
    service, job = yaml.safe_load_all((ROOT / "examples/kubernetes/train.yaml").read_text())
    assert (service["kind"], job["kind"]) == ("Service", "Job")
    subprocess.run(["bash", "-n", ROOT / "examples/slurm/train.sbatch"], check=True)
