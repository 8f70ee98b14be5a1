"""Resolve dataset names through ``dataset_info.json``, or as paths, to a ``DataSource`` each.

The keys are LLaMA-Factory's (data/README.md there), with one difference. A tag that is missing from "tags" keeps its
default name. LLaMA-Factory instead leaves that role undefined and drops the examples that use it.

All problems are reported at once: broken files with line and column, duplicate names or keys, unknown names with close
matches, misspelled keys, files outside the folder, and loading scripts.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeAlias

from burnish.config.errors import Problem, UserError, did_you_mean, few
from burnish.config.options import raise_if
from burnish.data.options import DataOptions
from burnish.data.reading.files import READERS, loading_script, missing_file
from burnish.data.reading.json_files import UnreadableJson, parsed_file, whole_text
from burnish.data.sets.data_source import DataSource, SourceKind
from burnish.data.sets.layouts import MEDIA, PREFERENCE
from burnish.data.sets.turns import SHAREGPT_TAGS
from burnish.data.template_arguments import COLUMN
from burnish.utils.environment import uses_modelscope
from burnish.utils.json_files import shorten_value

INFO_NAME = "dataset_info.json"
ONLINE, REMOTE = "ONLINE", "REMOTE:"

Info: TypeAlias = Mapping[str, Any]

_LOCATION_KEYS = ("hf_hub_url", "ms_hub_url", "om_hub_url", "script_url", "cloud_file_name", "file_name", "records")
_KEYS = {
    *_LOCATION_KEYS,
    "formatting",
    "ranking",
    "subset",
    "split",
    "folder",
    "num_samples",
    "columns",
    "tags",
    "file_sha1",
}
_STRING_KEYS = (*_LOCATION_KEYS[:-1], "formatting", "subset", "split", "folder")
_COLUMNS = (
    "prompt",
    "query",
    "response",
    "history",
    "messages",
    "system",
    "tools",
    "text",
    COLUMN,
    *MEDIA[:3],
    *PREFERENCE,
)
_DEFAULT_COLUMNS = ("instruction", "input", "output", "conversations")
"""Columns, which are values in "columns"; as keys they are a mistake."""


def find_sources(
    names: Sequence[str],
    dataset_dir: str | Info,
    fetch: Callable[[str], Path],
    bare: Mapping[str, Any],
    option_name: str,
) -> list[DataSource]:
    """Return the datasets with the given names.

    Args:
        names: names of entries, or paths.
        dataset_dir: a folder, ONLINE (names are hub ids), REMOTE:repo (a hub repository with a dataset_info.json), or
            the content of such a file.
        fetch: downloads the dataset_info.json of a hub repository and returns its local path.
        bare: formatting, columns and tags of datasets without an entry.
        option_name: option that contains the names, for error messages.

    Raises:
        UserError: with every unknown name and every invalid entry.
    """
    if dataset_dir == ONLINE:
        kind: SourceKind = "ms_hub" if uses_modelscope() else "hf_hub"
        return [DataSource(name, kind, name, f'dataset "{name}"', **bare) for name in names]
    info, where, folder = _read_info(dataset_dir, fetch)
    sources: list[DataSource] = []
    problems: list[Problem] = []
    for name in names:
        try:
            if info is not None and name in info:
                sources.append(_describe_source(name, info[name], where, folder))
            else:
                sources.append(_source_without_entry(name, folder, info, where, bare, option_name))
        except UserError as error:
            problems += error.problems
    raise_if(problems)
    return sources


def local_files(options: DataOptions) -> Iterator[tuple[str, Path]]:
    """Yield the local files and folders that datasets are read from, each with the option that names the dataset.

    Unknown names are skipped, because ``load_datasets`` reports them.
    """
    for option in ("dataset", "eval_dataset"):
        for name in getattr(options, option) or []:
            if not str(options.dataset_dir).startswith((ONLINE, REMOTE)):
                with suppress(UserError):
                    for source in find_sources([name], options.dataset_dir, Path, {}, option):
                        if source.kind == "file":
                            yield option, source.location


# --- dataset_info.json ------------------------------------------------------------------------------------------------


def _read_info(dataset_dir: str | Info, fetch: Callable[[str], Path]) -> tuple[Info | None, str, Path | None]:
    """Return (entries or None, their name in error messages, folder of the data files or None)."""
    if isinstance(dataset_dir, Mapping):
        return dataset_dir, "dataset_dir", None
    if dataset_dir.startswith(REMOTE):
        path = fetch(dataset_dir.removeprefix(REMOTE))
        return _parse_file(path), f"{dataset_dir}/{INFO_NAME}", path.parent
    path = Path(dataset_dir) / INFO_NAME
    return (_parse_file(path) if path.is_file() else None), str(path), Path(dataset_dir)


def _parse_file(path: Path) -> Info:
    try:
        info = parsed_file(whole_text(path))
    except UnreadableJson as error:
        raise UserError(f"the JSON cannot be read: {error.msg}.", where=str(path)) from None
    except json.JSONDecodeError as error:
        raise UserError(
            f"invalid JSON: {error.msg}.", where=f"{path}, line {error.lineno}, column {error.colno}"
        ) from None
    if not isinstance(info, dict):
        what = f"expected an object with one entry per dataset. Received: {shorten_value(info)}"
        raise UserError(what, where=str(path))
    return info


# --- entries ----------------------------------------------------------------------------------------------------------


def _describe_source(name: str, entry: Any, info_where: str, folder: Path | None) -> DataSource:
    where = f'{info_where}, "{name}"'
    if not isinstance(entry, Mapping):
        raise UserError(f"expected an object. Received: {entry!r}.", where)
    raise_if(_entry_problems(entry, where))
    kind, location = _location(entry, where, folder)
    described = {
        key: entry[key]
        for key in ("subset", "folder", "num_samples", "formatting", "columns", "tags", "ranking")
        if key in entry
    }
    parts = {"columns": _unused_columns(entry), "tags": _unused_tags(entry)}
    for key, unused_parts in parts.items():
        if unused_parts:
            described[key] = {part: word for part, word in entry[key].items() if part not in unused_parts}
    unused = (*_unused_keys(entry), *(f"{key}.{part}" for key, unused_parts in parts.items() for part in unused_parts))
    described["further_columns"] = {
        part: entry["columns"][part]
        for part in parts["columns"]
        if f"{part}_tag" not in SHAREGPT_TAGS and isinstance(entry["columns"][part], str)
    }
    split = entry.get("split") or "train"
    return DataSource(name, kind, location, where, split=split, is_described=True, unused=unused, **described)


def _unused_keys(entry: Info) -> list[str]:
    """Keys such as "description", which LLaMA-Factory ignores. A key that is similar to one that is not set has a
    spelling mistake, and in an entry without a location one that resembles the key of a location, such as "file"."""
    has_location = any(entry.get(key) is not None for key in _LOCATION_KEYS)
    missing, locations = _KEYS - entry.keys(), () if has_location else _LOCATION_KEYS
    return [
        key
        for key in map(str, entry)
        if key not in _KEYS and not _is_similar(key, missing) and not _is_similar(key, locations, cutoff=0.5)
    ]


def _unused_columns(entry: Info) -> list[str]:
    """Keys of "columns" that LLaMA-Factory ignores: of columns that training does not use, and tags with the values
    that apply anyway."""
    columns, tags = entry.get("columns") or {}, entry.get("tags")
    tags = tags if isinstance(tags, Mapping) else {}  # another value is reported as a problem
    unused = []
    for part in (part for part in map(str, columns) if part not in _COLUMNS):
        tag = f"{part}_tag"
        if tag in SHAREGPT_TAGS:
            is_unused = columns[part] == (tags.get(tag) or SHAREGPT_TAGS[tag])
        else:
            is_unused = part not in _DEFAULT_COLUMNS and not _is_similar(part, _COLUMNS)
        unused += [part] if is_unused else []
    return unused


def _unused_tags(entry: Info) -> list[str]:
    """Keys of "tags" that LLaMA-Factory ignores, such as "formatting", which belongs in the entry."""
    tags = entry.get("tags")
    tags = tags if isinstance(tags, Mapping) else {}
    missing = SHAREGPT_TAGS.keys() - tags.keys()
    return [
        part
        for part in map(str, tags)
        if not {part, f"{part}_tag"} & SHAREGPT_TAGS.keys() and not _is_similar(part, missing)
    ]


def _is_similar(word: str, known: Iterable[str], cutoff: float = 0.75) -> bool:
    return bool(get_close_matches(word, list(known), n=1, cutoff=cutoff))


def _entry_problems(entry: Info, where: str) -> Iterator[Problem]:
    unused = _unused_keys(entry)
    for key in map(str, entry):
        if key not in _KEYS and key not in unused:
            yield Problem(
                f'unknown key "{key}".{did_you_mean(key, _KEYS - {"file_sha1"})}',
                where,
                remedy=f"Remove or rename it. Available: {', '.join(sorted(_KEYS))}.",
            )
    for key, known in (("columns", _COLUMNS), ("tags", tuple(SHAREGPT_TAGS))):
        value = entry.get(key)
        if value is not None and not isinstance(value, Mapping):
            yield Problem(f'"{key}" must be an object. Received: {value!r}.', where)
            continue
        unused = _unused_columns(entry) if key == "columns" else _unused_tags(entry)
        for part, word in (value or {}).items():
            if part in unused:
                continue
            if word is not None and not isinstance(word, str):
                yield Problem(f'"{part}" in "{key}" must be a string. Received: {word!r}.', where)
            if part not in known:
                tag = f"{part}_tag"  # in "columns" until LLaMA-Factory 0.5
                is_tag = key == "columns" and tag in SHAREGPT_TAGS
                moved = f'Move it to "tags": {{"{tag}": "{word}"}}.' if is_tag else ""
                yield Problem(
                    f'unknown key "{part}" in "{key}".{"" if moved else did_you_mean(part, known)}',
                    where,
                    remedy=moved or f"Remove or rename it. Available: {', '.join(known)}.",
                )
    number = entry.get("num_samples")
    if number is not None and (not isinstance(number, int) or isinstance(number, bool) or number < 1):
        yield Problem(f'"num_samples" must be a positive integer. Received: {number!r}.', where)
    for key in _STRING_KEYS:
        value = entry.get(key)
        if (value == "" and key in _LOCATION_KEYS) or not isinstance(value, str | os.PathLike | None):
            yield Problem(f'"{key}" must be a string. Received: {value!r}.', where)
    if not isinstance(entry.get("ranking", False), bool):
        yield Problem(f'"ranking" must be true or false. Received: {entry["ranking"]!r}.', where)


def _location(entry: Info, where: str, folder: Path | None) -> tuple[SourceKind, Any]:
    """Return the location of the records. If an entry has several, LLaMA-Factory's precedence applies."""
    locations = {key: entry[key] for key in _LOCATION_KEYS if entry.get(key) is not None}
    if "ms_hub_url" in locations and (uses_modelscope() or "hf_hub_url" not in locations):
        return "ms_hub", locations["ms_hub_url"]
    if "hf_hub_url" in locations:
        return "hf_hub", locations["hf_hub_url"]
    if "script_url" in locations:
        raise UserError(loading_script(locations["script_url"], where))
    if "cloud_file_name" in locations:
        return "cloud", locations["cloud_file_name"]
    if "records" in locations and folder is None:
        return "records", locations["records"]
    if "file_name" in locations:
        return "file", _inside(folder, locations["file_name"], where)
    what = f"the entry does not specify a data file or repository. Found: {', '.join(entry) or 'nothing'}."
    raise UserError(what, where, remedy='Set "file_name", "hf_hub_url", "ms_hub_url" or "cloud_file_name".')


