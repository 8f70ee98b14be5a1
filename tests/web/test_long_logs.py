"""Runs with ten and a hundred thousand logged steps: small responses without loss, and lists that do not read them
whole.
"""

from __future__ import annotations

import gzip
import json
import math
import os
import time
from pathlib import Path

import pytest

from burnish.serve.page.runs import log_columns
from burnish.serve.page.runs.log_columns import columns_of, rows_since
from burnish.serve.page.runs.series import series, small_line_chart


def write_log(folder: Path, steps: int, spike: int) -> None:
    with (folder / "trainer_log.jsonl").open("w") as log:
        for step in range(1, steps + 1):
            row = {
                "current_steps": step, "total_steps": steps, "loss": 99.0 if step == spike else 3 / math.log(step + 2),
                "lr": 1e-4, "epoch": step / 2000, "percentage": 1.0, "elapsed_time": "0:00:10", "throughput": 1000.0,
                "remaining_time": "0:00:10", "total_tokens": step * 100, "grad_norm": 1.0, "memory_bytes": 10**9,
                "step_seconds": 0.5, "time": 1.79e9 + step,
            }  # fmt: skip
            log.write(json.dumps(row) + "\n")
            if step % 1000 == 0:
                log.write(json.dumps({"current_steps": step, "eval_loss": 2.0}) + "\n")


