"""Exports, evaluations and predictions from the web UI: each is a separate ``burnish`` process whose log is shown.

In: a folder with a model or an adapter, an output folder, and the settings of the job. Out: the state of the process,
    and at the end the commands that serve an exported model, or the metrics of an evaluation.

Jobs are recorded in the state folder, so a later server lists them too. It cannot ask for the exit status of a process
that an earlier server started; such a job is done if its results exist, which are moved into place when complete.
"""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from burnish.report.card import serving_lines
from burnish.report.metadata import LAUNCH, PROGRESS, launch_record
from burnish.serve.http.errors import APIError
from burnish.serve.page.runs.files import object_in
from burnish.serve.page.runs.predictions import prediction_files
from burnish.serve.page.runs.runs import id_of, is_alive
from burnish.serve.page.site import Site

FORMATS: Mapping[str, tuple[str, ...]] = {
    "safetensors": (),
    **{f"gguf {kind}": ("export_format=gguf", f"export_gguf_type={kind}") for kind in ("f16", "bf16", "q8_0", "q4_0")},
}
"""Export format in the form -> arguments of the command."""
QUANTIZED: Mapping[str, tuple[str, ...]] = {
    f"{method} {bits} bits": (f"export_quantization_method={method}", f"export_quantization_bit={bits}")
    for method, bits in (("gptq", 4), ("gptq", 8), ("awq", 4))
}
"""Formats that need a calibration dataset."""
_LIBRARIES: Mapping[str, tuple[str, ...]] = {"gptq": ("gptqmodel", "optimum"), "awq": ("gptqmodel",)}
"""Libraries that write a format, as in ``models/quantization/quantize.py``, which would import torch."""
_TEXT = 8000
logger = logging.getLogger("burnish.jobs")
_SHARE: Mapping[str, float] = {"gguf q8_0": 0.53, "gguf q4_0": 0.28}
"""Size of an export relative to the same weights in 16 bits."""
_WEIGHTS = (".safetensors", ".gguf", ".bin")
KINDS = ("predict", "loss", "task")
_NAME = re.compile(r"[\w][\w./ -]{0,200}")


_RECORDS, _MOST_RECORDS = "jobs.json", 200
"""File of the state folder with the jobs, and the number of jobs that are kept there."""


@dataclass
class StartedJob:
    """An export, evaluation or prediction.

    Args:
        folder: where it writes.
        expected: bytes of weights that it writes; 0 if unknown.
        launch: identifies the process, as in ``launch.json``.
        ended: when it ended, in seconds since the epoch; None if no server has noticed its end.
        status: its exit status, if known.
    """

    id: str
    kind: str
    name: str
    folder: str
    expected: int = 0
    began: float = field(default_factory=time.time)
    ended: float | None = None
    status: int | None = None
    launch: dict[str, Any] = field(default_factory=dict)


def export_formats() -> dict[str, tuple[str, ...]]:
    """Return the formats that can be written with the installed libraries."""
    methods = {method for method, needed in _LIBRARIES.items() if all(map(find_spec, needed))}
    return {**FORMATS, **{form: added for form, added in QUANTIZED.items() if form.split()[0] in methods}}