def _inside(folder: Path | None, file_name: str, where: str) -> Path:
    """Return the data file of an entry. It must be inside the folder: a downloaded entry cannot open other files."""
    if folder is None:
        path = Path(file_name)
    else:
        path = Path(os.path.normpath(folder / file_name))
        if not path.is_relative_to(os.path.normpath(folder)):
            raise UserError(
                f'"file_name" must be inside "{folder}". Received: {file_name}',
                where,
                remedy="Move or link the file into that folder, or set dataset: <path of the file>",
            )
    if not path.exists():
        problem = missing_file(path, where)
        parts = Path(file_name).parts
        inside = [Path(*parts[n:]) for n in range(1, len(parts)) if folder and (folder / Path(*parts[n:])).exists()]
        if inside:  # written relative to the working directory
            remedy = f'"file_name" is relative to "{folder}". Set "file_name": "{inside[0].as_posix()}".'
            problem = replace(problem, remedy=remedy)
        raise UserError(problem)
    return path


# --- paths ------------------------------------------------------------------------------------------------------------


def _source_without_entry(
    name: str, folder: Path | None, info: Info | None, where: str, bare: Mapping[str, Any], option_name: str
) -> DataSource:  # fmt: skip
    """Return the source for a name without an entry: a file or folder, relative to here or to ``dataset_dir``."""
    for path in (Path(name), *([folder / name] if folder is not None else [])):
        if path.exists():
            return DataSource(name, "file", path, str(path), **bare)
    if Path(name).suffix.lower() in READERS:
        missing = missing_file(Path(name))
        raise UserError(replace(missing, what=f'"{option_name}": {missing.what}', option=option_name))
    raise UserError(_undefined_dataset(name, folder, info, where, option_name))


