"""The words after ``burnish chat``, ``api``, ``eval``, ``predict`` and ``export`` -> the options of the model.

In:  ``PATH key=value --key value``. PATH is a YAML file, a run's folder, a checkpoint, an exported folder, a folder
     with an adapter, or a model's id on the hub. Out: the flat options.

A folder with ``adapter_config.json`` brings its base along. A YAML file that trained stands for what it has trained,
once that is there; LLaMA-Factory's inference files say what to load themselves.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from burnish.checkpoint.checkpoint import Checkpoints
from burnish.config.errors import UserError
from burnish.config.options import RawValue, build, raise_if, specs
from burnish.data.chat.choose import TemplateOptions, check_template
from burnish.data.chat.truncate import EncodingOptions
from burnish.data.options import DataOptions
from burnish.inference.loading import writes_answers
from burnish.inference.options import check_infer, infer_notes
from burnish.models.check import check_model
from burnish.report.metadata import GIVEN, LAUNCH
from burnish.run.plan.config_files import CONFIG_SUFFIXES, merge, path_of, read_arguments
from burnish.run.plan.options import RunOptions
from burnish.run.plan.plan import aliases, provenance_of
from burnish.run.plan.unsupported import take_absent
from burnish.serve.run_folder import data_seen_from
from burnish.utils.files import expanded
from burnish.utils.json_files import read_object

ADAPTER, MODEL = "adapter_config.json", "config.json"


@dataclass(frozen=True)
class Serving:
    """The parts of a server of answers.

    Args:
        options: an instance of ``RunOptions``.
        name: of the model, as the last part of the path that a person wrote.
        notes: sentences for a person.
        provenance: option -> who set it.
        rest: keys that the caller's own options hold, as they were given.
    """

    options: RunOptions
    name: str
    notes: tuple[str, ...]
    provenance: Mapping[str, str]
    rest: Mapping[str, RawValue]


def serving_of(words: Sequence[str], own: Sequence[str] = (), with_data: bool = False) -> Serving:
    """Read a command's words.

    Args:
        own: keys that are the command's and not a run's; they come back unread.
        with_data: of a run's folder, its data too, as far as the words name no other.
    Raises:
        UserError: with everything that the options alone can show.
    """
    path, others = path_of(words)
    file, flags = read_arguments([*([path] if path and _is_config(path) else []), *others])
    given = merge(file, flags, aliases())
    rest = {key: given.pop(key) for key in list(given) if key in own}
    if path and not _is_config(path):
        given = {**(data_of_run(path, given) if with_data else {}), **found_in(path, given), **given}
    elif trained := _trained_by(given):
        given = {**{k: v for k, v in given.items() if k not in _NAMES}, **found_in(trained, {})}
    given = {**_base_of_adapter(given), **given}
    name = path or str(_value(given, "adapter_name_or_path") or _value(given, "model_name_or_path") or "")
    name = Path(name).stem if _is_config(name) else Path(name).name
    return _checked(given, rest, name)


def export_values(words: Sequence[str]) -> dict[str, RawValue]:
    """Read the words after ``burnish export``: PATH or a YAML file, and options.

    The base of an adapter is read from the adapter, and the template from the ``run.yaml`` beside the model.
    """
    path, others = path_of(words)
    file, flags = read_arguments(words if not path or _is_config(path) else others)
    given = merge(file, flags, aliases())
    if path and not _is_config(path):
        of_run = {name: item for name, item in data_of_run(path, given).items() if name in specs(TemplateOptions)}
        return {**of_run, **found_in(path, given), **given}
    return {**_base_of_adapter(given), **given}


def _base_of_adapter(given: Mapping[str, RawValue]) -> dict[str, RawValue]:
    """``model_name_or_path`` as the first adapter has it, where only adapters are given."""
    adapters = _value(given, "adapter_name_or_path")
    if not adapters or "model_name_or_path" in given:
        return {}
    first = expanded(str(adapters[0] if isinstance(adapters, list) else adapters).split(",")[0].strip())
    found = _of_adapter(first, given) if (first / ADAPTER).is_file() else {}
    return {"model_name_or_path": found["model_name_or_path"]} if found else {}


def servings_of(words: Sequence[str], own: Sequence[str] = (), with_data: bool = False) -> list[Serving]:
    """Each model that stands first among the words, with the other words; without one, what these name.

    Their names differ, since each writes into a folder of its name: those of ``a/checkpoint-4`` and ``b/checkpoint-4``
    are "a-checkpoint-4" and "b-checkpoint-4".

    Raises:
        UserError: as ``serving_of`` does, and where a model is named twice.
    """
    paths, others = paths_of(words)
    found = [serving_of([*path, *others], own, with_data) for path in ([[path] for path in paths] or [[]])]
    folders = [expanded(path).absolute().parent for path in paths]
    parts = [(*folder.parts, one.name) for folder, one in zip(folders, found, strict=False)]
    names, depth = [one.name for one in found], 1
    while len({*names}) < len(names):
        depth += 1
        if depth > max(map(len, parts)):
            twice = next(path for path, name in zip(paths, names, strict=True) if names.count(name) > 1)
            raise UserError(f'"{twice}" is passed twice.', remedy="Pass each model once.")
        names = ["-".join(own[-depth:]) if names.count(name) > 1 else name
                 for name, own in zip(names, parts, strict=True)]  # fmt: skip
    return [replace(one, name=name) for one, name in zip(found, names, strict=True)]


_NAMES = ("model_name_or_path", "adapter_name_or_path")


def _checked(given: Mapping[str, RawValue], rest: Mapping[str, RawValue], name: str) -> Serving:
    present, problems, _ = take_absent(given, {**specs(RunOptions), **aliases()})
    options, wrong = build(RunOptions, present)
    problems += [*wrong, *check_template(options), *check_infer(options)]
    problems += [] if problems else check_model(options, needs_head=writes_answers(options))
    raise_if(problems)
    return Serving(options, name, tuple(infer_notes(options)), provenance_of(present), rest)


def paths_of(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The models, and the words that belong to options. A YAML file is a model's too."""
    found: list[str] = []
    for at, word in enumerate(words):
        if word.startswith("-") or "=" in word:
            return found, list(words[at:])
        found.append(word)
    return found, []