@pytest.mark.parametrize("steps", [10_000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_long_curves_are_downsampled_keeping_spikes_and_evaluations(page, root, steps) -> None:
    write_log(root / "saves/first", steps, spike=steps // 3)
    run = page.id_of("first")
    began = time.monotonic()
    status, _, text = page.send("GET", f"/api/runs/{run}/series?points=4000")
    took_s = time.monotonic() - began
    result = json.loads(text)
    columns = result["columns"]
    assert (status, result["rows"]) == (200, steps + steps // 1000)
    assert len(columns["step"]) <= 4500
    assert max(value for value in columns["loss"] if value is not None) == 99.0
    assert sum(value is not None for value in columns["eval_loss"]) == steps // 1000
    assert (columns["step"][0], columns["step"][-1]) == (1, steps)
    assert len(gzip.compress(text.encode())) < 150_000
    assert took_s < 15  # detects a hang; speed is measured with the entire page


def test_columns_read_incrementally_are_equal_and_include_new_rows(tmp_path) -> None:
    write_log(tmp_path, 6000, spike=7)  # more than one block
    log = tmp_path / "trainer_log.jsonl"
    assert log.stat().st_size > 2**20
    columns, offset = series(tmp_path)
    assert columns == columns_of(rows_since(log, 0)[0])
    assert offset == log.stat().st_size
    with log.open("a") as file:
        file.write('{"current_steps": 6001, "loss": 1.5}\n{"current_steps": 60')
    again, next_position = series(tmp_path)
    assert again["step"][-1] == 6001
    assert next_position == offset + len('{"current_steps": 6001, "loss": 1.5}\n')


def test_columns_of_a_long_log_are_kept_until_its_rows_change(tmp_path, monkeypatch) -> None:
    write_log(tmp_path, 20_000, spike=7)
    log = tmp_path / "trainer_log.jsonl"
    assert log.stat().st_size > 2**22
    parsed = []
    monkeypatch.setattr(log_columns, "columns_of", lambda rows: parsed.append(len(rows)) or columns_of(rows))
    first, _ = series(tmp_path)
    count = len(parsed)
    with log.open("a") as file:
        file.write('{"current_steps": 20001, "loss": 1.5, "rewards/margins": 2.0}\n')
    second, _ = series(tmp_path)
    assert parsed[count:] == [1]  # only the new row
    assert second == columns_of(rows_since(log, 0)[0])
    assert first["step"] == second["step"][:-1]

    lines = log.read_text().splitlines(keepends=True)[:15_000]  # the run was resumed from a checkpoint
    again = [line.replace('"time": 1.79e', '"time": 1.80e').replace('"loss": ', '"loss": 1') for line in lines]
    log.write_text("".join([*lines, *again]))
    assert series(tmp_path)[0] == columns_of(rows_since(log, 0)[0])
    assert log_columns._kept is not None
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    log_columns._forget_later(log_columns._kept)
    assert log_columns._kept is None


def test_damaged_line_loses_only_itself(tmp_path) -> None:
    log = tmp_path / "trainer_log.jsonl"
    for damaged in ("{}}{", "[1]", "3", '{"a": 1}, {"a": 2}', "null", '{"current_steps": 8', "\x00"):
        log.write_text(f'{{"current_steps": 1, "loss": 2}}\n{damaged}\n{{"current_steps": 9, "loss": NaN}}\n')
        assert series(tmp_path)[0] == {"step": [1, 9], "loss": [2, "NaN"]}, damaged
        log.unlink()


def _line(step: object = 5, loss: object = 2) -> str:
    return f'{{"current_steps": {step}, "loss": {loss}, "lr": 0.1, "elapsed_time": "1 day, 2:00:00"}}'


_ODD = (
    '{"current_steps": 5, "eval_loss": 1.5}', '{"current_steps": 5, "loss": 1.5}', '{"current_steps":5,"loss":1.5}',
    '{"loss": 1.5, "current_steps": 5, "lr": 0.1, "elapsed_time": "0"}', '{"a": "b"}', "[" * 9000, "{}", "7", "",
    *(_line(loss=one) for one in ("NaN", "-Infinity", "1e999", "01", "null", '"NaN"', "+1", "-1.5E-3", "1.", "true")),
    _line("5.0"), _line("9" * 5000), f"x{_line()}", f"{_line()}x", _line() * 2, f" {_line()}", f"{_line()}\r",
    _line().replace("day", "\\u0041"), _line().replace('"1 day, 2:00:00"', '{"a": [1, 2]}'),
    _line().replace('"lr"', '"loss"'), "\x00",
)  # fmt: skip


@pytest.mark.parametrize("odd", _ODD, ids=lambda line: line[:60])
def test_lines_of_unusual_format_are_parsed_as_json(tmp_path, odd) -> None:
    defaults = [_line(step, f"{step}.5") + "\n" for step in range(1, 5)]
    for position in range(5):  # before, between and after usual lines; the last line determines which format is usual
        log = tmp_path / f"{position}.jsonl"
        log.write_text("".join([*defaults[:position], odd + "\n", *defaults[position:]]))
        result, offset = log_columns.log_columns(log)
        assert result == columns_of(rows_since(log, 0)[0])
        assert offset == log.stat().st_size


def test_missing_or_restarted_log_is_reread(tmp_path) -> None:
    log = tmp_path / "trainer_log.jsonl"
    assert log_columns.log_columns(log) == ({"step": []}, 0)
    for steps in (400, 90):
        log.write_text("".join(_line(step, 3.5) + "\n" for step in range(1, steps)))
        assert log_columns.log_columns(log)[0]["loss"] == [3.5] * (steps - 1)


def test_thumbnail_of_a_long_run_spans_first_to_last_loss(tmp_path) -> None:
    write_log(tmp_path, 5000, spike=0)
    points = [tuple(map(float, point.split(","))) for point in small_line_chart(tmp_path).split()]
    assert len(points) >= 60
    assert points[0][1] == 2.0  # the largest loss is at the top
    assert points[-1][1] == 26.0
    assert [height for _, height in points] == sorted(height for _, height in points)


def test_pipe_in_place_of_a_run_file_does_not_block(page, root) -> None:
    run, folder = page.id_of("first"), root / "saves/first"
    for name in ("trainer_log.jsonl", "events.jsonl", "launch.json", "outcome.json", "trainer_state.json", "run.log",
                 "run.yaml", "console.log"):  # fmt: skip
        before = (folder / name).read_bytes() if (folder / name).is_file() else None
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)
        for place in ("", "/series?points=100", "/log"):
            status, _, _ = page.send("GET", f"/api/runs/{run}{place}")
            assert status == 200 or (name, status) == ("launch.json", 404), (name, place)
        assert page.send("GET", "/api/runs")[0] == 200
        (folder / name).unlink()
        if before is not None:
            (folder / name).write_bytes(before)
    os.mkfifo(root / "dataset_info.json")
    assert page.send("GET", "/api/datasets")[0] == 200
