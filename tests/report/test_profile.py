"""``--profile``: a table, a trace, and the same weights."""

import gzip
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from burnish.cli import main
from small_run import as_arguments, make_workspace

pytestmark = pytest.mark.run

PARTS = (
    "forward and loss", "backward", "gradient norm and clipping", "optimizer", "the rest of the step", "between steps",
)  # fmt: skip


def run(options, *argv):
    return main(["train", *as_arguments(options), *argv])


def test_profiled_run_reports_step_times_and_saves_a_trace(tmp_path, capsys):
    options = make_workspace(tmp_path, profile_steps=2)
    assert run(options, "--profile") == 0
    folder = Path(options["output_dir"]) / "profile"
    table = (folder / "steps.txt").read_text()
    assert table in capsys.readouterr().out
    lines = {part: next(line for line in table.splitlines() if line.strip().startswith(part)) for part in PARTS}
    shares = [float(line.split("%")[0].split()[-1]) for line in lines.values()]
    assert all(share > 0 for share in shares[:4])
    device = float(next(line for line in table.splitlines() if "batch to the device" in line).split("%")[0].split()[-1])
    assert abs(sum(shares) + device - 100) < 1
    assert "GiB" in lines["backward"]
    assert "aten::" in table
    events = json.loads(gzip.decompress((folder / "trace.json.gz").read_bytes()))["traceEvents"]
    named = [event.get("name") for event in events]
    assert named.count("backward") == named.count("forward and loss") == 2  # micro-batches of one step
    assert named.count("optimizer") >= 1


@pytest.mark.slow
def test_profiled_run_gives_same_weights_and_resumes_unprofiled(tmp_path):
    plain, watched = (make_workspace(tmp_path / name, lr_scheduler_type="constant") for name in "ab")
    assert run(plain) == 0
    assert run(watched, "--profile", "--max_steps=7", "--save_steps=7") == 0
    assert run(watched, "--max_steps=12") == 0
    ours, theirs = (load_file(Path(options["output_dir"]) / "model.safetensors") for options in (plain, watched))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_run_too_short_for_profiling_is_reported(tmp_path, capsys):
    assert run(make_workspace(tmp_path), "--profile", "--max_steps=5") == 2
    assert "Set max_steps: 7 or more" in capsys.readouterr().err
    assert run(make_workspace(tmp_path, count=8), "--profile") == 0
    assert "Nothing was profiled: profiling requires 7 steps, and this run had 4." in capsys.readouterr().out