def _is_config(path: str) -> bool:
    return path.endswith(CONFIG_SUFFIXES)


def _value(given: Mapping[str, RawValue], key: str) -> Any:
    return given[key].value if key in given else None


def _trained_by(given: Mapping[str, RawValue]) -> str | None:
    """The folder that a training file writes, where a model is in it."""
    folder = _value(given, "output_dir")
    if folder is None or not any((Path(str(folder)) / name).is_file() for name in (ADAPTER, MODEL)):
        return None
    return str(folder)


def found_in(path: str, given: Mapping[str, RawValue]) -> dict[str, RawValue]:
    """Options for the content of a folder: a model, an adapter with its base, or a run that has only checkpoints."""
    folder, where = expanded(path), path
    if not folder.is_dir():
        return {"model_name_or_path": RawValue(path, where)}
    if not any((folder / name).is_file() for name in (ADAPTER, MODEL)):
        folder = _newest_checkpoint(folder)
    if (folder / ADAPTER).is_file():
        return _of_adapter(folder, given)
    return {"model_name_or_path": RawValue(str(folder), where)}


def data_of_run(path: str, given: Mapping[str, RawValue]) -> dict[str, RawValue]:
    """Sets, template and lengths of the run that made a folder or checkpoint, as its ``run.yaml`` has them.

    Args:
        given: the words; where they name a set, the run's own sets are left out.
    """
    folder = _run_of(expanded(path))
    if folder is None:
        return {}
    where = str(folder / GIVEN)
    file, _ = read_arguments([where])
    names = {*specs(DataOptions), *specs(TemplateOptions), *specs(EncodingOptions), "stage", "seed"}
    found = {name: item for name, item in file.items() if name in names}
    begun = read_object(folder / LAUNCH).get("folder") if (folder / LAUNCH).is_file() else None
    if isinstance(begun, str):
        moved = data_seen_from(Path(begun), {name: item.value for name, item in found.items()})
        found |= {name: RawValue(value, where) for name, value in moved.items()}
    own_sets = ("dataset", "eval_dataset", "val_size") if "eval_dataset" in given or "val_size" in given else ()
    return {name: item for name, item in found.items() if name not in own_sets}


def _run_of(folder: Path) -> Path | None:
    """The run that wrote a folder; a checkpoint lies in its run's, and nothing else belongs to a file beside it."""
    places = [folder, folder.resolve().parent] if folder.resolve().name.startswith("checkpoint-") else [folder]
    return next((place for place in places if (place / GIVEN).is_file()), None)


def _newest_checkpoint(folder: Path) -> Path:
    newest, _ = Checkpoints(folder).newest()
    if newest is None:
        raise UserError(
            f'"{folder}" contains no model: no {MODEL}, no {ADAPTER} and no complete checkpoint.',
            remedy="Pass the folder that burnish train or burnish export wrote (output_dir, export_dir).",
        )
    return newest


def _of_adapter(folder: Path, given: Mapping[str, RawValue]) -> dict[str, RawValue]:
    try:
        config = json.loads((folder / ADAPTER).read_text(encoding="utf-8"))
        base, kind = config["base_model_name_or_path"], config.get("peft_type", "LORA")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"cannot read the base model's name: {error}.", where=str(folder / ADAPTER)) from error
    found = {"adapter_name_or_path": RawValue([str(folder)], str(folder))}
    if "model_name_or_path" not in given:
        if not base:
            what = "the adapter does not name its base model."
            raise UserError(what, where=str(folder), remedy="Add model_name_or_path=...")
        found["model_name_or_path"] = RawValue(base, str(folder / ADAPTER))
    if kind != "LORA":
        found["finetuning_type"] = RawValue("peft", str(folder / ADAPTER))
    return found
