"""Load the reward functions of ``reward_funcs``.

An entry is a function, the name of a built-in one, ``file.py:name``, ``package.module.name``, or ``{name:
{arguments}}`` with one of these names: a factory is called with the arguments, another function gets them with each
call.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from burnish.config.errors import Problem, UserError, did_you_mean, few, first_line
from burnish.rollouts.rewards.builtin import FACTORIES, FUNCTIONS, missing_libraries
from burnish.utils.source_files import is_installed, source_digest

_ALWAYS_PASSED = frozenset({"prompts", "completions", "completion_ids", "log_extra", "log_metric"})
_TRAINER_ONLY_ARGUMENTS = {
    "trainer_state": "GRPOTrainer and RLOOTrainer in Python", "environments": "trainers with an environment_factory",
}  # fmt: skip
"""Argument -> who passes it."""
PASSED_BY_NAME = _ALWAYS_PASSED | _TRAINER_ONLY_ARGUMENTS.keys()
"""Arguments of a reward function besides the columns of the records."""


@dataclass(frozen=True)
class RewardFunction:
    """A reward function of a run.

    Args:
        name: name in the log; unique in a run.
        call: ``(prompts, completions, completion_ids, **columns, ...) -> list[float | None]``; may be a coroutine
            function.
        weight: weight of its reward in the sum.
        place: file and line, or name of the module.
        parameters: names of its parameters; None if it takes any (``**kwargs``).
        required: parameters without a default that are not always passed: columns of the records, ``trainer_state``,
            ``environments``.
        digest: hash of the source code of its file and of the local files that it imports, for the fingerprint of a
            run.
        reads_texts: whether it is called as ``(texts) -> list[float]`` instead, with each prompt and its completion as
            one text with special tokens.
    """

    name: str
    call: Callable[..., Any] = field(repr=False)
    weight: float = 1.0
    place: str = ""
    parameters: frozenset[str] | None = None
    required: frozenset[str] = frozenset()
    digest: str = ""
    reads_texts: bool = False

    @property
    def fixed(self) -> Mapping[str, Any]:
        """Arguments of each call that are given in ``reward_funcs``."""
        return self.call.keywords if isinstance(self.call, partial) else {}

    @property
    def is_async(self) -> bool:
        function = self.call.func if isinstance(self.call, partial) else self.call
        return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def load_rewards(
    functions: Sequence[Any] | None, weights: Sequence[float] | None = None, folders: Iterable[Path] = ()
) -> list[RewardFunction]:
    """Load the reward functions of a run.

    Args:
        functions: entries of ``reward_funcs``, see above.
        weights: weights of the functions and of reward models after them; None: 1 each.
        folders: folders in which files are looked up besides the working directory.

    Raises:
        UserError: with every entry that is unknown, cannot be imported, or lacks arguments or a library.
    """
    loaded: list[RewardFunction] = []
    problems: list[Problem] = []
    for at, entry in enumerate(functions or []):
        try:
            call, name, place, digest = _resolve(entry, [Path.cwd(), *folders])
        except UserError as error:
            problems += error.problems
            continue
        if inspect.isclass(call) and not issubclass(call, list):
            what = f"{name} is a class. A reward function returns a list of rewards."
            entry_name = entry if isinstance(entry, str) else name
            remedy = f"Use an instance: {name}() in Python, or {{{entry_name}: {{}}}} in YAML."
            problems.append(Problem(what, remedy=remedy, option="reward_funcs"))
            continue
        if unnamed := _positional_only(call):
            names_of = " and ".join(unnamed)
            what = f"{name} declares {names_of} as positional-only. Reward functions receive keyword arguments."
            problems.append(Problem(what, remedy="Remove the / from its parameters.", option="reward_funcs"))
            continue
        if missing := missing_libraries(call, name):
            problems += missing
            continue
        parameters, required = _parameters(call)
        weight = weights[at] if weights is not None and at < len(weights) else 1.0
        loaded.append(RewardFunction(name, call, weight, place, parameters, required, digest))
    if problems:
        raise UserError(problems)
    return with_unique_names(loaded)


def with_unique_names(functions: Iterable[RewardFunction]) -> list[RewardFunction]:
    """Return the functions with unique names for the log: the second ``exact`` becomes ``exact_2``."""
    by_name: dict[str, RewardFunction] = {}
    for function in functions:
        name, number = function.name, 1
        while name in by_name:
            number += 1
            name = f"{function.name}_{number}"
        by_name[name] = replace(function, name=name)
    return list(by_name.values())


def missing_columns(
    functions: Iterable[RewardFunction], columns: Iterable[str], source: str, passed: Container[str] = ()
) -> Iterator[Problem]:
    """Yield a problem for each function that requires a column that the records do not have, or another argument that
    is not passed.

    Args:
        source: name of the dataset.
        passed: arguments that are passed besides the columns and those of every run: ``trainer_state``, ...
    """
    known = sorted(columns)
    for function in functions:
        missing = sorted(name for name in function.required.difference(known, _TRAINER_ONLY_ARGUMENTS))
        if missing:
            near = next((name for name in known if name in ("answer", "solution", "response", "label")), None)
            renaming = f"columns: {{{missing[0]}: {near or '<name>'}}}"
            remedy = f"Add it (in YAML, {renaming} renames a column), or give the parameter a default value."
            there = ", ".join(known) or "no other columns"
            what = f'{function.name} requires the column "{missing[0]}". {source} has: {there}.'
            yield Problem(what, remedy=remedy, option="reward_funcs")
        for name in sorted(name for name in function.required & _TRAINER_ONLY_ARGUMENTS.keys() if name not in passed):
            what = f'{function.name} requires the argument "{name}", which only {_TRAINER_ONLY_ARGUMENTS[name]} pass.'
            remedy = f"Give the parameter a default value: {name}=None."
            yield Problem(what, remedy=remedy, option="reward_funcs")


# --- one entry --------------------------------------------------------------------------------------------------------


def _resolve(entry: Any, folders: Sequence[Path]) -> tuple[Callable[..., Any], str, str, str]:
    """Return (function, name in the log, place, digest of its source)."""
    if isinstance(entry, Mapping):
        if len(entry) != 1 or not isinstance(next(iter(entry.values())), Mapping | None):
            what = f"an entry of reward_funcs with arguments must be {{name: {{arguments}}}}. Received: {dict(entry)}."
            raise UserError(what, option="reward_funcs")
        ((name, arguments),) = entry.items()
        return _with_arguments(str(name), dict(arguments or {}), folders)
    if callable(entry):
        return entry, name_of(entry), _source_location(entry), _digest(entry)
    if not isinstance(entry, str):
        what = f"an entry of reward_funcs must be a name or a function. Received: {entry!r}."
        raise UserError(what, option="reward_funcs")
    return _with_arguments(entry, None, folders)


def _with_arguments(
    name: str, arguments: dict[str, Any] | None, folders: Sequence[Path]
) -> tuple[Callable[..., Any], str, str, str]:
    if name in FACTORIES:
        call = _call_factory(FACTORIES[name], name, arguments or {})
        return call, name_of(call), f"burnish.rewards.{name}", ""
    function = _find_function(name, folders)
    shown = name.rpartition(":")[2] if ":" in name else name.rpartition(".")[2]
    if arguments is None:
        return function, shown, _source_location(function), _digest(function)
    is_factory = not inspect.signature(function).parameters.keys() & PASSED_BY_NAME
    named, _ = _parameters(function)
    if not is_factory and (named is not None or name in FUNCTIONS):  # **kwargs of a built-in takes columns only
        fixable = (p.name for p in inspect.signature(function).parameters.values() if p.kind is not p.VAR_KEYWORD)
        _refuse_unknown_arguments(name, arguments, [each for each in fixable if each not in PASSED_BY_NAME])
    call = _call_factory(function, name, arguments) if is_factory else partial(function, **arguments)
    return call, name_of(call) if is_factory else shown, _source_location(function), _digest(function) + repr(arguments)


def _call_factory(factory: Callable[..., Any], name: str, arguments: dict[str, Any]) -> Callable[..., Any]:
    signature = inspect.signature(factory)
    needed = [
        p.name for p in signature.parameters.values() if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD
    ]
    if missing := [each for each in needed if each not in arguments]:
        example = _EXAMPLES.get(name.removeprefix("get_"), ", ".join(f"{each}: ..." for each in needed))
        remedy = f"Write {{{name}: {{{example}}}}}."
        raise UserError(
            f"{name} requires the {'argument' if len(missing) == 1 else 'arguments'} {' and '.join(missing)}.",
            remedy=remedy,
            option="reward_funcs",
        )
    _refuse_unknown_arguments(name, arguments, list(signature.parameters))
    result = factory(**arguments)
    if not callable(result):
        raise UserError(f"{name} must return a reward function. Received: {result!r}.", option="reward_funcs")
    function: Callable[..., Any] = result
    return function


def _refuse_unknown_arguments(name: str, arguments: Mapping[str, Any], known: Sequence[str]) -> None:
    if unknown := [each for each in arguments if each not in known]:
        what = f'{name} has no argument "{unknown[0]}".{did_you_mean(unknown[0], known)}'
        remedy = f"Available: {', '.join(known)}." if known else ""
        raise UserError(what, remedy=remedy, option="reward_funcs")


_EXAMPLES = {
    "soft_overlong_punishment": "max_completion_len: 512, soft_punish_cache: 128",
    "cosine_scaled_reward": "max_len: 512",
    "json_schema_reward": "schema: {type: object, required: [answer]}",
}


def _find_function(name: str, folders: Sequence[Path]) -> Callable[..., Any]:
    if name in FUNCTIONS:
        return FUNCTIONS[name]
    if ":" in name:
        file, _, attribute = name.rpartition(":")
        return _attribute(_module_of_file(file, folders), attribute, file)
    module, _, attribute = name.rpartition(".")
    known = [*FUNCTIONS, *(each for each in FACTORIES if not each.startswith("get_"))]
    if not module:
        what = f'Unknown reward function "{name}".{did_you_mean(name, known)}'
        remedy = f"Built-in: {', '.join(known)}. Your own: file.py:name, or package.module.name."
        raise UserError(what, remedy=remedy, option="reward_funcs")
    for folder in folders:
        _add_to_search_path(folder)
    try:
        return _attribute(importlib.import_module(module), attribute, module)
    except ModuleNotFoundError as error:
        if error.name and (module == error.name or module.startswith(f"{error.name}.")):
            what = f'Module "{error.name}" of the reward function {name} was not found.'
            remedy = "Write file.py:name for a function in a file, or install the package."
            raise UserError(what, remedy=remedy, option="reward_funcs") from None
        raise _not_imported(module, error) from error
    except UserError:
        raise
    except (Exception, SystemExit) as error:  # the user's code may raise anything
        raise _not_imported(module, error) from error


def _module_of_file(name: str, folders: Sequence[Path]) -> ModuleType:
    path = next((each for folder in folders if (each := folder / name).is_file()), None)
    if path is None:
        files = sorted({each.name for folder in folders if folder.is_dir() for each in folder.glob("*.py")})
        where = few([str(folder) for folder in dict.fromkeys(folders)])
        what = f"The file {name} of reward_funcs was not found in {where}.{did_you_mean(name, files)}"
        raise UserError(what, option="reward_funcs")
    digest = hashlib.sha256(str(path).encode()).hexdigest()[:8]
    spec = importlib.util.spec_from_file_location(f"burnish_reward_{path.stem}_{digest}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    _add_to_search_path(path.parent)
    sys.modules[spec.name] = module  # dataclasses and the source code of classes are looked up there
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # the user's code may raise anything
        del sys.modules[spec.name]
        raise _not_imported(str(name), error, path) from error
    return module


def _add_to_search_path(folder: Path) -> None:
    """Let the user's code import the modules of a folder, as Python does for a script. Installed modules come first."""
    if (name := str(folder.resolve())) not in sys.path:
        sys.path.append(name)


