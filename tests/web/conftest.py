"""The web UI in a thread over a folder with runs of several tools; skipped without the extra ``web``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

collect_ignore_glob = [] if find_spec("starlette") and find_spec("uvicorn") else ["test_[!n]*.py"]
KEY = "a-key-of-tests-0123456789"


def make_runs(root: Path) -> None:
    """Create finished runs of burnish, LLaMA-Factory and transformers, and a failed run."""
    from burnish.report.metadata import launch_record

    first = root / "saves" / "first"
    first.mkdir(parents=True)
    rows = [
        {"current_steps": step, "total_steps": 40, "loss": 3 / step + (5 if step == 20 else 0), "lr": 1e-4,
         "epoch": step / 20, "percentage": 2.5 * step, "elapsed_time": "0:00:10",
         "remaining_time": "0:00:10", "throughput": 1000.0,
         "total_tokens": step * 100, "grad_norm": 1.0, "memory_bytes": 10**9, "step_seconds": 0.5,
         "time": 1.79e9 + step}
        for step in range(1, 41)
    ]  # fmt: skip
    rows.insert(20, {"current_steps": 20, "total_steps": 40, "eval_loss": 0.5, "epoch": 1.0, "percentage": 50.0,
                     "elapsed_time": "0:00:10", "remaining_time": "0:00:10", "time": 1.79e9 + 20.5})  # fmt: skip
    (first / "trainer_log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    launch = {**launch_record(["cpu"]), "pid": 2**22 + 1, "time": 1.79e9, "folder": str(root)}
    (first / "launch.json").write_text(json.dumps(launch))
    (first / "run.yaml").write_text('model_name_or_path: "model"\nlearning_rate: 0.0001\noutput_dir: "saves/first"\n')
    (first / "events.jsonl").write_text(
        json.dumps({"time": 1.79e9, "step": 0, "kind": "stage", "text": "training"}) + "\n"
    )
    (first / "outcome.json").write_text(json.dumps({"state": "done", "time": 1.8e9, "sentence": "", "step": 40}))
    (first / "console.log").write_text("step 1\n\x1b[31mred\x1b[0m <img src=x onerror=alert(1)>\n")
    (first / "training_loss.png").write_bytes(b"\x89PNG")
    (first / "model.safetensors").write_bytes(b"weights")
    (first / "checkpoint-40").mkdir()
    factory = root / "factory"
    factory.mkdir()
    (factory / "trainer_log.jsonl").write_text(
        "".join(
            json.dumps({"current_steps": s, "total_steps": 9, "loss": 2.0 - s / 10, "percentage": s * 11.2}) + "\n"
            for s in range(1, 10)
        )
    )
    (factory / "all_results.json").write_text("{}")
    trl = root / "trl"
    trl.mkdir()
    history = [
        {"step": s, "loss": 1.5 if s != 3 else float("nan"), "grad_norm": 0.3, "learning_rate": 1e-5}
        for s in range(1, 6)
    ]
    (trl / "trainer_state.json").write_text(json.dumps({"max_steps": 5, "global_step": 5, "log_history": history}))
    broken = root / "saves" / "<img src=x onerror=alert(1)>"
    broken.mkdir()
    (broken / "launch.json").write_text(json.dumps(launch))
    (broken / "outcome.json").write_text(
        json.dumps(
            {
                "state": "failed",
                "time": 1.8e9,
                "sentence": "Out of memory: <script>alert(1)</script>",
                "remedy": "Try less.",
            }
        )
    )


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "root"
    folder.mkdir()
    make_runs(folder)
    return folder


@pytest.fixture
def page(root: Path, tmp_path: Path) -> Iterator[object]:
    from web.page_thread import start_page

    with start_page(root, tmp_path / "home", KEY) as result:
        yield result
