"""Tokens in foreign files appear on no page and in no download."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from burnish.report.metadata import launch_record

TOKEN = "hf_AbCdEfGhIjKlMnOpQrStUvWxYz01234567"
WORD = "correct-horse-battery"
YAML = f"""model_name_or_path: m
hf_hub_token: {WORD}
wandb_api_key:
  {"0123456789" * 4}
run_name: {TOKEN}
nested: {{api_key: {WORD}}}
"""


@pytest.fixture
def foreign(root: Path) -> Path:
    """Create a run folder with tokens in every file."""
    folder = root / "foreign"
    folder.mkdir()
    launch = {
        **launch_record([]),
        "pid": 2**22 + 1,
        "folder": str(root),
        "argv": ["burnish", f"--hub_token={WORD}", TOKEN],
    }
    (folder / "launch.json").write_text(json.dumps(launch | {"user": TOKEN}))
    (folder / "run.yaml").write_text(YAML)
    outcome = {"state": "failed", "time": 2e9, "sentence": f"hub_token: {WORD} is wrong", "remedy": f"Not {TOKEN}."}
    (folder / "outcome.json").write_text(json.dumps(outcome))
    event = {"time": 1.79e9, "step": 1, "kind": "best", "text": f"Bearer {TOKEN}", "token": TOKEN}
    (folder / "events.jsonl").write_text(json.dumps(event) + "\n")
    (folder / "console.log").write_text(f"line\nlogin with {TOKEN}\n" + "x" * 40 + "\n")
    rows = [{"current_steps": n, "loss": 1.0, "note": TOKEN} for n in (1, 2)]
    (folder / "trainer_log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_no_page_or_download_shows_a_token_of_a_foreign_run(page: Any, foreign: Path) -> None:
    run = page.id_of("foreign")
    places = ["/runs", f"/runs/{run}", "/api/runs", f"/api/runs/{run}", f"/api/runs/{run}/log",
              f"/api/runs/{run}/series", "/api/poll", f"/api/poll?runs={run}&log=1", "/settings",
              f"/api/runs/{run}/held-out"]  # fmt: skip
    files = [file["name"] for file in page.get(f"/api/runs/{run}")["files"]]
    assert {"run.yaml", "events.jsonl", "console.log", "outcome.json"} <= set(files)
    for place in [*places, *(f"/api/runs/{run}/download/{name}" for name in files)]:
        _, headers, text = page.send("GET", place)
        for secret in (TOKEN, WORD, "0123456789" * 4):
            assert secret not in f"{text} {headers}", place
    assert (foreign / "run.yaml").read_text() == YAML


def test_no_log_offset_reveals_part_of_a_token(page: Any, foreign: Path) -> None:
    run = page.id_of("foreign")
    size = (foreign / "console.log").stat().st_size
    for offset in range(1, size + 1):
        for place in (f"/api/runs/{run}/log?before={offset}", f"/api/poll?runs={run}&log=1&after={run}:0:0:{offset}:"):
            text = page.send("GET", place)[2]
            assert "hf_Ab" not in text
            assert TOKEN[-6:] not in text, place


@pytest.mark.run
def test_presets_and_yaml_texts_are_returned_without_tokens(page: Any) -> None:
    assert page.send("PUT", "/api/presets/mine", {"text": YAML})[0] == 200
    assert "m" in page.get("/api/form")["own_presets"]["mine"].values()
    options = {
        "/api/form": page.send("GET", "/api/form")[2],
        "/api/yaml": page.send("POST", "/api/yaml", {"text": YAML})[2],
        "broken": page.send("POST", "/api/yaml", {"text": f"hf_hub_token: {WORD}: x\n"})[2],
        "unclosed": page.send("POST", "/api/yaml", {"text": f'hf_hub_token: "{WORD}\nlr: 1\n'})[2],
        "stray": page.send("POST", "/api/yaml", {"text": f"{TOKEN}\n"})[2],
        "value": page.send("POST", "/api/runs", {"values": {"output_dir": [TOKEN]}})[2],
        "wrong": page.send("POST", "/api/check", {"values": {"model_name_or_path": "m", TOKEN: TOKEN, "lr": TOKEN}})[2],
    }
    for name, text in options.items():
        assert TOKEN not in text, name
        assert WORD not in text, name
