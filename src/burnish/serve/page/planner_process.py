"""``burnish _planner``: the process that previews runs for the web UI, with the model libraries loaded once.

In: JSON lines: the values of a form, or a request for ``form``, ``columns_of`` or ``held_out``. Out: JSON lines. Form
values are parsed like those of a file, so that their meaning and their errors are the same.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any, Literal, TextIO, get_origin

from burnish.config.bounds import SERVED_RENDERING_S
from burnish.config.conversion import members
from burnish.config.errors import UserError
from burnish.config.options import OptionSpec, RawValue, specs
from burnish.config.registry import Registry
from burnish.data.chat.rendering import limit_rendering
from burnish.data.reading.files import data_files, read_records
from burnish.data.sets.data_source import DataSource
from burnish.data.sets.formats import FORMATS
from burnish.data.sets.layouts import is_preference, layout_of, proposed_columns
from burnish.data.sets.sources import load_datasets
from burnish.data.stats import DataStats
from burnish.explain.as_json import explained_parts, problems_of
from burnish.loop.types import IMAGE, Answer, Example, Message
from burnish.run.plan.files import problems_in_files, record_needs
from burnish.run.plan.listing import component
from burnish.run.plan.options import RunOptions
from burnish.run.plan.plan import plan
from burnish.utils.json_files import shorten_value

_LONGEST_CHOICE = 60
_SHOWN = 3
"""Number of values that are shown for a column."""


def planner(requests: TextIO | None = None, responses: TextIO | None = None) -> int:
    """Handle requests until the input ends: ``{"id", "values", "rows", "seed"}`` in, parts with the same id out,
    the last with ``"is_last": true``. Errors are returned as parts. Questions wait for each other, so that a chat
    template has no more time than in the API."""
    requests, responses = requests or sys.stdin, responses or sys.stdout
    with limit_rendering(SERVED_RENDERING_S):
        for line in requests:
            question = json.loads(line)
            for part in _parts(question):
                responses.write(json.dumps({"id": question["id"], **part}, ensure_ascii=False) + "\n")
                responses.flush()
    return 0


def _parts(question: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    if question.get("form"):
        yield {**form(), "is_last": True}
        return
    try:
        if question.get("columns_of"):
            yield {**columns_of_file(Path(question["columns_of"])), "is_last": True}
            return
        if question.get("held_out"):
            yield {**held_out_example(question["values"], question.get("number")), "is_last": True}
            return
        values = {name: RawValue(value, "") for name, value in question["values"].items()}
        chosen = plan(values, extra_checks=[problems_in_files])
        yield from explained_parts(chosen, question.get("rows", 5), question.get("seed", 0))
        yield {"is_last": True}
    except UserError as error:
        yield {"problems": problems_of(error), "is_last": True}
    except (Exception, SystemExit) as error:  # a fault of one question must not end the process that answers the next
        what = f"Internal error: {type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
        yield {"problems": [{"option": "", "sentence": what, "remedy": "", "where": ""}], "is_last": True}


# --- the form ---------------------------------------------------------------------------------------------------------


def form() -> dict[str, Any]:
    """The fields in the order of their declaration, and the groups that they belong to."""
    fields = [field_of(spec) for spec in specs(RunOptions).values()]
    return {"groups": list(dict.fromkeys(field["group"] for field in fields)), "fields": fields}


def field_of(spec: OptionSpec) -> dict[str, Any]:
    """One option as a field."""
    default = spec.default
    return {
        "name": spec.name,
        "group": component(spec.group),
        "type": spec.type_name,
        "control": control_of(spec),
        "default": default if isinstance(default, bool | int | float | str | list | dict) else None,
        "choices": [str(choice) for choice in spec.choices or []][:_LONGEST_CHOICE],
        "unit": spec.unit,
        "bounds": {name: bound for name, bound in spec.bounds.items() if bound is not None and abs(bound) < 1e300},
        "help": spec.help,
        "aliases": list(spec.aliases),
        "ignored": spec.ignored,
        "kinds": sorted({_kind(member) for member in members(spec.type)}),
        "is_secret": spec.is_secret,
        "names_place": spec.names_place,
        **_risk(spec),
    }


def _kind(member: Any) -> str:
    """The type of a value by name: ``str``, ``list``, ``NoneType``, ..."""
    origin = get_origin(member) or member
    return "str" if origin is Literal else str(origin.__name__)


def _risk(spec: OptionSpec) -> dict[str, Any]:
    """Return the reason why a visitor of the page may not set an option, and the values that are harmless. A member of
    a registry that another package has added is a risk: choosing it runs that package's code."""
    registry = getattr(spec.raw_choices, "__self__", None)
    if isinstance(registry, Registry) and not all(member.is_ours for member in registry):
        return {
            "risky": "it runs code from another package",
            "harmless": [member.name for member in registry if member.is_ours],
        }
    return {"risky": spec.risky, "harmless": list(spec.harmless)}


def control_of(spec: OptionSpec) -> str:
    """``switch``, ``choice``, ``number``, ``list`` or ``text``."""
    kinds = [get_origin(member) or member for member in members(spec.type) if member is not type(None)]
    if kinds == [bool]:
        return "switch"
    if spec.choices and list not in kinds and str not in [k for k in kinds if spec.raw_choices is None]:
        return "choice"
    if kinds and all(kind in (int, float) for kind in kinds):
        return "number"
    if list in kinds:
        return "list"
    return "text"


# --- a file of records, and a held-out record -------------------------------------------------------------------------


