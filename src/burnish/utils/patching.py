"""The register of patches: all changes that burnish makes to foreign code.

In:  an owner (a module of a model, a Python module of a library), a name in it, its new value, and the reason.
Out: the changed owner; a ``Patch``, with which ``restore`` sets the old value again; the list of all patches of a
model, which ``explain``, a run's log and its model card show.

All assignments to foreign modules, classes and instances go through this module; an architecture test checks all files.
The patches of a torch module are stored in the module, so they are copied and freed with it. Those of a Python module
or class apply to all models of the process that are defined there. With ``patches: false`` a run only makes patches
that another option or a bug in a library requires, and has the same losses up to rounding.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from types import ModuleType
from typing import Any, TypeVar

from torch import nn

from burnish.config.options import option

T = TypeVar("T")


@dataclass
class PatchOptions:
    """Patches of the model."""

    patches: bool = option(
        True,
        "Replace modules of the model with optimized implementations that are verified to give the same result. "
        "false: apply only the patches that other options need or that fix a bug of a library.",
    )  # fmt: skip
    leave_out: list[str] | None = option(
        None, "Patches to disable, by name as printed by burnish explain: norm, linear layer, ..."
    )


@dataclass(frozen=True)
class Reason:
    """The reason of a patch.

    Args:
        kind: the kind of owner, for the user; its plural ends with s: "gated layer".
        why: a clause about the benefit, or about the problem without it.
    """

    kind: str
    why: str


class NOTHING:
    """Marks a name that did not exist."""


@dataclass(eq=False)
class Patch:
    """One change.

    Args:
        owner: the changed object.
        name: the name in ``owner``; may contain dots ("config.use_cache").
        why: the reason.
        before: the owner's own value before; ``NOTHING`` if it was inherited from its class.
        value: the new value.
        remove: undoes a change other than an assignment, such as a hook.
    """

    owner: Any
    name: str
    why: Reason
    before: Any = NOTHING
    value: Any = None
    remove: Callable[[], None] | None = None


_OF_PROCESS: list[Patch] = []


def patch(owner: Any, name: str, value: Any, why: Reason) -> Patch:
    """Set ``owner.name`` to ``value``, and register the change."""
    holder, leaf = _place(owner, name)
    made = Patch(owner, name, why, vars(holder).get(leaf, NOTHING), value)
    setattr(holder, leaf, value)
    _list_of(owner).append(made)
    return made


def hook(module: Any, event: str, function: Callable[..., Any], why: Reason, **how: Any) -> Patch:
    """Add and register a torch hook: "forward", "forward_pre", ... (``register_<event>_hook``)."""
    handle = getattr(module, f"register_{event}_hook")(function, **how)
    made = Patch(module, f"{event} hook", why, value=function, remove=handle.remove)
    _list_of(module).append(made)
    return made


def record(model: nn.Module, change: Callable[[], Any], why: Reason) -> list[Patch]:
    """Call ``change``, with which another library modifies ``model``, and register its changes: attributes, hooks and
    classes of modules, and functions and classes in their Python modules.
    """
    before = [(owner, _names_of(owner)) for owner in (*model.modules(), *python_modules(model))]
    change()
    made = []
    for owner, names in before:
        now = _names_of(owner)
        for name in [name for name in {**names, **now} if names.get(name, NOTHING) is not now.get(name, NOTHING)]:
            table, _, number = name.partition("#")
            remove = partial(vars(owner)[table].pop, int(number), None) if number else None
            shown = _HOOKS.get(table, name)
            made.append(Patch(owner, shown, why, names.get(name, NOTHING), now.get(name, NOTHING), remove))
            _list_of(owner).append(made[-1])
    return made


def restore(patches: Iterable[Patch]) -> None:
    """Undo patches. A value that was replaced again since then is kept."""
    for done in reversed(list(patches)):
        mine = _list_of(done.owner)
        if done not in mine:
            continue
        mine.remove(done)
        later = next((other for other in mine if other.name == done.name and other.before is done.value), None)
        if done.remove is not None:
            done.remove()
        elif later is not None:
            later.before = done.before
        else:
            _restore_attribute(done)


@contextmanager
def temporary_hook(module: nn.Module, event: str, function: Callable[..., Any], why: Reason) -> Iterator[None]:
    """Add a hook for the duration of the ``with`` block."""
    made = hook(module, event, function, why)
    try:
        yield
    finally:
        restore([made])


def patches_of(model: nn.Module) -> list[Patch]:
    """All patches of a model in the order of its modules, then those of their Python modules and classes."""
    of_modules = [done for module in model.modules() for done in vars(module).get("_patches", ())]
    owners = {*python_modules(model), *(parent for module in model.modules() for parent in type(module).__mro__)}
    return of_modules + [done for done in _OF_PROCESS if done.owner in owners]


def python_modules(model: nn.Module) -> list[ModuleType]:
    """The Python modules that define the classes of a model's modules, without duplicates."""
    names = dict.fromkeys(type(module).__module__ for module in model.modules())
    return [sys.modules[name] for name in names if name in sys.modules]