def _undefined_dataset(name: str, folder: Path | None, info: Info | None, where: str, option_name: str) -> Problem:
    hub = " To load a dataset from the Hub, set dataset_dir: ONLINE." if "/" in name else ""
    names = list(info or ())
    files = (
        [f.name for f in sorted(folder.iterdir()) if f.suffix.lower() in READERS] if folder and folder.is_dir() else []
    )
    candidates = [*names, *(f for f in files if f != INFO_NAME)]
    guess = did_you_mean(name, candidates, limit=3) or did_you_mean(name, [Path(c).stem for c in candidates])
    if info is not None:
        known = f"Defined datasets: {few(names, 12)}." if names else "It defines no datasets."
        what = f'"{option_name}": "{name}" is neither defined in {where} nor an existing file or folder.{guess}'
        return Problem(what, remedy=known + hub, option=option_name)
    if folder is not None and not folder.is_dir():
        what = (
            f'the folder "{folder.absolute()}" (dataset_dir) does not exist, and "{name}" is not an existing file '
            "or folder."
        )
        return Problem(
            what,
            remedy=f"Set dataset_dir to the folder of {INFO_NAME}, or set dataset to a path.{hub}",
            option="dataset_dir",
        )
    there = f"The folder contains: {few(files, 12)}." if files else ""
    what = f'"{option_name}": "{name}" is not an existing file or folder, and {where} does not exist.{guess}'
    return Problem(what, remedy=there + hub, option=option_name)
