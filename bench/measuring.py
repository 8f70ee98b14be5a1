"""Runs settings beside each other: each in a process of its own, interleaved, round by round.

In: settings and the folder of the material. Out: per round the figures of each setting by its name; a setting that
fails is named with its last words, and the others go on.

The first round runs all settings. The others run what the ratios of rates are made of: TRL's default, burnish, and of
each peer the fastest setting of the first round; memory hardly differs from round to round. A round shuffles the
settings, so that a neighbour on the machine or a warm processor favors none, and the rows, so that the spread of a
ratio is also that over their order. What takes by far the longest goes first, TRL's default and the plain way: else the
other processors wait for it.
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
from figures import Figures, Round, fastest, whole
from gauge import ENDS_AT_FIRST_STEP, MARK
from host import Host
from material import SEED
from settings import BASE, OURS, OURS_FLOAT32, PLAIN, Setting

HERE = Path(__file__).parent
SCRATCH = ROOT / ".bench"
# torch's own kernels, oneDNN's and MKL's: each library has a limit of its own.
LIMITS = {
    "": dict[str, str](),
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"},
}
TIMEOUT_S = 900


class Bench:
    """The measuring hosts: one per library, started when it is first wanted.

    Args:
        at_once: processes at a time.
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
        """The Python that has a library; None where it is not to be had."""
        self._interpreters |= interpreters({library} - set(self._interpreters))
        found = self._interpreters[library]
        return str(found) if isinstance(found, Path) else None

    def versions(self, library: str) -> dict[str, str]:
        """Versions of what is measured and of what it is built on."""
        words = "from gauge import versions; import json; print(json.dumps(versions()))"
        told = environment(library) | {"PYTHONPATH": f"{HERE}:{ROOT / 'src' if library == 'burnish' else ''}"}
        done = subprocess.run([self._interpreters[library], "-c", words], env=told, capture_output=True, text=True)
        return json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else {}

    def rounds(
        self, settings: Sequence[Setting], material: Path, count: int, at_once: int | None = None
    ) -> list[Round]:
        """Figures by the name of the setting, round by round; as many processes at a time as the bench has."""
        found: list[Round] = []
        self._interpreters |= interpreters({setting.library for setting in settings} - set(self._interpreters))
        for number in range(count):
            order = [setting for setting in settings if number == 0 or setting.name in compared(found[0], settings)]
            Random(SEED + number).shuffle(order)
            order.sort(key=lambda setting: setting.name not in (BASE, PLAIN))
            with ThreadPoolExecutor(at_once or self.at_once) as pool:
                done = list(pool.map(lambda setting, seed=SEED + number: self.measure(setting, material, seed), order))
            figures = {setting.name: figures for setting, figures in zip(order, done, strict=True)}
            found.append({setting.name: figures[setting.name] for setting in settings if setting.name in figures})
        return found

    def measure(self, setting: Setting, material: Path, seed: int) -> Figures:
        """The content of the ``GAUGE`` line of one process, or ``failed`` and why."""
        output, begin = SCRATCH / "out" / f"{time.time_ns()}", time.time()
        places = {"MATERIAL": str(material), "OUTPUT": str(output)}
        words = [places.get(word, word.replace("EVALUATION", str(material / "conversations.json")))
                 for word in setting.words]  # fmt: skip
        if words[0].startswith("train"):
            words.append(f"seed={seed}")
        told = {"BENCH_STARTED_S": str(begin), "BURNISH_CACHE": str(output / "cache")}
        if setting.is_alone and setting.ends_early:
            told[ENDS_AT_FIRST_STEP] = "1"
        try:
            said = self._alone(setting, words, told) if setting.is_alone else self._forked(setting, words, told)
        finally:
            rmtree(output, ignore_errors=True)
        lines = [line for line in said.splitlines() if line.startswith(MARK)]
        found: Figures = json.loads(lines[0].removeprefix(MARK)) if lines else {"failed": said.strip()[-2000:]}
        taken = found.get("process_cpu_s", 0.0)
        self.process_cpu_s += taken
        print(
            f"  {setting.name}: {time.time() - begin:.0f} s, {taken:.0f} s of a processor"
            f"{'; ' + found['failed'] if 'failed' in found else ''}", file=sys.stderr, flush=True,
        )  # fmt: skip
        return found

    def _forked(self, setting: Setting, words: list[str], told: dict[str, str]) -> str:
        host = self._host(setting.library, setting.processor)
        return host if isinstance(host, str) else host.run(words, told, TIMEOUT_S)

    def _host(self, library: str, processor: str) -> Host | str:
        """The host of ``library``, or why there is none; who wants another library does not wait for it."""
        python = self._interpreters[library]
        if isinstance(python, str):
            return python
        with self._locks.setdefault(library, Lock()):
            if (library, processor) not in self._hosts:
                try:
                    self._hosts[library, processor] = Host(library, str(python), environment(library, processor))
                except RuntimeError as error:
                    self._hosts[library, processor] = f"{library} is not to be had: {error}"
            return self._hosts[library, processor]

    def _alone(self, setting: Setting, words: list[str], told: dict[str, str]) -> str:
        """A process from its very start, imports and all."""
        python = self._interpreters[setting.library]
        if isinstance(python, str):
            return python
        try:
            command = [python, HERE / words[0], *words[1:]]
            done = subprocess.run(
                command,
                env=environment(setting.library, setting.processor) | told,
                capture_output=True,
                text=True,
                timeout=TIMEOUT_S,
            )
        except subprocess.TimeoutExpired as error:
            return str(error)
        return f"{done.stderr}\n{done.stdout}"


def environment(library: str, processor: str = "") -> dict[str, str]:
    return {
        **os.environ, **LIMITS[processor], "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": str(ROOT / "src") if library == "burnish" else "",
    }  # fmt: skip


def compared(first: Round, settings: Sequence[Setting]) -> set[str]:
    """Names of the settings that ratios are made of; all of them where it is not a matter of the best."""
    ours = OURS if OURS in first else OURS_FLOAT32
    if ours not in first or BASE not in first or any(setting.is_alone for setting in settings):
        return set(first)
    libraries = {setting.library for setting in settings if setting.library != "burnish"}
    best = (fastest([first], settings, library) for library in libraries)
    return {name for name in (BASE, ours, *best) if name and whole([first], name)}
