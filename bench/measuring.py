"""Run settings, each in its own process, interleaved and in rounds.

Input: settings and the folder of the material. Output: per round, the measurements by name of the setting. If a setting
fails, its last output is stored and the others continue.

The first round runs all settings. Later rounds run those needed for ratios of rates: TRL's default, burnish, and the
fastest setting of each other library in the first round. Memory hardly differs between rounds. Each round shuffles the
settings, so that other load or processor temperature does not favor one of them, and the rows, so that the spread of a
ratio includes their order. The slowest settings (TRL's default and the plain one) start first, so that the other cores
do not wait for them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from shutil import rmtree
from threading import Lock

from environments import ROOT, interpreters
from figures import Figures, Round, fastest, successful_rounds
from gauge import ENDS_AT_FIRST_STEP, MARK
from host import Host
from material import SEED
from settings import BASE, OURS, OURS_FLOAT32, PLAIN, Setting

HERE = Path(__file__).parent
SCRATCH = ROOT / ".bench"
# torch's kernels, oneDNN and MKL each have a separate limit.
LIMITS = {
    "": dict[str, str](),
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"},
}
TIMEOUT_S = 900


class Bench:
    """Runs measurements; one host process per library, started on first use.

    Args:
        at_once: number of processes at a time.
    """

    def __init__(self, at_once: int) -> None:
        self.at_once = at_once
        self.process_cpu_s = 0.0  # of all processes so far
        self._interpreters: dict[str, Path | str] = {}
        self._hosts: dict[tuple[str, str], Host | str] = {}
        self._locks: dict[str, Lock] = {}

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *_: object) -> None:
        for host in self._hosts.values():
            if isinstance(host, Host):
                host.close()

    def python(self, library: str) -> str | None:
        """Return the Python executable that has a library, or None if it could not be installed."""
        self._interpreters |= interpreters({library} - set(self._interpreters))
        executable = self._interpreters[library]
        return str(executable) if isinstance(executable, Path) else None

    def versions(self, library: str) -> dict[str, str]:
        """Return the versions of a library and of its dependencies in ``gauge.LIBRARIES``."""
        code = "from gauge import versions; import json; print(json.dumps(versions()))"
        variables = environment(library) | {"PYTHONPATH": f"{HERE}:{ROOT / 'src' if library == 'burnish' else ''}"}
        finished = subprocess.run(
            [self._interpreters[library], "-c", code], env=variables, capture_output=True, text=True
        )
        return json.loads(finished.stdout.splitlines()[-1]) if finished.returncode == 0 else {}

    def rounds(
        self, settings: Sequence[Setting], material: Path, count: int, at_once: int | None = None
    ) -> list[Round]:
        """Return measurements by name of the setting, for each round."""
        results: list[Round] = []
        self._interpreters |= interpreters({setting.library for setting in settings} - set(self._interpreters))
        for number in range(count):
            order = [
                setting for setting in settings if number == 0 or setting.name in names_for_ratios(results[0], settings)
            ]
            Random(SEED + number).shuffle(order)
            order.sort(key=lambda setting: setting.name not in (BASE, PLAIN))
            with ThreadPoolExecutor(at_once or self.at_once) as pool:
                finished = list(
                    pool.map(lambda setting, seed=SEED + number: self.measure(setting, material, seed), order)
                )
            figures = {setting.name: figures for setting, figures in zip(order, finished, strict=True)}
            results.append({setting.name: figures[setting.name] for setting in settings if setting.name in figures})
        return results

    def measure(self, setting: Setting, material: Path, seed: int) -> Figures:
        """Return the content of the ``GAUGE`` line of one process, or a dictionary with the key ``failed``."""
        output_folder, begin = SCRATCH / "out" / f"{time.time_ns()}", time.time()
        placeholders = {"MATERIAL": str(material), "OUTPUT": str(output_folder)}
        command = [placeholders.get(item, item.replace("EVALUATION", str(material / "conversations.json")))
                 for item in setting.command]  # fmt: skip
        if command[0].startswith("train"):
            command.append(f"seed={seed}")
        variables = {"BENCH_STARTED_S": str(begin), "BURNISH_CACHE": str(output_folder / "cache")}
        if setting.in_new_process and setting.stops_at_first_step:
            variables[ENDS_AT_FIRST_STEP] = "1"
        try:
            output = (
                self._run_new_process(setting, command, variables)
                if setting.in_new_process
                else self._run_forked(setting, command, variables)
            )
        finally:
            rmtree(output_folder, ignore_errors=True)
        lines = [line for line in output.splitlines() if line.startswith(MARK)]
        results: Figures = json.loads(lines[0].removeprefix(MARK)) if lines else {"failed": output.strip()[-2000:]}
        taken = results.get("process_cpu_s", 0.0)
        self.process_cpu_s += taken
        print(
            f"  {setting.name}: {time.time() - begin:.0f} s, {taken:.0f} s of a processor"
            f"{'; ' + results['failed'] if 'failed' in results else ''}", file=sys.stderr, flush=True,
        )  # fmt: skip
        return results

    def _run_forked(self, setting: Setting, command: list[str], variables: dict[str, str]) -> str:
        """Run a setting in a process that is forked from the host of its library."""
        host = self._host(setting.library, setting.processor)
        return host if isinstance(host, str) else host.run(command, variables, TIMEOUT_S)

    def _host(self, library: str, processor: str) -> Host | str:
        """Return the host of ``library``, or an error message. Settings of other libraries do not wait for its
        start."""
        python = self._interpreters[library]
        if isinstance(python, str):
            return python
        with self._locks.setdefault(library, Lock()):
            if (library, processor) not in self._hosts:
                try:
                    self._hosts[library, processor] = Host(library, str(python), environment(library, processor))
                except RuntimeError as error:
                    self._hosts[library, processor] = f"{library} could not be started: {error}"
            return self._hosts[library, processor]

    def _run_new_process(self, setting: Setting, command: list[str], variables: dict[str, str]) -> str:
        """Run a setting in a new process, including imports."""
        python = self._interpreters[setting.library]
        if isinstance(python, str):
            return python
        try:
            command = [str(python), str(HERE / command[0]), *command[1:]]
            finished = subprocess.run(
                command,
                env=environment(setting.library, setting.processor) | variables,
                capture_output=True,
                text=True,
                timeout=TIMEOUT_S,
            )
        except subprocess.TimeoutExpired as error:
            return str(error)
        return f"{finished.stderr}\n{finished.stdout}"


def environment(library: str, processor: str = "") -> dict[str, str]:
    """Return the environment variables of a measurement."""
    return {
        **os.environ, **LIMITS[processor], "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": str(ROOT / "src") if library == "burnish" else "",
    }  # fmt: skip


def names_for_ratios(first: Round, settings: Sequence[Setting]) -> set[str]:
    """Return the names of the settings that are needed for ratios; all of them if the part does not look for the best
    setting."""
    ours = OURS if OURS in first else OURS_FLOAT32
    if ours not in first or BASE not in first or any(setting.in_new_process for setting in settings):
        return set(first)
    libraries = {setting.library for setting in settings if setting.library != "burnish"}
    best = (fastest([first], settings, library) for library in libraries)
    return {name for name in (BASE, ours, *best) if name and successful_rounds([first], name)}
