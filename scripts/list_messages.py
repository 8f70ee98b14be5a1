"""Print all user-facing text with its location: help, errors, warnings, notes, and the text of the web UI.

The text is extracted from the syntax trees of ``src/burnish``. Each line is ``file:line<TAB>kind<TAB>text``.
Expressions inside f-strings are printed as ``{}``.

    python scripts/list_messages.py > messages.tsv
"""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "burnish"
KINDS = {
    "option": "help", "Problem": "error", "UserError": "error", "MissingExtraError": "error", "note": "note",
    "warn": "warning", "say": "output", "print_result": "output", "APIError": "error", "Refusal": "error",
    "ValueError": "error", "TypeError": "error", "RuntimeError": "error", "AttributeError": "error",
    "ImportError": "error", "NotImplementedError": "error", "Command": "help",
}  # fmt: skip
MIN_WORDS = 3


def text_of(node: ast.AST) -> str | None:
    """Return the text of a string or f-string; None for other nodes."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
    return None


def strings_in(node: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the strings below a node, each once."""
    text = text_of(node)
    if text is not None:
        yield node.lineno, text  # type: ignore[attr-defined]
        return
    for child in ast.iter_child_nodes(node):
        yield from strings_in(child)


def messages_of(file: Path) -> Iterator[tuple[int, str, str]]:
    """Yield line, kind and text of each message of a file: arguments of ``KINDS``, then all other sentences."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    seen: set[tuple[int, str]] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = getattr(node.func, "id", getattr(node.func, "attr", ""))
            if name in KINDS:
                for argument in [*node.args, *(keyword.value for keyword in node.keywords)]:
                    for line, text in strings_in(argument):
                        if len(text.split()) >= MIN_WORDS and (line, text) not in seen:
                            seen.add((line, text))
                            yield line, KINDS[name], text
    for statement in ast.walk(tree):
        value = getattr(statement, "value", None)
        if isinstance(statement, ast.Expr) and isinstance(value, ast.Constant):
            continue  # a docstring, also of a constant or a field
        if isinstance(statement, ast.JoinedStr):
            continue  # printed as one string
        for child in ast.iter_child_nodes(statement):
            text = text_of(child)
            is_sentence = text is not None and len(text.split()) >= MIN_WORDS
            if is_sentence and id(child) not in docstrings and (child.lineno, text) not in seen:  # type: ignore[attr-defined]
                seen.add((child.lineno, str(text)))  # type: ignore[attr-defined]
                yield child.lineno, "text", str(text)  # type: ignore[attr-defined]


def main() -> None:
    """Print all messages by file, then the text of the web UI."""
    for file in sorted(SOURCE.rglob("*.py")):
        for line, kind, text in sorted(messages_of(file)):
            print(f"{file.relative_to(SOURCE)}:{line}\t{kind}\t{' '.join(text.split())}")
    for file in sorted(SOURCE.rglob("words/en.json")):
        for key, text in json.loads(file.read_text(encoding="utf-8")).items():
            print(f"{file.relative_to(SOURCE)}:{key}\tpage\t{text}")


if __name__ == "__main__":
    sys.exit(main())
