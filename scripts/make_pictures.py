"""Create docs/pictures: SVG images of the terminal output of ``explain`` and of a run.

The bundled demo is run for a few steps in a pseudo-terminal, with colors.

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
        make_folder(Path(folder))
        save_picture(
            "explain", "burnish explain demo.yaml", terminal_lines(["explain", "demo.yaml"], folder), max_lines=36
        )
        steps = ["max_steps=60", "logging_steps=10", "save_strategy=steps", "save_steps=30"]
        save_picture(
            "run", f"burnish train demo.yaml {' '.join(steps)}", terminal_lines(["train", "demo.yaml", *steps], folder)
        )


def make_folder(folder: Path) -> None:
    """Create a folder in which the paths of the bundled demo are valid."""
    (folder / "src").symlink_to(ROOT / "src")
    text = (ROOT / "src" / "burnish" / "demo" / "demo.yaml").read_text(encoding="utf-8")
    (folder / "demo.yaml").write_text(text, encoding="utf-8")


def terminal_lines(arguments: list[str], folder: str) -> list[str]:
    """Return the lines of the terminal, with colors, after ``burnish`` with these arguments has ended."""
    child, terminal = pty.fork()
    if child == 0:
        os.chdir(folder)
        command = [sys.executable, "-m", "burnish", *arguments]
        os.execve(sys.executable, command, {**os.environ, "TERM": "xterm-256color"})  # noqa: S606
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
        sys.exit(f"burnish {' '.join(arguments)} failed:\n{written.decode()}")
    return screen(written.decode())


def screen(written: str) -> list[str]:
    """Return the final lines of the screen: a line that is written again replaces the earlier one."""
    lines, row, position = [""], 0, 0
    for code in CODES.finditer(written):
        lines[row] += written[position : code.start()]
        position = code.end()
        if code[0] in ("\r\n", "\n"):
            row += 1
            lines += [""] * (row == len(lines))
        elif code[0] == "\r" or code[0].endswith("K"):
            lines[row] = ""
        elif code[0].endswith("A"):
            row = max(0, row - int(code[0][2:-1] or 1))
    lines[row] += written[position:]
    return lines


def save_picture(name: str, command: str, lines: list[str], max_lines: int | None = None) -> None:
    """Write ``docs/pictures/name.svg``. Args: max_lines: maximum number of lines."""
    console = Console(record=True, width=WIDTH, file=open(os.devnull, "w"), force_terminal=True)  # noqa: SIM115
    console.print(Text("$ ", style="bold green") + Text(command, style="bold"))
    for line in lines[:max_lines]:
        console.print(Text.from_ansi(line))
    if max_lines is not None and len(lines) > max_lines:
        console.print(Text("...", style="dim"))
    console.save_svg(str(FOLDER / f"{name}.svg"), title=command.split()[1])


if __name__ == "__main__":
    main()
