"""Parse the arguments of ``burnish chat``, ``api``, ``eval``, ``predict``, ``score`` and ``export`` into options.

Arguments are ``PATH key=value --key value``. PATH is a YAML file, the folder of a run, a checkpoint, an exported model,
a folder with an adapter, or a hub id.

A folder with ``adapter_config.json`` also determines the base model. A YAML file of a training run stands for the model
in its ``output_dir``, if there is one. LLaMA-Factory's inference files name the model themselves.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from burnish.adapters.chain import MERGED_NAME, previously_merged
from burnish.checkpoint.checkpoint import Checkpoints
from burnish.config.errors import Problem, UserError
from burnish.config.options import RawValue, build, raise_if, specs
from burnish.data.chat.choose import TemplateOptions, check_template
from burnish.data.chat.truncate import EncodingOptions
from burnish.data.options import DataOptions
from burnish.inference.loading import writes_answers
from burnish.inference.options import TRAINING_ONLY, check_infer, infer_notes
from burnish.losses.base import OBJECTIVES, options_of
from burnish.models.check import check_model
from burnish.models.generate import PREDICTION_ONLY
from burnish.models.options import USED_MODEL
from burnish.report.metadata import LAUNCH, RUN_YAML
from burnish.run.plan.config_files import COMMAND_LINE, CONFIG_SUFFIXES, merge, path_of, read_arguments
from burnish.run.plan.options import RunOptions
from burnish.run.plan.plan import aliases, provenance_of
from burnish.run.plan.unsupported import take_unsupported
from burnish.serve.run_folder import absolute_data_options, absolute_model_options
from burnish.utils.files import expand_user
from burnish.utils.json_files import read_object, shorten_value

ADAPTER, MODEL = "adapter_config.json", "config.json"
UNREAD = (*PREDICTION_ONLY, *TRAINING_ONLY)
"""Options of the groups in the help of ``burnish chat`` that it does not read."""


@dataclass(frozen=True)
class Serving:
    """Everything a command needs to load and serve a model.

    Args:
        options: an instance of ``RunOptions``.
        name: name of the model: the last part of the path.
        notes: notes for the user.
        provenance: option -> where it was set.
        rest: values of the command's own options.
        uses_own_data: whether the datasets are those of the run that made the model.
        reference: options that name the reference model of its loss: the model before training.
    """

    options: RunOptions
    name: str
    notes: tuple[str, ...]
    provenance: Mapping[str, str]
    rest: Mapping[str, RawValue]
    uses_own_data: bool = False
    reference: Mapping[str, RawValue] = field(default_factory=dict)


def serving_of(
    argv: Sequence[str], own: Sequence[str] = (), with_data: bool = False, with_loss: bool = False
) -> Serving:
    """Parse the arguments of a command.

    Args:
        argv: arguments.
        own: names of the command's own options, which are returned unparsed in ``rest``.
        with_data: also use the datasets of the run that made a folder, unless the arguments name others, or a task.
        with_loss: with these datasets, also use the options of the run that determine its metrics.
    Raises:
        UserError: with all problems of the options.
    """
    path, others = path_of(argv)
    file, flags = read_arguments([*([path] if path and _is_config(path) else []), *others])
    values = merge(file, flags, aliases())
    rest = {key: values.pop(key) for key in list(values) if key in own}
    with_data, uses_own_data = with_data and "task" not in rest, False
    reference: dict[str, RawValue] = {}
    if path and not _is_config(path):
        if with_data and "dataset" in values and not values.keys() & {"eval_dataset", "val_size"}:
            values["eval_dataset"] = values.pop("dataset")  # all of it: nothing is trained
        of_run = data_of_run(path, values) if with_data else {}
        uses_own_data = "eval_dataset" in of_run or "val_size" in of_run
        if with_data and with_loss:
            of_run, reference = _with_loss_of_run(path, values, of_run, uses_own_data)
        values = {**of_run, **options_of_folder(path, values), **values}
    elif trained := _output_dir_of(values):
        uses_own_data = with_data and not flags.keys() & {"dataset", "eval_dataset", "val_size"}
        if with_loss:
            reference = _model_before({name: item.value for name, item in values.items()}, path or "")
        values = {**{k: v for k, v in values.items() if k not in _NAMES}, **options_of_folder(trained, {})}
    values = {**_base_of_adapter(values), **values}
    name = path or str(_value(values, "adapter_name_or_path") or _value(values, "model_name_or_path") or "")
    name = Path(name).stem if _is_config(name) else Path(name).name
    return replace(_checked_serving(values, rest, name), uses_own_data=uses_own_data, reference=reference)


def notes_of_chat(serving: Serving) -> list[str]:
    """Return the notes of a chat or an API, including those on options that only predictions read.

    Those of a YAML file are not reported, because files are shared between commands.
    """
    unread = [name for name in PREDICTION_ONLY if serving.provenance.get(name, "").startswith(COMMAND_LINE)]
    return [*serving.notes, *(f'"{name}" has no effect here: it applies to predictions only.' for name in unread)]


def export_values(argv: Sequence[str]) -> dict[str, RawValue]:
    """Parse the arguments of ``burnish export``: PATH or a YAML file, and options.

    The base model of an adapter is read from the adapter, the template from ``run.yaml`` in the model's folder.
    """
    path, others = path_of(argv)
    file, flags = read_arguments(argv if not path or _is_config(path) else others)
    values = merge(file, flags, aliases())
    if path and not _is_config(path):
        of_run = {name: item for name, item in data_of_run(path, values).items() if name in specs(TemplateOptions)}
        return {**of_run, **options_of_folder(path, values), **values}
    return {**_base_of_adapter(values), **values}


def _base_of_adapter(values: Mapping[str, RawValue]) -> dict[str, RawValue]:
    """Return ``model_name_or_path`` from the first adapter, if only adapters are given."""
    adapters = _value(values, "adapter_name_or_path")
    if not adapters or "model_name_or_path" in values:
        return {}
    first = expand_user(str(adapters[0] if isinstance(adapters, list) else adapters).split(",")[0].strip())
    found = _options_of_adapter(first, values) if (first / ADAPTER).is_file() else {}
    return {"model_name_or_path": found["model_name_or_path"]} if found else {}


def servings_of(
    argv: Sequence[str], own: Sequence[str] = (), with_data: bool = False, with_loss: bool = False
) -> list[Serving]:
    """Return a ``Serving`` for each model among the leading arguments; without any, for the model in the options.

    Names are unique, since each model writes to a folder of its name: ``a/checkpoint-4`` and ``b/checkpoint-4`` are
    called "a-checkpoint-4" and "b-checkpoint-4".

    Raises:
        UserError: as ``serving_of``, and if a model is named twice.
    """
    paths, others = paths_of(argv)
    found = [serving_of([*path, *others], own, with_data, with_loss) for path in ([[path] for path in paths] or [[]])]
    folders = [expand_user(path).absolute().parent for path in paths]
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


def _checked_serving(values: Mapping[str, RawValue], rest: Mapping[str, RawValue], name: str) -> Serving:
    present, problems, _ = take_unsupported(values, {**specs(RunOptions), **aliases()})
    options, wrong = build(RunOptions, present)
    problems += [*wrong, *check_template(options), *check_infer(options)]
    problems += [] if problems else check_model(options, needs_head=writes_answers(options), names=USED_MODEL)
    raise_if(problems)
    return Serving(options, name, tuple(infer_notes(options)), provenance_of(present), rest)


def paths_of(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split arguments into leading model paths (including YAML files) and options."""
    found: list[str] = []
    for at, word in enumerate(argv):
        if word.startswith("-") or "=" in word:
            return found, list(argv[at:])
        found.append(word)
    return found, []


