"""Read arguments and configuration files: option values, each with its source location.

Arguments are ``run.yaml key=value --key value --flag``, with a YAML or JSON file. The result maps option names to
``RawValue(value, where)``, where ``where`` is "run.yaml, line 12" or "the command line".

A scalar is kept as text: the declared type of the option determines its meaning, not YAML. So ``1e-5`` is a number for
a numeric option, ``no`` is the strategy "no" for a text option, and ``1.10`` keeps its zero. ``plan.py`` knows the
options and their types.

Errors: a file that is missing, empty, not text, not YAML or not a mapping; a duplicate key at any depth; an alias
inside its own anchor; a number whose value depends on the version of YAML; an unknown form of argument.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from burnish.config.bounds import LARGEST_CONFIG_BYTES, MOST_NODES
from burnish.config.conversion import num_nodes
from burnish.config.errors import Problem, UserError, did_you_mean
from burnish.config.options import RawValue
from burnish.config.secrets import mask_continued_values
from burnish.utils.files import expand_user, special_file_kind

COMMAND_LINE = "the command line"
CONFIG_SUFFIXES = (".yaml", ".yml", ".json")


def read_arguments(arguments: Sequence[str]) -> tuple[dict[str, RawValue], dict[str, RawValue]]:
    """Return the values of the configuration file and of the flags. ``merge`` combines them."""
    config, flags = split_arguments(arguments)
    values = _beside(config.parent, read_config(config)) if config is not None else {}
    return _with_home(values), _with_home(flags)


PLACES = (
    "output_dir", "export_dir", "save_dir", "dataset_dir", "tokenized_path", "task_dir", "logging_dir", "cache_dir",
)  # fmt: skip
"""Options that name a folder. ``~`` in them is expanded, since shells do not expand it in ``key=~/value``, and YAML
never does."""


def _with_home(values: dict[str, RawValue]) -> dict[str, RawValue]:
    return {
        key: RawValue(str(expand_user(item.value)), item.where)
        if key in PLACES and isinstance(item.value, str) and item.value.startswith("~")
        else item
        for key, item in values.items()
    }


FUNCTIONS = ("reward_funcs",)
"""Options with functions in files: ``file.py:name``."""


def _beside(folder: Path, values: dict[str, RawValue]) -> dict[str, RawValue]:
    """Return the values of a configuration file in ``folder``: a file of functions that is not in the working directory
    is looked up there."""
    return {
        key: RawValue(_with_folder(folder, item.value), item.where) if key in FUNCTIONS else item
        for key, item in values.items()
    }


def _with_folder(folder: Path, value: Any) -> Any:
    if isinstance(value, list):
        return [_with_folder(folder, each) for each in value]
    if isinstance(value, dict):
        return {_with_folder(folder, name): arguments for name, arguments in value.items()}
    if not isinstance(value, str):
        return value

    def path(file: re.Match[str]) -> str:
        other = folder / file[0]
        return str(other) if not Path(file[0]).is_file() and other.is_file() else file[0]

    return re.sub(r"[^\s,\[\]{}\"']+\.py(?=:)", path, value)


def path_of(argv: Sequence[str]) -> tuple[str, list[str]]:
    """Return the first argument if it is not an option (otherwise ""), and the other arguments."""
    is_path = bool(argv) and not argv[0].startswith("-") and "=" not in argv[0]
    return (argv[0], list(argv[1:])) if is_path else ("", list(argv))


def from_variables(
    variables: Mapping[str, str], values: Mapping[str, RawValue], environment: Mapping[str, str]
) -> dict[str, RawValue]:
    """Return options set by environment variables and not otherwise. ``variables`` maps variable -> option."""
    return {
        name: RawValue(environment[variable], f"environment variable {variable}")
        for variable, name in variables.items()
        if name not in values and environment.get(variable)
    }


def split_arguments(arguments: Sequence[str]) -> tuple[Path | None, dict[str, RawValue]]:
    """Split arguments into the file and the flags. The last value of a repeated flag counts, so scripts can append
    flags.

    ``--key value``, ``--key=value``, ``key=value`` and ``--flag`` (true) are accepted; ``-`` and ``_`` are equivalent
    in keys. Several values after a key are a list: ``--report_to wandb tensorboard``.
    """
    flags: dict[str, RawValue] = {}
    files: list[str] = []
    waiting = list(arguments)
    while waiting:
        word = waiting.pop(0)
        if word.startswith("--"):
            key, equals, value = word[2:].partition("=")
            values = [value] if equals else _take_values(waiting)
            if key == "config":
                files += values
            else:
                flags[_key(key)] = RawValue(_join_values(values), COMMAND_LINE)
        elif re.match(r"[A-Za-z_][\w-]*=", word):
            key, _, value = word.partition("=")
            flags[_key(key)] = RawValue(value, COMMAND_LINE)
        else:
            files.append(word)
    return _only_config(files), flags


def _key(name: str) -> str:
    return name.replace("-", "_")


def _take_values(waiting: list[str]) -> list[str]:
    """Remove and return the values of the last key: the arguments up to the next key."""
    values: list[str] = []
    while waiting and not waiting[0].startswith("--"):
        # The first argument is always the value; a later one may be ``key=value`` or the file.
        if values and ("=" in waiting[0] or waiting[0].endswith(CONFIG_SUFFIXES)):
            break
        values.append(waiting.pop(0))
    return values


def _join_values(values: list[str]) -> Any:
    if not values:
        return "true"
    return values[0] if len(values) == 1 else values


def _only_config(files: list[str]) -> Path | None:
    if not files:
        return None
    configs = [name for name in files if name.endswith(CONFIG_SUFFIXES)]
    strays = [name for name in files if name not in configs]
    if len(files) == 1 and (configs or Path(files[0]).exists()):
        return Path(files[0])
    if strays:
        raise UserError(
            "Unexpected arguments on the command line: " + ", ".join(f'"{name}"' for name in strays) + ".",
            remedy="Pass options as key=value or --key value. A configuration file must end in .yaml or .json.",
        )
    raise UserError(
        f"Expected one configuration file. Received: {', '.join(files)}.",
        remedy="Pass the differences on the command line as key=value.",
    )


def merge(
    file: Mapping[str, RawValue], flags: Mapping[str, RawValue], aliases: Mapping[str, str]
) -> dict[str, RawValue]:
    """Override values of the file by those of the command line. The location of overridden values is kept.

    Args:
        file: values of the file.
        flags: values of the command line.
        aliases: alias -> name, so that a flag overrides an alias of the same option in the file.
    """
    overriding = {aliases.get(key, key): key for key in flags}
    from_file = {key: item for key, item in file.items() if aliases.get(key, key) not in overriding}
    merged = {**from_file, **flags}
    for key, item in file.items():
        flag = overriding.get(aliases.get(key, key))
        if flag is not None:
            merged[flag] = RawValue(flags[flag].value, f"{flags[flag].where}, overriding {item.where}")
    return merged


# --- files ------------------------------------------------------------------------------------------------------------


def read_config(path: Path) -> dict[str, RawValue]:
    """Return the top-level keys of a YAML or JSON file with their line numbers."""
    text = _text_of(path)
    parsed = _json_values(path, text) if path.suffix == ".json" else None
    root = _compose(path, text.replace("\t", " ") if parsed is not None else text)
    if root is None or (isinstance(root, yaml.ScalarNode) and not root.value):
        raise UserError(
            "the file is empty.", where=str(path), remedy="Set at least model_name_or_path, dataset and output_dir."
        )
    if not isinstance(root, yaml.MappingNode):
        kind = "list" if isinstance(root, yaml.SequenceNode) else "text"
        raise UserError(
            f'expected lines of the form "key: value". Received: a {kind}.',
            where=f"{path}, line {root.start_mark.line + 1}",
            remedy=f"A file with the options of a run is expected here. {_dataset_hint(path)}",
        )
    return _entries(path, root, parsed)


def _dataset_hint(path: Path) -> str:
    return f"If it is a dataset, pass it as dataset={path}, or as eval_dataset={path} to burnish eval."


def _text_of(path: Path) -> str:
    if path.is_dir():
        raise UserError(f'Expected a .yaml or .json file. "{path}" is a folder.{_list_configs(path)}')
    if kind := special_file_kind(path):
        raise UserError(f'Expected a .yaml or .json file. "{path}" is {kind}.')
    if not path.is_file():
        raise UserError(f'File "{path}" does not exist.{_nearest_file(path)}')
    with path.open("rb") as file:
        raw = file.read(LARGEST_CONFIG_BYTES + 1)
    if len(raw) > LARGEST_CONFIG_BYTES:
        what = f"expected a file with options, of at most {LARGEST_CONFIG_BYTES:,} bytes."
        raise UserError(what, where=str(path), remedy=_dataset_hint(path))
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(
            f"byte {error.start} ({raw[error.start]:#04x}) is not UTF-8.",
            where=str(path),
            remedy="Save the file as UTF-8.",
        ) from None


def _nearest_file(path: Path) -> str:
    """Return ``Did you mean "first.yaml"?``, or a list of the existing files."""
    folder = path.parent
    if not folder.is_dir():
        return f' Its folder "{folder}" does not exist either.'
    guess = did_you_mean(path.name, [file.name for file in _configs(folder)])
    return guess or _list_configs(folder)


def _list_configs(folder: Path) -> str:
    names = [file.name for file in _configs(folder)]
    if not names:
        return f' "{folder.resolve()}" contains no .yaml or .json file.'
    return f' "{folder}" contains {", ".join(names[:5])}{", ..." if len(names) > 5 else ""}.'


def _configs(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.suffix in CONFIG_SUFFIXES)


def _json_values(path: Path, text: str) -> dict[str, Any]:
    if not text.strip():
        return {}
    try:
        values = json.loads(text)
    except RecursionError:
        what = "lists and objects are nested too deeply."
        raise UserError(what, where=str(path), remedy="Reduce the nesting.") from None
    except json.JSONDecodeError as error:
        raise _syntax_error(path, text, error.lineno, error.colno, error.msg) from None
    except ValueError:  # json passes integers to int(), which has a limit
        what = f"expected numbers of at most {_MOST_DIGITS:,} digits. Received: a longer one."
        raise UserError(what, where=str(path), remedy="For text, use quotes.") from None
    return values if isinstance(values, dict) else {}


# PyYAML's message for an error that it detects late -> the error at the place where it began.
_YAML_ERROR_CAUSES = {
    "could not find expected ':'": 'expected ": " between the key and its value',
    "found unexpected end of stream": "this quotation mark is never closed",
}


def _compose(path: Path, text: str) -> yaml.Node | None:
    """Parse YAML to a syntax tree, whose nodes have line numbers."""
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        if num_nodes(root) > MOST_NODES:
            what = f"the file expands to more than {MOST_NODES:,} values through its aliases (*)."
            raise UserError(what, where=str(path), remedy="Use fewer aliases.")
        return root
    except RecursionError:
        what = "lists and mappings are nested too deeply."
        raise UserError(what, where=str(path), remedy="Reduce the nesting.") from None
    except yaml.MarkedYAMLError as error:
        cause = _YAML_ERROR_CAUSES.get(error.problem or "")
        mark = error.context_mark if cause else error.problem_mark or error.context_mark
        assert mark is not None
        fault = cause or error.problem or str(error.context)
        fault = re.sub(r"(alias|anchor) '[^']*'", r"\1", fault)  # the name may be a value that begins with *
        raise _syntax_error(path, text, mark.line + 1, mark.column + 1, fault) from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise _syntax_error(path, text, line, 1, f"the character {error.character!r} is not allowed in YAML") from None


def _syntax_error(path: Path, text: str, line: int, column: int, fault: str) -> UserError:
    """Return an error ``run.yaml:3:1: ...`` with the line and a caret."""
    lines = mask_continued_values(text).splitlines() or [""]
    line = min(line, len(lines))  # an error at the end of the file is reported after its last line
    source = lines[line - 1]
    remedy = "" if path.suffix == ".json" else "Write each line as key: value, and quote values that contain : or #."
    if "\t" in source[:column] and remedy:
        column = source.index("\t") + 1
        fault, remedy = "YAML does not allow tabs (→) for indentation", "Replace the tab with spaces."
    shown = source.replace("\t", "→")
    return UserError(
        f"{fault.rstrip('.')}.",
        where=f"{path}:{line}:{column}",
        why=f"  {shown}\n  {' ' * (min(column, len(shown) + 1) + 1)}^",
        remedy=remedy,
    )


def _entries(path: Path, root: yaml.MappingNode, parsed: dict[str, Any] | None) -> dict[str, RawValue]:
    problems = dict.fromkeys(_key_problems(root, path, ()))
    if not problems and parsed is None:
        nested = (value for _, value in _pairs(root) if not isinstance(value, yaml.ScalarNode))
        problems = dict.fromkeys(problem for value in nested for problem in _number_problems(value, path))
    if problems:
        raise UserError(problems)
    return {
        key.value: RawValue(parsed[key.value] if parsed is not None else _top_level_value(value), _line(path, key))
        for key, value in _pairs(root)
    }


def _key_problems(node: yaml.Node, path: Path, around: tuple[yaml.Node, ...]) -> Iterator[Problem]:
    """Yield problems: duplicate keys, keys that are not strings, and aliases of nodes ``around`` them."""
    if node in around:
        yield Problem("an alias (*) refers to a value that contains it.", where=_line(path, around[-1]))
        return
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            yield from _key_problems(item, path, (*around, node))
    if not isinstance(node, yaml.MappingNode):
        return
    first: dict[str, yaml.Node] = {}
    for key, value in node.value:
        if not isinstance(key, yaml.ScalarNode):
            yield Problem("expected a key to be a string. Received: a list or a mapping.", where=_line(path, key))
        elif key.tag == _MERGE:
            if not all(isinstance(base, yaml.MappingNode) for base in _bases(value)):
                yield Problem(
                    'expected an alias (*) of a mapping, or a list of them, after "<<".', where=_line(path, key)
                )
        elif first.setdefault(_key_text(key), key) is not key:
            known = _line(path, first[_key_text(key)])
            yield Problem(f'duplicate key "{key.value}". It is already set in {known}.', where=_line(path, key))
        yield from _key_problems(value, path, (*around, node))


def _line(path: Path, node: yaml.Node) -> str:
    return f"{path}, line {node.start_mark.line + 1}"


_MERGE = "tag:yaml.org,2002:merge"


def _pairs(mapping: yaml.Node) -> Iterable[tuple[yaml.Node, yaml.Node]]:
    """Return the pairs of a mapping, then those merged by ``<<: *base`` or ``<<: [*base, *other]``.

    The first pair of a key counts (https://yaml.org/type/merge.html).
    """
    direct = [pair for pair in mapping.value if pair[0].tag != _MERGE]
    bases = [base for key, value in mapping.value if key.tag == _MERGE for base in _bases(value)]
    pairs: dict[str, tuple[yaml.Node, yaml.Node]] = {}
    for key, value in [*direct, *(pair for base in bases for pair in _pairs(base))]:
        pairs.setdefault(_key_text(key), (key, value))
    return pairs.values()


def _bases(node: yaml.Node) -> list[yaml.Node]:
    return list(node.value) if isinstance(node, yaml.SequenceNode) else [node]


def _top_level_value(node: yaml.Node) -> Any:
    """Return a top-level value: scalars as text, None for null, containers with parsed contents."""
    if isinstance(node, yaml.ScalarNode):
        nothing = node.style is None and node.value in {"", "~", "null", "Null", "NULL"}
        return None if nothing else node.value
    return _nested_value(node)


# Scalars inside a list or mapping have no declared type, so YAML 1.2's core schema decides. Unlike YAML 1.1, it reads
# 1e-5 as a number (https://yaml.org/spec/1.2.2/#103-core-schema).
_NULL = re.compile(r"~|null|Null|NULL|")
_BOOL = re.compile(r"true|True|TRUE|false|False|FALSE")
_INT = re.compile(r"[-+]?[0-9]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_HEX = re.compile(r"[-+]?0x[0-9a-fA-F]+")
_NOT_FINITE = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_OCTAL = re.compile(r"0o[0-7]+")
_MOST_DIGITS = 1000
_OF_YAML_1_1 = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")


def _number_problems(node: yaml.Node, path: Path) -> Iterator[Problem]:
    """Yield a problem for each number in a list or mapping, keys included, that YAML 1.1, which LLaMA-Factory and
    PyYAML read, and YAML 1.2 read differently: ``010``, ``1_000``, ``0o10``, ``0b10``, ``12:30``."""
    if isinstance(node, yaml.MappingNode):
        for pair in _pairs(node):
            for part in pair:
                yield from _number_problems(part, path)
    elif isinstance(node, yaml.SequenceNode):
        for item in node.value:
            yield from _number_problems(item, path)
    elif isinstance(node, yaml.ScalarNode) and node.style is None:
        text, number = str(node.value), _nested_value(node)
        if len(text) > _MOST_DIGITS and node.tag in _OF_YAML_1_1:
            what = f"expected a number of at most {_MOST_DIGITS:,} digits. Received: {text[:20]}..."
            yield Problem(what, where=_line(path, node), remedy="For text, use quotes.")
            return
        readings = [*_readings(node, text)] if not _NOT_FINITE.fullmatch(text) else []
        if any(isinstance(number, str) or reading != number for reading in readings):
            numbers = dict.fromkeys(one for one in (*readings, number) if not isinstance(one, str))
            shown = " or ".join(map(str, numbers))
            what = f"expected a decimal number, or text in quotes. Received: {text}, which can be read as {shown}."
            yield Problem(what, where=_line(path, node), remedy=f'Write {shown}, or "{text}" for text.')


def _readings(node: yaml.ScalarNode, text: str) -> Iterator[Any]:
    """Yield the values of a number according to YAML 1.1 and YAML 1.2, and its value without underscores."""
    if node.tag in _OF_YAML_1_1:
        with suppress(ValueError):  # 0x_ matches the pattern of an integer
            yield yaml.constructor.SafeConstructor().construct_object(node)
    elif _OCTAL.fullmatch(text):
        yield int(text, 8)
    elif "_" in text and _FLOAT.fullmatch(text.replace("_", "")) and text[0] != "_" != text[-1]:
        yield float(text.replace("_", ""))


def _key_text(node: yaml.Node) -> str:
    """Return a key as text. Keys that are not text are written as in JSON: ``0x1`` and ``1`` are both "1"."""
    value = _nested_value(node)
    return value if isinstance(value, str) else json.dumps(value)


def _nested_value(node: yaml.Node) -> Any:
    if isinstance(node, yaml.MappingNode):
        return {_key_text(key): _nested_value(value) for key, value in _pairs(node)}
    if isinstance(node, yaml.SequenceNode):
        return [_nested_value(item) for item in node.value]
    assert isinstance(node, yaml.ScalarNode)
    text = str(node.value)
    if node.style is not None or len(text) > _MOST_DIGITS:  # quoted, or reported by _number_problems
        return text
    if _NULL.fullmatch(text):
        return None
    if _BOOL.fullmatch(text):
        return text.lower() == "true"
    if _INT.fullmatch(text):
        return int(text)
    if _HEX.fullmatch(text):
        return int(text, 16)
    if _NOT_FINITE.fullmatch(text):
        return float(text.replace(".", "", 1))
    return float(text) if _FLOAT.fullmatch(text) else text
