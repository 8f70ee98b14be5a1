"""The environments in which the peers run: each under .bench, made once, with the versions that are named here.

In: the name of a library. Out: the Python that has it. burnish runs in the Python that runs this script, compiled as an
installation compiles it: where no bytecode is written, each run would compile the sources anew.
"""

from __future__ import annotations

import compileall
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[1]
_ENVIRONMENT = {"trl": "trl", "transformers": "trl", "llamafactory": "llamafactory", "transformers serve": "serving"}
_REQUIRED = {
    "trl": ["trl==1.16.0", "transformers==5.23.0", "accelerate==1.15.0", "datasets==5.2.0", "peft==0.21.2"],
    "serving": ["transformers[serving]==5.23.0"],
    "llamafactory": [
        "llamafactory==0.9.5",
        "transformers==5.6.0",
        "trl==0.24.0",
        "accelerate==1.11.0",
        "datasets==4.0.0",
        "peft==0.18.1",
    ],
}


def interpreters(libraries: Iterable[str]) -> dict[str, Path | str]:
    """The Python that has each library, or why there is none. Environments that are not there are made, all at once,
    before anything is measured beside them."""
    folders = {library: _ENVIRONMENT.get(library, "") for library in libraries}
    with ThreadPoolExecutor() as pool:
        found = dict(zip(set(folders.values()), pool.map(_interpreter, set(folders.values())), strict=True))
    return {library: found[folder] for library, folder in folders.items()}


def _interpreter(environment: str) -> Path | str:
    """Args: environment: its name; none for burnish's own."""
    if not environment:
        compileall.compile_dir(ROOT / "src", quiet=1)
        return Path(sys.executable)
    folder = ROOT / ".bench" / environment
    ready = folder / "ready"
    wanted = " ".join([pinned_torch(), *_REQUIRED[environment]])
    try:
        if not ready.exists() or ready.read_text() != wanted:
            make(folder, _REQUIRED[environment])
            ready.write_text(wanted)
    except (RuntimeError, subprocess.CalledProcessError) as error:
        return f"{environment} is not to be had: {error}"
    return folder / "bin" / "python"


def make(folder: Path, required: list[str]) -> None:
    """A virtual environment with what is required, and the very torch that burnish is measured with."""
    if folder.is_symlink():  # --clear would empty what it points to, which is somebody else's
        raise RuntimeError(f"{folder} is a link to {folder.resolve()}, and is not made anew. Take the link away.")
    print(f"Installing {', '.join(required)} into {folder} (once; some minutes) ...", file=sys.stderr, flush=True)
    subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
    pip = [folder / "bin" / "pip", "install", "--quiet", "--disable-pip-version-check"]
    # torch goes first, and is named again: else a dependency's newest release pulls another one in.
    subprocess.run([*pip, pinned_torch()], check=True)
    subprocess.run([*pip, pinned_torch(), *required], check=True)
    # Built for one torch each, and not for every build of it; transformers does without them for text.
    subprocess.run([pip[0], "uninstall", "--quiet", "--yes", "torchaudio", "torchvision"], check=True)


def torchvision() -> Path:
    """A folder with torchvision alone, for what the peers do with images (``torchvision_door.py``)."""
    folder = ROOT / ".bench" / "torchvision"
    if not folder.exists():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        subprocess.run([*pip, "--target", folder, "torchvision==0.28.0"], check=True)
    return folder


def pinned_torch() -> str:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return next(line for line in lines if line.startswith("torch=="))
