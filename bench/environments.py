"""Create the environments of the other libraries under .bench, with pinned versions.

burnish runs in the current Python. Its sources are compiled first, as pip does at installation; otherwise each run
would compile them again where no bytecode can be written.
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
    "trl": ["trl==1.16.0", "transformers==5.24.0", "accelerate==1.15.0", "datasets==5.2.0", "peft==0.21.2"],
    "serving": ["transformers[serving]==5.24.0"],
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
    """Return the Python executable of each library, or an error message. Missing environments are created in parallel,
    before anything is measured."""
    folders = {library: _ENVIRONMENT.get(library, "") for library in libraries}
    with ThreadPoolExecutor() as pool:
        executables = dict(zip(set(folders.values()), pool.map(_interpreter, set(folders.values())), strict=True))
    return {library: executables[folder] for library, folder in folders.items()}


def _interpreter(environment: str) -> Path | str:
    """Return the Python executable of an environment, or an error message. Args: environment: its name; empty for
    burnish's."""
    if not environment:
        compileall.compile_dir(ROOT / "src", quiet=1)
        return Path(sys.executable)
    folder = ROOT / ".bench" / environment
    ready = folder / "ready"
    requirements = " ".join([pinned_torch(), *_REQUIRED[environment]])
    try:
        if not ready.exists() or ready.read_text() != requirements:
            make(folder, _REQUIRED[environment])
            ready.write_text(requirements)
    except (RuntimeError, subprocess.CalledProcessError) as error:
        return f"{environment} could not be installed: {error}"
    return folder / "bin" / "python"


def make(folder: Path, required: list[str]) -> None:
    """Create a virtual environment with the requirements and the same torch version as burnish's."""
    if folder.is_symlink():  # --clear would delete the content of its target
        raise RuntimeError(f"{folder} is a symbolic link to {folder.resolve()} and is not replaced. Remove the link.")
    print(f"Installing {', '.join(required)} into {folder} (once; takes some minutes) ...", file=sys.stderr, flush=True)
    subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
    pip = [str(folder / "bin" / "pip"), "install", "--quiet", "--disable-pip-version-check"]
    # torch is installed first and listed again, so that a dependency does not replace it.
    subprocess.run([*pip, pinned_torch()], check=True)
    subprocess.run([*pip, pinned_torch(), *required], check=True)
    # They are built for one build of torch each; transformers does not need them for text.
    subprocess.run([pip[0], "uninstall", "--quiet", "--yes", "torchaudio", "torchvision"], check=True)


def torchvision() -> Path:
    """Install torchvision and Pillow alone into a folder and return it, for the image processors of other libraries
    (``load_torchvision.py``)."""
    folder = ROOT / ".bench" / "torchvision"
    if not (folder / "PIL").exists():  # TRL does not require it
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        subprocess.run([*pip, "--upgrade", "--target", folder, "torchvision==0.28.0", "pillow==11.3.0"], check=True)
    return folder


def pinned_torch() -> str:
    """Return the requirement of torch in constraints.txt."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return next(line for line in lines if line.startswith("torch=="))
