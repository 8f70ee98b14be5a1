"""Files and commands of the user pages run in order, and print the output shown below them.

A block with a title is a file. ``title="add to run.yaml"`` marks options that are added to that file for a training
run; a library in parentheses is required for it. Lines of bash blocks are run; ``# exit status 2`` sets the expected
status. Each line of a text block must occur in the output of the command before it.
"""

import json
import re
import shlex
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path

import pytest

from burnish import cli
from burnish.run.plan.options import RunOptions
from burnish.run.plan.plan import aliases
from small_run import make_model, records

pytestmark = [pytest.mark.run, pytest.mark.slow]
DOCS = Path(__file__).parents[1] / "docs"
PAGES = ("index.md", "data.md", "methods.md", "troubleshooting.md")
BLOCK = re.compile(r'^```(\w+)(?: title="([^"]*)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES)
def test_page_commands_run(page: str, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    make_model(tmp_path / "models" / "my-model")
    rows = records(32)
    (tmp_path / "my_data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    pairs = [{"prompt": "After 4?", "chosen": "5", "rejected": str(6 + n)} for n in range(8)]
    (tmp_path / "my_pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    printed = ""
    for language, title, text in BLOCK.findall((DOCS / page).read_text(encoding="utf-8")):
        if title.startswith("add to "):
            _, _, name, *requirements = title.split()
            if not requirements or find_spec(requirements[0].strip("()")):
                extended = Path(name).read_text() + text
                Path("added.yaml").write_text(extended)
                assert cli.main(["train", "added.yaml", "overwrite_output_dir=true"]) == 0, text
        elif title:
            Path(title).write_text(text, encoding="utf-8")
        elif language == "bash":
            for line in text.splitlines():
                program, *argv = shlex.split(line, comments=True) or [""]
                if program == "burnish" and argv[0] not in ("api", "webui", "demo"):
                    capsys.readouterr()
                    status = re.search(r"# exit status (\d)", line)
                    assert cli.main(argv) == (int(status[1]) if status else 0), line
                    printed = "".join(capsys.readouterr())
        elif language == "text":
            for line in text.splitlines():
                assert line.strip() in printed, line


@pytest.mark.parametrize("page", PAGES)
def test_every_documented_key_is_an_option(page: str) -> None:
    known = {field.name for field in fields(RunOptions)} | set(aliases())
    named = re.findall(r"`([a-z][a-z0-9_]*): [^`]*`", (DOCS / page).read_text(encoding="utf-8"))
    assert set(named) <= known, set(named) - known
