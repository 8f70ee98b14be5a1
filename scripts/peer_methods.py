"""Lists the methods that the trainers of transformers and TRL call on themselves.

A subclass that overrides one of them changes the peer's training. burnish warns about overrides that it would not call
(``trainer/constructor.py``); this file is where it reads the names from.

    python scripts/peer_methods.py            # fails if the list differs from the installed libraries
    python scripts/peer_methods.py --write    # writes src/burnish/trainer/peer_methods.json

In: the sources of transformers and TRL, which must be installed. Out: class -> names of methods, for each class of TRL
those that it has beyond transformers' ``Trainer``.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import inspect
import json
import sys
import textwrap
from pathlib import Path

FILE = Path(__file__).parents[1] / "src" / "burnish" / "trainer" / "peer_methods.json"
PEERS = {
    "Trainer": ("transformers",), "Seq2SeqTrainer": ("transformers",), "SFTTrainer": ("trl",), "DPOTrainer": ("trl",),
    "KTOTrainer": ("trl", "trl.experimental.kto"), "RewardTrainer": ("trl",),
    "ORPOTrainer": ("trl", "trl.experimental.orpo"), "CPOTrainer": ("trl", "trl.experimental.cpo"),
}  # fmt: skip
"""burnish's class -> modules that may hold the peer's class of that name."""


def peer_class(name: str) -> type:
    """The peer's class.

    Raises:
        ImportError: where no module of ``PEERS`` has it.
    """
    for module in PEERS[name]:
        try:
            return getattr(importlib.import_module(module), name)  # type: ignore[no-any-return]
        except (AttributeError, ImportError):
            continue
    raise ImportError(f"none of {', '.join(PEERS[name])} has {name}; install transformers and trl")


def called_methods(kind: type) -> set[str]:
    """Names of methods that ``kind`` and its bases define and call on ``self``."""
    defined: set[str] = set()
    called: set[str] = set()
    for base in kind.__mro__:
        if base.__module__.split(".")[0] not in ("transformers", "trl"):
            continue
        defined |= {name for name, value in vars(base).items() if inspect.isfunction(value)}
        tree = ast.parse(textwrap.dedent(inspect.getsource(base)))
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
                called.add(node.attr)
    return {name for name in defined & called if not name.startswith("__")}


def peer_methods() -> dict[str, list[str]]:
    """The whole list."""
    of_trainer = called_methods(peer_class("Trainer"))
    found = {"Trainer": sorted(of_trainer)}
    for name in PEERS:
        if name != "Trainer":
            found[name] = sorted(called_methods(peer_class(name)) - of_trainer)
    return found


def main() -> str | None:
    """Compare or write the list. Returns what is wrong."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--write", action="store_true")
    text = json.dumps(peer_methods(), indent=1) + "\n"
    if parser.parse_args().write:
        FILE.write_text(text, encoding="utf-8")
        return None
    is_current = FILE.read_text(encoding="utf-8") == text
    return None if is_current else f"{FILE.name} differs from the installed libraries: run with --write"


if __name__ == "__main__":
    sys.exit(main())
