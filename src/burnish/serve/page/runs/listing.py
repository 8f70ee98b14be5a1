"""``burnish runs [FOLDER]``: list runs as text, read in the same way as in the web UI."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from burnish.config.errors import UserError
from burnish.config.secrets import mask_json
from burnish.report.console import print_result
from burnish.report.pace import short_number, short_time
from burnish.serve.page.runs.run_warnings import warnings_of
from burnish.serve.page.runs.runs import FoundRun, find
from burnish.serve.page.runs.series import series
from burnish.utils.files import expand_user

_HEAD = ("name", "state", "step", "loss", "eval", "tokens/s", "left", "started", "folder")


def runs(argv: Sequence[str]) -> int:
    """The command: a table, or with ``--json`` a JSON object per line."""
    as_json = "--json" in argv
    folders = [word for word in argv if word != "--json"]
    if options := [word for word in folders if word.startswith("-") or "=" in word]:
        raise UserError(f"burnish runs accepts only folders and --json. Received: {options[0]}.")
    roots = [expand_user(folder) for folder in folders or ["."]]
    if missing := [root for root in roots if not os.path.isdir(root)]:
        raise UserError(f'The folder "{missing[0]}" does not exist.')
    found = find(roots)
    if as_json:
        for run in found:
            known = mask_json({**facts(run), "warnings": _warnings(run)})
            print_result(json.dumps(known, allow_nan=False), masks_secrets=False)
        return 0
    if not found:
        print_result(f"No runs found in {', '.join(map(str, roots))}.")
        return 0
    rows = [_HEAD, *map(_row, found)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEAD))]
    for row in rows:
        print_result("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    for run in found:
        if run.state in ("failed", "died", "unreadable"):
            line = joined(run.sentence, run.remedy)
            print_result(f"{_line(run.name)}: {line}")
        for warning in _warnings(run):
            print_result(f"{_line(run.name)}: {warning}")
    return 0


def _warnings(run: FoundRun) -> list[str]:
    return [warning.text("en") for warning in warnings_of(run, series(run.folder)[0])]


def _row(run: FoundRun) -> tuple[str, ...]:
    return (
        _line(run.name)[:40], run.state if run.maker in ("burnish", "") else f"{run.state} ({run.maker})",
        f"{run.step}/{run.total}" if run.total else str(run.step),
        _loss(run.loss), _loss(run.eval_loss),
        "-" if run.tokens_per_s is None else short_number(run.tokens_per_s),
        short_time(run.left_s) if run.is_alive and run.left_s is not None else "-",
        time.strftime("%Y-%m-%d %H:%M", time.localtime(run.started)), _line(str(run.folder)),
    )  # fmt: skip


def _loss(loss: float | None) -> str:
    return "-" if loss is None else f"{loss:.4f}" if abs(loss) < 1e6 else f"{loss:.4g}"


def _line(name: str) -> str:
    """The name of a folder on one line, without control characters."""
    return "".join(one if one.isprintable() else "\ufffd" for one in name)


def joined(sentence: str, remedy: str) -> str:
    """Join the message and the remedy of an error. A full stop is added to a message that ends with a quoted value. The
    same as ``joined`` in ``static/format.js``."""
    is_open = bool(sentence and remedy) and sentence[-1] not in ".!?:。！？："
    return f"{sentence}{'.' if is_open else ''} {remedy}".strip()


def distinct_names(folders: Iterable[Path]) -> dict[Path, str]:
    """The last parts of each path, as many as distinguish it from the others: ``lora/sft``, ``full/sft``."""
    names, depth = {folder: folder.name for folder in folders}, 1
    while repeated := {name for name, count in Counter(names.values()).items() if count > 1}:
        depth += 1
        names = {
            folder: "/".join(folder.parts[-depth:]) if name in repeated else name for folder, name in names.items()
        }
    return names


def facts(run: FoundRun) -> dict[str, Any]:
    """A run as JSON."""
    names = (
        "id", "name", "maker", "kind", "state", "metrics", "step", "total", "epoch", "loss", "eval_loss",
        "tokens_per_s", "left_s", "started", "changed", "sentence", "remedy", "checkpoint", "best",
    )  # fmt: skip
    return {**{name: getattr(run, name) for name in names}, "folder": str(run.folder)}
