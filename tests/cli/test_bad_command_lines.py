"""Invalid command lines: the exact message, exit status 2, and no files written.

The table ``golden/bad_words.json`` maps a command line to its output. Run ``python
tests/cli/test_bad_command_lines.py`` to regenerate it, and read the diff before committing. Together with
``test_bad_options.py`` and ``test_bad_inputs_end_to_end.py``, whose messages are in ``golden/bad_inputs.json``, it
covers more than 250 invalid inputs.
"""

import contextlib
import io
import json
import os
import shlex
import sys
import tempfile
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))

from bad_inputs import SENTENCES, make_folder
from burnish import cli
from small_run import make_model

pytestmark = [pytest.mark.run, pytest.mark.usefixtures("config_folder")]
TABLE = Path(__file__).parents[1] / "golden" / "bad_words.json"
EXPECTED = json.loads(TABLE.read_text(encoding="utf-8")) if TABLE.is_file() else {}


def run_explain(argv: str) -> tuple[int, str, str]:
    """Return exit status, standard output and standard error of ``burnish explain run.yaml`` with these arguments. The
    working directory is replaced by a dot."""
    out, error = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
        status = cli.main(["explain", "run.yaml", *shlex.split(argv)])
    return status, out.getvalue(), error.getvalue().replace(os.getcwd(), ".")


def files() -> list[tuple[str, int]]:
    return sorted((str(path), path.stat().st_mtime_ns) for path in Path().rglob("*") if path.is_file())


@pytest.mark.parametrize("argv", EXPECTED)
def test_wrong_arguments_give_their_error(argv: str) -> None:
    before = files()
    assert run_explain(argv) == (2, "", EXPECTED[argv])
    assert len(EXPECTED[argv].splitlines()) <= 8  # at most two problems of at most four lines
    assert files() == before


def test_at_least_250_bad_inputs_are_tested() -> None:
    """Exact messages of this file, ``test_bad_options.py`` and ``test_bad_inputs_end_to_end.py``."""
    from test_bad_inputs_end_to_end import REJECTED as INPUTS
    from test_bad_options import REJECTED

    others = json.loads(SENTENCES.read_text(encoding="utf-8"))
    assert others.keys() == {f"input {case}" for case in INPUTS} | {f"option {wrong}" for wrong in REJECTED}
    assert len(EXPECTED) + len(others) >= 250


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"BURNISH_CACHE": f"{folder}/cache", "HF_HUB_OFFLINE": "1"}
        Path(folder, "user").mkdir()
        os.chdir(Path(folder, "user"))
        make_folder(make_model(Path(folder, "model")))
        results = {argv: run_explain(argv) for argv in EXPECTED}
    for argv, (status, out, _) in results.items():
        if status != 2 or out:
            print(f"not refused: {argv}")
    text = json.dumps({argv: result[2] for argv, result in results.items()}, indent=1, ensure_ascii=False)
    TABLE.write_text(text + "\n", encoding="utf-8")