def _attribute(module: ModuleType, name: str, shown: str) -> Callable[..., Any]:
    function = getattr(module, name, None)
    if callable(function):
        found: Callable[..., Any] = function
        return found
    known = [each for each, value in vars(module).items() if callable(value) and not each.startswith("_")]
    what = f'{shown} has no function "{name}".{did_you_mean(name, known)}'
    remedy = f"Available: {few(known, 8)}." if known else ""
    raise UserError(what, remedy=remedy, option="reward_funcs")


def _not_imported(name: str, error: BaseException, path: Path | None = None) -> UserError:
    line = getattr(error, "lineno", None) if isinstance(error, SyntaxError) else _line_of(error, path)
    at = f", line {line}" if line else ""
    what = f"{name}{at} of reward_funcs cannot be imported: {type(error).__name__}: {first_line(error)}."
    return UserError(what, option="reward_funcs")


def _line_of(error: BaseException, path: Path | None) -> int | None:
    """Return the last line of a file in the traceback of an exception."""
    frames = traceback.extract_tb(error.__traceback__)
    return next((frame.lineno for frame in reversed(frames) if path is None or frame.filename == str(path)), None)


# --- what is known of a function --------------------------------------------------------------------------------------


def name_of(function: Callable[..., Any]) -> str:
    """Return the name of a function in the log."""
    inner = function.func if isinstance(function, partial) else function
    return str(getattr(inner, "__name__", type(inner).__name__))