def columns_of_file(path: Path) -> dict[str, Any]:
    """Describe the columns of a file of records, for the form of the column mapping: ``{"columns": [[name, values]],
    "formats": [[name, parts]], "known", "proposed"}``; ``known`` is the detected format, or "".

    Raises:
        UserError: for a file that cannot be read.
    """
    first = list(islice(chain.from_iterable(map(read_records, data_files(path))), _SHOWN))
    names = list(dict.fromkeys(name for values in first for name in values))
    source = DataSource(str(path), "file", str(path), str(path))
    try:
        known = layout_of(source, first, str(path)).format
    except UserError:
        known = "preference" if any(map(is_preference, first)) else ""
    return {
        "columns": [[name, [shorten_value(values[name]) for values in first if name in values]] for name in names],
        "formats": [[one.name, list(one.metadata["columns"] | one.metadata.get("optional", {}))] for one in FORMATS],
        "known": known, "proposed": proposed_columns(names),
    }  # fmt: skip


def held_out_example(values: Mapping[str, Any], number: int | None = None) -> dict[str, Any]:
    """A validation example as a chat request, with its reference response. The split is the same as in the run.

    Args:
        values: name -> value.
        number: of the record in the evaluation set, from 1; None selects a random one.
    Raises:
        UserError: if the run has no validation set, or the record has no prompt.
    """
    records = _validation_examples(json.dumps(values, sort_keys=True))
    if not records:
        raise UserError("The run has no validation examples.", remedy="Set val_size or eval_dataset.")
    chosen = random.randrange(len(records)) + 1 if number is None else number  # noqa: S311  (a record to look at)
    if not 1 <= chosen <= len(records):
        raise UserError(f"The number of a validation example must be between 1 and {len(records)}. Received: {chosen}.")
    record = records[chosen - 1]
    return {**question_of(record), "number": chosen, "of": len(records), "place": record.place}


def _validation_examples(values: str) -> Sequence[Example]:
    """Return the validation examples of a run, and keep those of the last run while its files do not change.

    Training data is read only if the examples are split off from it.

    Args:
        values: option values as JSON text.
    """
    if _kept.values == values and _kept.files == {path: _file_state(path) for path in _kept.files}:
        return _kept.examples
    options = plan({name: RawValue(value, "") for name, value in json.loads(values).items()}).options
    if not options.val_size and not options.eval_dataset:
        return []
    read = options if options.val_size else replace(options, dataset=None)
    sets = load_datasets(read, options.seed, DataStats(), needs=record_needs(options))
    _kept.values, _kept.examples = values, list(chain.from_iterable(sets.eval.values()))
    files = {Path(example.source) for example in chain(sets.train, _kept.examples)}
    _kept.files = {path: _file_state(path) for path in files | {file.parent for file in files}}
    return _kept.examples


@dataclass
class _KeptExamples:
    """The validation examples that were loaded last, and the states of the files that they were loaded from."""

    values: str = ""
    files: Mapping[Path, tuple[int, int] | None] = field(default_factory=dict)
    examples: Sequence[Example] = ()


_kept = _KeptExamples()


def _file_state(path: Path) -> tuple[int, int] | None:
    """Return the modification time (ns) and the size (bytes) of a file; None if it does not exist."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size


def question_of(record: Example) -> dict[str, Any]:
    """``{"system", "tools", "before", "user", "answer", "images"}``: the conversation up to the last user message, the
    response, and the images of that message. An earlier message may have ``images`` as well.

    Raises:
        UserError: for plain text without a prompt.
    """
    messages = record.messages
    asks = max((place for place, one in enumerate(messages) if one.role == "user"), default=None)
    images: list[Any] = []
    if asks is not None:
        before, user, behind = messages[:asks], _without_marks(messages[asks]), messages[asks + 1 :]
        images = _images(messages[asks])
    elif record.prompt is not None:
        before, user, behind = (), record.prompt, ()
    else:
        raise UserError(f"{record.place}: the example is plain text without a prompt.")
    response = record.chosen if record.chosen is not None else record.completion if behind == () else behind
    return {
        "system": record.system or "", "tools": json.loads(record.tools) if record.tools else [],
        "before": list(_in_chat_roles(before)), "user": user, "answer": _text(response), "images": images,
    }  # fmt: skip


def _images(message: Message) -> list[dict[str, Any]]:
    """The images of a message, which the page fetches by their paths."""
    return [{"path": one.path, "name": Path(one.path).name, "width": one.width, "height": one.height}
            for one in message.images]  # fmt: skip


def _without_marks(message: Message) -> str:
    return message.text.replace(IMAGE, "")


def _text(answer: Answer | None) -> str:
    return answer if isinstance(answer, str) else "\n\n".join(map(_without_marks, answer or ()))


def _in_chat_roles(messages: Iterable[Message]) -> Iterator[dict[str, Any]]:
    """Give ids to tool calls, and assign them to the tool results in order."""
    waiting: list[str] = []
    for place, message in enumerate(messages):
        if message.role == "function":
            found = json.loads(message.text)
            calls = found if isinstance(found, list) else [found]
            waiting = [f"call_{place}_{number}" for number in range(len(calls))]
            yield {"role": "assistant", "content": "", "tool_calls": [
                {"id": id, "type": "function",
                 "function": {"name": call["name"], "arguments": json.dumps(call.get("arguments", {}))}}
                for id, call in zip(waiting, calls, strict=True)
            ]}  # fmt: skip
        elif message.role == "observation":
            yield {"role": "tool", "content": message.text, "tool_call_id": waiting.pop(0) if waiting else "call_0"}
        else:
            images = _images(message)
            content = _without_marks(message)
            yield {"role": message.role, "content": content, **({"images": images} if images else {})}
