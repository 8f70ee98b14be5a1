"""The type checker finds misspelled options."""

import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HOLDERS = {"options", "args", "choices"}
"""Names of variables and attributes that hold options."""


def test_flat_options_type_has_groups_of_the_runtime_class():
    from burnish.inference import options as answers
    from burnish.run.plan import options
    from burnish.trainer.arguments import fields

    def bases(file: str, name: str) -> set[str]:
        tree = ast.parse(Path(file).read_text(encoding="utf-8"))
        (recorded,) = (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == name)
        return {base.id for base in recorded.bases if not base.id.endswith("Choices")}  # classes that join groups

    assert bases(fields.__file__, "Groups") == {group.__name__ for group in fields.Groups.__bases__}
    answering = bases(answers.__file__, "AnsweringOptions")
    recorded = bases(options.__file__, "RunOptions") - {"AnsweringOptions"} | answering
    joined = {group.__name__ for group in (*options.GROUPS, *options.MEMBER_GROUPS)}
    assert recorded == {name for name in joined if not name.startswith("Dummy")}


def options_read(tree: ast.AST) -> list[ast.Attribute]:
    """Return the nodes at which an option is read or set, without methods, and without f-strings, whose positions
    Python 3.11 does not record."""
    inside = {id(node) for joined in ast.walk(tree) if isinstance(joined, ast.JoinedStr) for node in ast.walk(joined)}
    called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    return [
        node for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and not node.attr.startswith("_") and id(node) not in inside | called
        and getattr(node.value, "id", getattr(node.value, "attr", None)) in HOLDERS
    ]  # fmt: skip


@pytest.mark.slow
def test_each_misspelled_option_fails_the_type_check(tmp_path):
    """All options are misspelled at once, in a copy of the source code."""
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    inserted = set()
    for file in sorted((tmp_path / "src").rglob("*.py")):
        text = file.read_text(encoding="utf-8")
        lines = text.splitlines(keepends=True)
        for node in sorted(options_read(ast.parse(text)), key=lambda one: (one.end_lineno, -one.end_col_offset)):
            line = lines[node.end_lineno - 1]
            lines[node.end_lineno - 1] = f"{line[: node.end_col_offset]}_typo{line[node.end_col_offset :]}"
            inserted.add((file.relative_to(tmp_path).as_posix(), node.lineno))
        file.write_text("".join(lines), encoding="utf-8")
    assert len(inserted) > 1000
    checked = subprocess.run(
        [sys.executable, "-m", "mypy", "src/burnish"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    result = {(file, int(line)) for file, line in re.findall(r"^(src/\S+?):(\d+): error: ", checked.stdout, re.M)}
    assert not sorted(inserted - result)


@pytest.mark.slow
def test_misspelled_library_attribute_fails_the_type_check(tmp_path):
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    file = tmp_path / "src" / "burnish" / "reader.py"
    file.parent.mkdir(parents=True)
    file.write_text(
        "from peft import LoraConfig\n"
        "from transformers import PreTrainedModel\n\n\n"
        "def read(model: PreTrainedModel, lora: LoraConfig) -> None:\n"
        "    model.tie_weight()\n"
        "    lora.lora_alfa\n"
        "    LoraConfig(lora_rank=8)\n",
        encoding="utf-8",
    )  # configs and tokenizers of transformers have ``__getattr__``, so a type checker finds nothing there
    checked = subprocess.run(
        [sys.executable, "-m", "mypy", "src/burnish"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert [int(line) for line in re.findall(r"reader\.py:(\d+): error: ", checked.stdout)] == [6, 7, 8]