def _parameters(function: Callable[..., Any]) -> tuple[frozenset[str] | None, frozenset[str]]:
    """Return (names of its parameters, or None for any; columns that it needs)."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None, frozenset()
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    required = frozenset(p.name for p in named if p.default is p.empty) - _ALWAYS_PASSED
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    return None if takes_any else frozenset(p.name for p in named), required


def _positional_only(function: Callable[..., Any]) -> list[str]:
    """Return the required parameters of a function that cannot be passed by name."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []
    return [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY and p.default is p.empty]


def _code_of(function: Callable[..., Any]) -> Any:
    inner = inspect.unwrap(function.func if isinstance(function, partial) else function)
    return inner if inspect.isroutine(inner) or inspect.isclass(inner) else type(inner)


def _source_location(function: Callable[..., Any]) -> str:
    try:
        file = inspect.getsourcefile(_code_of(function))
        return f"{Path(file).name}, line {inspect.getsourcelines(_code_of(function))[1]}" if file else ""
    except (OSError, TypeError):
        return ""


def _digest(function: Callable[..., Any]) -> str:
    """Return a hash of the entire file and its local imports: a function may call others in them."""
    code = _code_of(function)
    try:
        file = inspect.getsourcefile(code)
    except (OSError, TypeError):
        return ""
    return source_digest(Path(file), _local_modules(code)) if file else ""


def _local_modules(code: Any) -> list[Path]:
    """Return the files of local modules that the module of a function has as variables, however it imported them."""
    module = sys.modules.get(getattr(code, "__module__", ""))
    names = getattr(code, "__globals__", vars(module) if module else {})
    files = (getattr(value, "__file__", None) for value in list(names.values()) if isinstance(value, ModuleType))
    found = sorted({Path(file).resolve() for file in files if file and file.endswith(".py")})
    return [file for file in found if not is_installed(file)]