def installed_hook(owner: Any, name: str, kind: type[T]) -> T | None:
    """The object of class ``kind`` to which the method ``owner.name`` is bound; None if it is another."""
    found = getattr(vars(owner).get(name), "__self__", None)
    return found if isinstance(found, kind) else None


def allows_patch(options: PatchOptions, why: Reason) -> bool:
    """Whether a run makes patches of this kind."""
    return options.patches and why.kind not in (options.leave_out or ())


def patches_in_words(reasons: Iterable[tuple[str, Reason]]) -> list[str]:
    """``["42 forward methods: 14 norms, 28 linear layers", "1 forward hook: 1 model ..."]``, most frequent first.

    Args:
        reasons: ``(patch.name, patch.why)`` of every patch.
    """
    counts = Counter(reasons)
    by_name: Counter[str] = Counter()
    for (name, _), count in counts.items():
        by_name[name] += count
    nouns = {"forward": "forward method", "gradient_checkpointing": "gradient_checkpointing flag"}
    return [
        f"{_format_count(total, nouns.get(name, name))}: "
        + ", ".join(_format_count(n, why.kind) for (of, why), n in counts.items() if of == name)
        for name, total in by_name.most_common()
    ]


def patch_summary(model: nn.Module) -> list[str]:
    """``patches_in_words`` of the patches of a model."""
    return patches_in_words((done.name, done.why) for done in patches_of(model))


def _format_count(count: int, noun: str) -> str:
    """``2 layers under gradient checkpointing``: the plural is that of the words before a preposition."""
    plural = re.sub("(?= under | with |$)", "s", noun, count=1)
    return f"{count:,} {noun if count == 1 else plural}"


def _place(owner: Any, name: str) -> tuple[Any, str]:
    path, _, leaf = name.rpartition(".")
    return (attrgetter(path)(owner) if path else owner), leaf


def _list_of(owner: Any) -> list[Patch]:
    """The list of patches of an instance or, for Python modules and classes, of the process."""
    is_shared = isinstance(owner, ModuleType | type)
    found: list[Patch] = _OF_PROCESS if is_shared else vars(owner).setdefault("_patches", [])
    return found


def _restore_attribute(done: Patch) -> None:
    holder, leaf = _place(done.owner, done.name)
    if vars(holder).get(leaf, NOTHING) is not done.value:
        return
    if done.before is NOTHING:
        delattr(holder, leaf)
    else:
        setattr(holder, leaf, done.before)


_HOOKS = {"_forward_hooks": "forward hook", "_forward_pre_hooks": "forward_pre hook"}
"""Attribute in which torch stores a module's hooks -> their name in ``hook``."""


def _names_of(owner: Any) -> dict[str, Any]:
    """Values that may be replaced: functions and classes of a Python module; hooks, class and attributes of a torch
    module.
    """
    names = {name: value for name, value in vars(owner).items() if not name.startswith("_") and name != "training"}
    if isinstance(owner, ModuleType):
        return {name: value for name, value in names.items() if callable(value)}
    hooks = {f"{table}#{number}": called for table in _HOOKS for number, called in vars(owner)[table].items()}
    return {**names, **hooks, "__class__": type(owner)}
