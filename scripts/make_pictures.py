"""Makes docs/pictures: what a terminal shows of ``explain`` and of a run, as SVG.

In: the carried demo, run for a few steps in a pseudo-terminal. Out: a picture each, with the colors of the terminal.

    python scripts/make_pictures.py
"""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import sys
import tempfile
import termios
from pathlib import Path

from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "pictures"
WIDTH = 108
CODES = re.compile(r"\x1b\[(\?25[lh]|\d*[AK])|\r\n|\r|\n")


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        user(Path(folder))
        picture("explain", "burnish explain demo.yaml", shown(["explain", "demo.yaml"], folder), most=36)
        steps = ["max_steps=60", "logging_steps=10", "save_strategy=steps", "save_steps=30"]
        picture("run", f"burnish train demo.yaml {' '.join(steps)}", shown(["train", "demo.yaml", *steps], folder))


def user(folder: Path) -> None:
    """A folder from which the carried demo's paths are right."""
    (folder / "src").symlink_to(ROOT / "src")
    text = (ROOT / "src" / "burnish" / "demo" / "demo.yaml").read_text(encoding="utf-8")
    (folder / "demo.yaml").write_text(text, encoding="utf-8")


def shown(words: list[str], folder: str) -> list[str]:
    """The lines that stand in a terminal once ``burnish words`` has ended, with their colors."""
    child, terminal = pty.fork()
    if child == 0:
        os.chdir(folder)
        os.execve(sys.executable, [sys.executable, "-m", "burnish", *words], {**os.environ, "TERM": "xterm-256color"})  # noqa: S606
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 60, WIDTH, 0, 0))
    written = b""
    while True:
        try:
            part = os.read(terminal, 1 << 16)
        except OSError:  # the other end was closed
            break
        if not part:
            break
        written += part
    _, status = os.waitpid(child, 0)
    if status:
        sys.exit(f"burnish {' '.join(words)} failed:\n{written.decode()}")
    return screen(written.decode())


def screen(written: str) -> list[str]:
    """Lines as they stand at last: a line that is written again takes the place of what was there."""
    lines, row, at = [""], 0, 0
    for code in CODES.finditer(written):
        lines[row] += written[at : code.start()]
        at = code.end()
        if code[0] in ("\r\n", "\n"):
            row += 1
            lines += [""] * (row == len(lines))
        elif code[0] == "\r" or code[0].endswith("K"):
            lines[row] = ""
        elif code[0].endswith("A"):
            row = max(0, row - int(code[0][2:-1] or 1))
    lines[row] += written[at:]
    return lines


def picture(name: str, command: str, lines: list[str], most: int | None = None) -> None:
    """``docs/pictures/name.svg``. Args: most: lines that are shown."""
    console = Console(record=True, width=WIDTH, file=open(os.devnull, "w"), force_terminal=True)  # noqa: SIM115
    console.print(Text("$ ", style="bold green") + Text(command, style="bold"))
    for line in lines[:most]:
        console.print(Text.from_ansi(line))
    if most is not None and len(lines) > most:
        console.print(Text("...", style="dim"))
    console.save_svg(str(FOLDER / f"{name}.svg"), title=command.split()[1])


if __name__ == "__main__":
    main()