class Commands:
    """All jobs of this server and of earlier ones with the same state folder, the newest last."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self._jobs = {job.id: job for job in map(_job_of_entry, _list(site.home.read(_RECORDS))) if job is not None}
        self._children: dict[str, subprocess.Popen[bytes]] = {}

    def export(self, path: Path, name: str, folder: Path, form: str, calibration: Mapping[str, Any]) -> str:
        """Start an export. Returns its id.

        Args:
            calibration: ``dataset`` and ``dataset_dir`` for the formats of ``QUANTIZED``.

        Raises:
            APIError: 409 if the folder is not empty or used by another job, 422 for an unknown format or a missing
                dataset.
        """
        formats = export_formats()
        if form not in formats:
            raise APIError(422, "invalid_value", f'"format" must be one of {", ".join(formats)}.', param="format")
        self._check_free(folder)
        adapter = path / "adapter_config.json"
        argv = ["export", str(path), f"export_dir={folder}", *formats[form]]
        base = str(object_in(adapter).get("base_model_name_or_path")) if adapter.is_file() else ""
        expected = _weights(self.site.places.first / base if base else path) * _SHARE.get(form, 1.0)
        if form in QUANTIZED:
            dataset, expected = str(calibration.get("dataset") or ""), 0  # the size depends on the layers
            if not _NAME.fullmatch(dataset):
                message = '"dataset" must be a dataset for calibration.'
                raise APIError(422, "missing", message, param="dataset")
            argv.append(f"export_quantization_dataset={dataset}")
            argv += [f"dataset_dir={folder}" for folder in [calibration.get("dataset_dir")] if folder]
        return self._begin(StartedJob("", "export", name, str(folder), int(expected)), argv)

    def evaluate(self, path: Path, name: str, folder: Path, kind: str, inputs: Mapping[str, Any]) -> str:
        """Start an evaluation: ``predict`` writes responses to a dataset, ``loss`` computes its loss, ``task`` runs a
        benchmark. Returns its id.

        Args:
            inputs: ``dataset`` and ``dataset_dir``, or ``task`` and ``task_dir``; checked already.
        Raises:
            APIError: 409 if the folder is not empty or used by another job, 422 for a missing or invalid part.
        """
        if kind not in KINDS:
            raise APIError(422, "invalid_value", f'"kind" must be one of {", ".join(KINDS)}.', param="kind")
        self._check_free(folder)
        names = (
            {"task": "task", "task_dir": "task_dir"}
            if kind == "task"
            else {"dataset": "eval_dataset", "dataset_dir": "dataset_dir"}
        )
        values = {option: str(inputs.get(part) or "") for part, option in names.items()}
        needed = "task" if kind == "task" else "eval_dataset"
        if not _NAME.fullmatch(values[needed]):
            raise APIError(
                422, "missing", f'"{needed}" must be a task or a dataset to evaluate.', param=next(iter(names))
            )
        argv = ["predict" if kind == "predict" else "eval", str(path), f"save_dir={folder}"]
        argv += [f"{option}={value}" for option, value in values.items() if value]
        return self._begin(StartedJob("", kind, name, str(folder)), argv)

    def _check_free(self, folder: Path) -> None:
        """Raises APIError 409 if the folder is not empty, or an active job will write to it."""
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise APIError(409, "folder_not_empty", "The folder is not empty.", param="folder")
        if any(job.folder == str(folder) and self._facts(job)["state"] == "running" for job in self._jobs.values()):
            message = "Another job is writing to this folder. Choose a different folder, or wait."
            raise APIError(409, "folder_in_use", message, param="folder")

    def _begin(self, job: StartedJob, argv: Sequence[str]) -> str:
        job.id = f"{job.kind}-{int(time.time() * 1000):x}"
        child = self.site.starter.start_command(list(argv), self._log(job.id))
        job.launch = launch_record([], child.pid, ["burnish", *argv])
        self._jobs[job.id], self._children[job.id] = job, child
        self._record()
        return job.id

    def _record(self) -> None:
        """Save the list of jobs for the next server process. If that fails, it is logged."""
        kept = list(self._jobs.values())[-_MOST_RECORDS:]
        try:
            self.site.home.write(_RECORDS, json.dumps([asdict(job) for job in kept]))
        except APIError as error:
            logger.warning("The jobs of the web UI were not recorded: %s", error.message)

    def all(self) -> list[dict[str, Any]]:
        """The jobs, the newest first."""
        return [self._facts(job) for job in reversed(self._jobs.values())]

    def state(self, id: str) -> dict[str, Any]:
        """State of a job, the end of its log, and its results when it is finished."""
        if id not in self._jobs:
            raise APIError(404, "no_job", "The job does not exist.")
        job, log = self._jobs[id], self._log(id)
        text = log.read_text(encoding="utf-8", errors="replace")[-_TEXT:] if log.is_file() else ""
        folder = Path(job.folder)
        shown = self.site.places.display_path(folder)
        facts = self._facts(job)
        is_done = facts["state"] == "done"
        return {
            **facts, "text": text, "folder": shown,
            "written": _weights(folder) if job.expected else 0, "expected": job.expected,
            "progress": object_in(folder / PROGRESS),
            "lines": _serving_lines(shown, folder) if is_done and job.kind == "export" else [],
            "metrics": _metrics(folder) if is_done and job.kind != "export" else {},
            "run": id_of(folder) if (folder / LAUNCH).is_file() else "",
            "answers": is_done and bool(prediction_files(folder)),
        }  # fmt: skip

    def _facts(self, job: StartedJob) -> dict[str, Any]:
        if job.ended is None:
            self._update_status(job)
        state = "running" if job.ended is None else "done" if job.status == 0 else "failed"
        seconds = (job.ended or time.time()) - job.began
        return {
            "id": job.id,
            "kind": job.kind,
            "name": job.name,
            "state": state,
            "began": job.began,
            "seconds": seconds,
        }

    def _update_status(self, job: StartedJob) -> None:
        """If the process of a job has ended, record its end and exit status."""
        child = self._children.get(job.id)
        if child is None and not is_alive(job.launch):
            folder = Path(job.folder)
            job.status = 0 if (_weights(folder) if job.kind == "export" else _metrics(folder)) else 1
        elif child is not None:
            job.status = child.poll()
        if job.status is not None:
            job.ended = max(job.began, _last_change(self._log(job.id)))
            self._record()

    def _log(self, name: str) -> Path:
        return self.site.home.folder / f"{name}.log"


def _list(found: Any) -> list[Any]:
    return found if isinstance(found, list) else []


def _job_of_entry(found: Any) -> StartedJob | None:
    """Return the job of an entry in the file of jobs. None if the entry is invalid."""
    if not isinstance(found, dict) or set(found) != {each.name for each in fields(StartedJob)}:
        return None
    job = StartedJob(**found)
    number = float | int
    kinds = (
        (job.id, str), (job.kind, str), (job.name, str), (job.folder, str), (job.expected, int), (job.began, number),
        (job.ended, number | None), (job.status, int | None), (job.launch, dict),
    )  # fmt: skip
    return job if all(isinstance(value, kind) for value, kind in kinds) else None


_RATES = ("_runtime", "_per_second")
"""Endings of metrics that say how long a command took, which is shown anyway, and not how good a model is."""


def _last_change(log: Path) -> float:
    """When a log was last written, which is when its process ended; nobody may have asked for the state since."""
    try:
        return log.stat().st_mtime
    except OSError:
        return time.time()


def _weights(folder: Path) -> int:
    """Bytes of the weights in a folder; 0 if there are none."""
    try:
        return sum(entry.stat().st_size for entry in os.scandir(folder) if entry.name.endswith(_WEIGHTS))
    except OSError:
        return 0


def _metrics(folder: Path) -> dict[str, float]:
    found = {k: v for name in ("eval", "predict") for k, v in object_in(folder / f"{name}_results.json").items()}
    return {
        name: value
        for name, value in found.items()
        if isinstance(value, int | float) and name != "epoch" and not name.endswith(_RATES)
    }


def _serving_lines(shown: str, folder: Path) -> list[str]:
    file = next(folder.glob("*.gguf"), None)
    classes = str(object_in(folder / "config.json").get("architectures"))
    gives_scores = (folder / "value_head.safetensors").is_file() or "ForSequenceClassification" in classes
    return serving_lines(shown, gguf="" if file is None else file.name, gives_scores=gives_scores)