def _is_config(path: str) -> bool:
    return path.endswith(CONFIG_SUFFIXES)


def _value(values: Mapping[str, RawValue], key: str) -> Any:
    return values[key].value if key in values else None


def _output_dir_of(values: Mapping[str, RawValue]) -> str | None:
    """Return the ``output_dir`` of a training configuration if it contains a model, else None."""
    folder = _value(values, "output_dir")
    if folder is None or not any((Path(str(folder)) / name).is_file() for name in (ADAPTER, MODEL)):
        return None
    return str(folder)


def options_of_folder(path: str, values: Mapping[str, RawValue]) -> dict[str, RawValue]:
    """Return the options for the content of a folder: a model, an adapter with its base, or a run's checkpoints."""
    folder, where = expand_user(path), path
    if not folder.is_dir():
        return {"model_name_or_path": RawValue(path, where)}
    if not any((folder / name).is_file() for name in (ADAPTER, MODEL)):
        folder = _newest_checkpoint(folder)
        if not any((folder / name).is_file() for name in (ADAPTER, MODEL)):
            raise UserError(
                f"it has neither {MODEL} nor {ADAPTER}: only the package of its finetuning_type can load it.",
                where=path, remedy="Set adapter_name_or_path in a run: burnish train run.yaml do_train=false "
                f"do_predict=true predict_with_generate=true adapter_name_or_path={path} output_dir=...",
            )  # fmt: skip
    if (folder / ADAPTER).is_file():
        return _options_of_adapter(folder, values)
    return {"model_name_or_path": RawValue(str(folder), where)}


