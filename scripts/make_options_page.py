"""Write docs/options.md: all options of a run, and how options of other tools are handled.

It is generated from the declarations (``RunOptions``), the tables of ``run/plan/unsupported.py``, and
``peer_options.json`` in this folder, which has the names and defaults of LLaMA-Factory's, transformers' and TRL's
options ("?" for a default that is not plain data). ``--check`` fails if the page is not up to date, and writes nothing.

    python scripts/make_options_page.py
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from math import isfinite
from pathlib import Path
from typing import Any

from burnish.adapters.base import ADAPTERS
from burnish.config.options import OptionSpec, specs
from burnish.config.registry import Registry
from burnish.losses.base import OBJECTIVES
from burnish.optim.builtin import OPTIMIZERS
from burnish.report.trackers import TRACKERS
from burnish.run.plan.listing import component, shown
from burnish.run.plan.plan import RunOptions, aliases
from burnish.run.plan.unsupported import ABSENT, NO_EFFECT

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "options.md"
PEERS = Path(__file__).with_name("peer_options.json")
CHOSEN_BY: dict[str, Registry[Any]] = {
    "finetuning_type": ADAPTERS, "stage": OBJECTIVES, "optim": OPTIMIZERS, "report_to": TRACKERS,
}  # fmt: skip
OTHER_MEANING = {
    "max_length": "In TRL, the maximum sequence length (`cutoff_len` here). As in LLaMA-Factory: prompt and response."
}

INTRODUCTION = """\
# Options

<!-- Made by scripts/make_options_page.py from the declarations; a test holds it against them. -->

Each option is a key of a YAML file and a command-line flag: `learning_rate: 1.0e-4`, `learning_rate=1e-4`,
`--learning_rate 1e-4`. The command line takes precedence. Lists are written as in YAML or separated by commas; `none`
sets no value. `burnish train --help` prints this list, `burnish train --help warmup` the options that match a word, and
`burnish explain run.yaml` the values of a run and where each of them was set.

Names and defaults are those of LLaMA-Factory and transformers where these have the option. [Keys of other
tools](#keys-of-other-tools) lists every key of theirs. The Python classes `TrainingArguments` and `SFTConfig` have the
names and defaults of transformers and TRL.
"""


def page() -> str:
    """Return the content of docs/options.md."""
    return "\n".join([INTRODUCTION, *_by_component(), *_keys_of_others()]).rstrip() + "\n"


# --- by component -----------------------------------------------------------------------------------------------------


def _by_component() -> Iterator[str]:
    for group, members in groupby(specs(RunOptions).values(), key=lambda spec: spec.group):
        yield f"## {component(group).replace('``', '`')}\n"
        file = f"../src/{group.__module__.replace('.', '/')}.py"
        yield f"Declared in [`{group.__module__}`]({file}){_selected_by(group)}.\n"
        yield from _table(("option", "default", "description"), map(_row, members))


def _selected_by(group: type) -> str:
    """Return ``, for `optim: badam` ``: the registered members that add these options."""
    for key, registry in CHOSEN_BY.items():
        names = [member.name for member in registry if member.options is group]
        if names:
            return f", for {_listed(f'{key}: {name}' for name in names)}"
    return ""


def _row(spec: OptionSpec) -> tuple[str, str, str]:
    return f"`{spec.name}`", _default(spec), " ".join([_escaped(spec.help), *_facts(spec)])


def _default(spec: OptionSpec) -> str:
    if spec.default is None:
        return ""
    return f"{shown(spec.default)}{f' {spec.unit}' if spec.unit else ''}"


def _facts(spec: OptionSpec) -> Iterator[str]:
    if spec.choices:
        yield f"One of {_listed(shown(choice) for choice in spec.choices)}."
    elif spec.type_name in ("a list", "a mapping"):
        yield f"{spec.type_name.capitalize()}."
    prefixes = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
    bounds = [
        f"{prefixes[name]} {shown(bound)}"
        for name, bound in spec.bounds.items()
        if bound is not None and isfinite(bound)
    ]
    if bounds:
        yield f"{' and '.join(bounds).capitalize()}{f' {spec.unit}' if spec.unit and spec.default is None else ''}."
    if spec.aliases:
        yield f"Also: {_listed(spec.aliases)}."
    if spec.ignored:
        yield f"No effect: {spec.ignored.rstrip('.')}."


# --- keys of other tools ----------------------------------------------------------------------------------------------


def _keys_of_others() -> Iterator[str]:
    peers: dict[str, dict[str, Any]] = json.loads(PEERS.read_text(encoding="utf-8"))
    known = specs(RunOptions)
    yield f"## Keys of other tools\n\n{', '.join(peers)}: every key is in one of the tables below.\n"
    yield "### Same name and default\n"
    for tool, keys in peers.items():
        here = {name: there for name, there in keys.items() if name in known and not known[name].ignored}
        same = [name for name, there in here.items() if not _difference(tool, known[name], there)]
        yield f"{tool}: {_listed(same)}.\n"
    yield "### Same name, different default or meaning\n"
    rows = [
        (f"`{name}`", f"{shown(there)} ({tool})", difference)
        for tool, keys in peers.items()
        for name, there in keys.items()
        if name in known and not known[name].ignored and (difference := _difference(tool, known[name], there))
    ]
    yield from _table(("key", "default there", "default here"), rows)
    yield "### Aliases\n"
    yield from _table(("key", "option"), ((f"`{name}`", f"`{aliases()[name]}`") for name in sorted(aliases())))
    yield "### Accepted without effect\n\nA note is printed once.\n"
    yield from _table(("reason", "keys"), _without_effect(known))
    yield "### Not supported\n\nRefused with an error, unless the value disables the feature.\n"
    yield from _table(("key", "values that disable it", "what to do"), map(_absent, ABSENT))


def _difference(tool: str, spec: OptionSpec, there: Any) -> str:
    """Return the default or the meaning here if it differs from that of another tool, else ""."""
    if spec.name in OTHER_MEANING and tool.startswith("TRL"):
        return OTHER_MEANING[spec.name]
    return "" if there == "?" or shown(spec.default) == shown(there) else shown(spec.default)


def _without_effect(known: Mapping[str, OptionSpec]) -> Iterator[tuple[str, str]]:
    by_reason: dict[str, list[str]] = {}
    for spec in known.values():
        if spec.ignored:
            by_reason.setdefault(spec.ignored, []).append(spec.name)
    for name, reason in NO_EFFECT.items():
        by_reason.setdefault(reason, []).append(name)
    return ((_escaped(reason), _listed(names)) for reason, names in by_reason.items())


def _absent(name: str) -> tuple[str, str, str]:
    return f"`{name}`", shown(ABSENT[name].harmless), _escaped(ABSENT[name].instead)


# --- markdown ---------------------------------------------------------------------------------------------------------


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> Iterator[str]:
    head = list(head)
    yield f"| {' | '.join(head)} |\n|{'---|' * len(head)}"
    yield from (f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows)
    yield ""


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _escaped(text: str) -> str:
    """Escape text for Markdown, so that nothing is parsed as HTML."""
    return text.replace("<", "&lt;")


def main() -> int:
    text = page()
    if "--check" not in sys.argv:
        PAGE.write_text(text, encoding="utf-8")
        return 0
    is_current = PAGE.is_file() and PAGE.read_text(encoding="utf-8") == text
    print(
        "docs/options.md is up to date."
        if is_current
        else "docs/options.md is outdated: run scripts/make_options_page.py"
    )
    return 0 if is_current else 1


if __name__ == "__main__":
    sys.exit(main())