def data_of_run(path: str, values: Mapping[str, RawValue]) -> dict[str, RawValue]:
    """Return datasets, template and lengths of the run that made a folder or checkpoint, from its ``run.yaml``.

    Args:
        path: the folder.
        values: options of the command. If they name a dataset, the run's own datasets are omitted.
    """
    folder = _run_of(expand_user(path))
    if folder is None:
        return {}
    where = str(folder / RUN_YAML)
    file, _ = read_arguments([where])
    names = {*specs(DataOptions), *specs(TemplateOptions), *specs(EncodingOptions), "stage", "seed"}
    found = {name: item for name, item in file.items() if name in names}
    launch_folder = read_object(folder / LAUNCH).get("folder") if (folder / LAUNCH).is_file() else None
    if isinstance(launch_folder, str):
        moved = absolute_data_options(Path(launch_folder), {name: item.value for name, item in found.items()})
        found |= {name: RawValue(value, where) for name, value in moved.items()}
    own_sets = (
        ("dataset", "eval_dataset", "val_size", "tokenized_path")
        if "eval_dataset" in values or "val_size" in values
        else ()
    )
    return {name: item for name, item in found.items() if name not in own_sets}


def _with_loss_of_run(
    path: str, values: Mapping[str, RawValue], of_run: Mapping[str, RawValue], uses_own_data: bool
) -> tuple[dict[str, RawValue], dict[str, RawValue]]:
    """Return the options of a run with those that determine the metrics of its stage, and its reference model.

    For other datasets, the stage of the run is used only if the arguments set the same.

    Args:
        path: folder of the run or of a checkpoint.
        values: options of the command.
        of_run: options of the run, from ``data_of_run``.
        uses_own_data: whether the datasets are those of the run.
    """
    stage, chosen = _value(of_run, "stage") or "sft", _value(values, "stage")
    folder = _run_of(expand_user(path))
    if folder is None or not (stage == chosen or (uses_own_data and chosen is None)) or stage not in OBJECTIVES:
        return {name: item for name, item in of_run.items() if name != "stage"}, {}
    where = str(folder / RUN_YAML)
    file, _ = read_arguments([where])
    launch_folder = read_object(folder / LAUNCH).get("folder") if (folder / LAUNCH).is_file() else None
    given = {name: item.value for name, item in file.items()}
    if isinstance(launch_folder, str):
        given |= absolute_model_options(Path(launch_folder), given)
    names = options_of(stage) - {"predict_with_generate"}
    found = {name: RawValue(value, where) for name, value in given.items() if name in names}
    if "reward_funcs" in found and "reward_funcs" not in values and not _are_built_in(found["reward_funcs"].value):
        raise UserError(_reward_code_problem(path, found["reward_funcs"].value))
    return {**found, **of_run}, {} if "ref_model" in values else _model_before(given, where)


def _model_before(given: Mapping[str, Any], where: str) -> dict[str, RawValue]:
    """Return the options that name the model before training as the reference, unless the run has another reference.

    Without them, the trained model would be compared with itself.
    """
    if "ref_model" in given:
        return {}
    start = {"ref_model": "model_name_or_path", "ref_model_adapters": "adapter_name_or_path"}
    return {name: RawValue(given[own], where) for name, own in start.items() if given.get(own)}


def _are_built_in(rewards: Any) -> bool:
    """Return whether all reward functions are built-in: only the names of others contain "." or ":"."""
    entries = rewards if isinstance(rewards, list) else str(rewards).split(",")
    names = [name for entry in entries for name in (entry if isinstance(entry, Mapping) else [entry])]
    return all(str(name).strip().isidentifier() for name in names)


def _reward_code_problem(path: str, rewards: Any) -> Problem:
    what = "the run's reward functions are Python code, which is not executed because only run.yaml refers to it. "
    what += f"Received: {shorten_value(rewards)}"
    return Problem(what, path, remedy="Pass them on the command line: reward_funcs=...", option="reward_funcs")


def _run_of(folder: Path) -> Path | None:
    """Return the folder of the run that wrote ``folder`` (for a checkpoint, its parent folder), or None."""
    places = [folder, folder.resolve().parent] if folder.resolve().name.startswith("checkpoint-") else [folder]
    return next((place for place in places if (place / RUN_YAML).is_file()), None)


def _newest_checkpoint(folder: Path) -> Path:
    newest, _ = Checkpoints(folder).newest()
    if newest is None:
        raise UserError(
            f'"{folder}" contains no model: no {MODEL}, no {ADAPTER} and no complete checkpoint.',
            remedy="Pass the folder that burnish train or burnish export wrote (output_dir, export_dir).",
        )
    return newest


def _base_options_of_run(folder: Path) -> dict[str, RawValue]:
    """Return the options of the run that made an adapter that also determine its base model: ``model_revision``, and
    ``rope_scaling`` with the length to which it extended the context."""
    run = _run_of(folder)
    if run is None:
        return {}
    where = str(run / RUN_YAML)
    file, _ = read_arguments([where])
    names = ("model_revision", *(("rope_scaling", "cutoff_len") if "rope_scaling" in file else ()))
    return {name: RawValue(file[name].value, where) for name in names if name in file}


def _check_scaling(base: Mapping[str, RawValue], values: Mapping[str, RawValue]) -> list[Problem]:
    """Return a problem if a ``cutoff_len`` of the command would change the scale of an adapter's positions."""
    trained, given = base.get("cutoff_len"), values.get("cutoff_len")
    if trained is None or given is None or "rope_scaling" in values or str(given.value) == str(trained.value):
        return []
    what = f"the adapter was trained with rope_scaling for cutoff_len {trained.value}, which cutoff_len would change."
    remedy = "Remove cutoff_len, or set rope_scaling as well to scale the positions for this length."
    return [Problem(what, where=given.where, remedy=remedy, option="cutoff_len")]


def _options_of_adapter(folder: Path, values: Mapping[str, RawValue]) -> dict[str, RawValue]:
    try:
        config = json.loads((folder / ADAPTER).read_text(encoding="utf-8"))
        base, kind = config["base_model_name_or_path"], config.get("peft_type", "LORA")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"cannot read the base model's name: {error}.", where=str(folder / ADAPTER)) from error
    merged = previously_merged(folder)
    where = folder / MERGED_NAME if merged else folder
    found = {"adapter_name_or_path": RawValue([*merged, str(folder)], str(where))}
    if "model_name_or_path" not in values:
        if not base:
            what = "the adapter does not name its base model."
            raise UserError(what, where=str(folder), remedy="Add model_name_or_path=...")
        found["model_name_or_path"] = RawValue(base, str(folder / ADAPTER))
        found |= (base_options := _base_options_of_run(folder))
        raise_if(_check_scaling(base_options, values))
    if kind != "LORA":
        found["finetuning_type"] = RawValue("peft", str(folder / ADAPTER))
    return found
