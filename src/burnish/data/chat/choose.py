"""Select the template of a run: by name, from a file, or the tokenizer's own chat template.

``load_template`` returns a ``Template``, which encodes examples. ``configure_tokenizer`` adjusts a tokenizer to it. An
unknown template, or one whose control tokens the tokenizer lacks, is an error before any data is read.

    template = load_template(options, tokenizer)      # by name, from a file, or the tokenizer's own
    notes = configure_tokenizer(template, tokenizer)  # set EOS, padding and stop tokens
    rows = template.encode(examples, stats)
    tokenizer.chat_template = template.jinja()        # renders the tokens that were trained
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import yaml

from burnish.config.checks import check
from burnish.config.conversion import DuplicateKeyError, yaml_without_duplicate_keys
from burnish.config.errors import Problem, UserError, did_you_mean
from burnish.config.options import RawValue, build, option, raise_if
from burnish.data.chat.chat_template import JinjaFormat
from burnish.data.chat.labels import LearnOptions, TemplateChoices, check_learning
from burnish.data.chat.rows import Template
from burnish.data.chat.slots import SlotFormat, with_options
from burnish.data.chat.table import TemplateSpec, read_row, table
from burnish.data.chat.tools.tool_formats import TOOL_FORMATS
from burnish.data.images.families import check_family
from burnish.data.images.family import Family
from burnish.data.tokens.encoder import Encoder
from burnish.utils.files import check_below_roots, special_file_kind

FALLBACK = TemplateSpec("empty", empty_thought="", tool_list_format="default")
"""Default for a tokenizer without a chat template: no markers, EOS after each response."""
RECORDED = "burnish_template"
"""Key of ``tokenizer_config.json`` that records the template a model was trained with."""
_RECORDED_OPTIONS = ("template", "default_system", "tool_format", "enable_thinking")
_FORGETS = "removes_earlier_reasoning"
"""Entry of the record: training removed the reasoning of all responses but the last one."""


@dataclass
class TemplateOptions(LearnOptions):
    """Chat template."""

    template: str | None = option(
        None,
        "Chat template: a name, or a file (.yaml, .json, .jinja). Default: the tokenizer's own chat template.",
        names_place=True,
    )
    default_system: str | None = option(
        None, "System message for records without one, instead of the template's default. Empty: no system message."
    )
    tool_format: str | None = option(
        None, "Format of tools and tool calls. Default: the format of the template.", choices=TOOL_FORMATS.names
    )
    enable_thinking: bool | None = option(
        True,
        "How a reasoning template handles responses without reasoning: train on an empty reasoning block (true); "
        "put the block in the prompt and remove all reasoning (false); put it in the prompt and keep "
        "reasoning (none).",
    )
    preserve_thinking: bool = option(
        False, "Keep the reasoning of earlier responses when only the last response is trained on."
    )
    missing_control_tokens: Literal["raise", "split"] = option(
        "raise",
        "What to do if the tokenizer lacks special tokens of the template: stop with an error, or tokenize "
        "them as plain text.",
    )


class NamedTemplate(TemplateChoices, Protocol):
    """Options that select a template and how it is read."""

    template: str | None
    missing_control_tokens: Literal["raise", "split"]


@check
def check_template(options: NamedTemplate) -> Iterator[Problem]:
    """Yield the problems of the options that can be found without a tokenizer."""
    try:
        spec = _named_spec(options.template)
    except UserError as error:
        yield from error.problems
        return
    if spec is not None and spec.efficient_eos and options.train_on_prompt:
        what = (
            f'train_on_prompt is not supported with template "{spec.name}": its turns have no end-of-turn token, so '
            "the model would learn to end a response with the first token of the next turn."
        )
        yield Problem(
            what,
            remedy="Remove train_on_prompt, or use a template with an end-of-turn token.",
            option="train_on_prompt",
        )


def load_template(
    options: NamedTemplate, tokenizer: Any, cutoff_len: int | None = None, family: Family | None = None
) -> Template:
    """Load the template selected by the options.

    Args:
        options: template options.
        tokenizer: tokenizer of the model.
        cutoff_len: maximum row length, if different from the option.
        family: model family of a vision model, otherwise None.
    Raises:
        UserError: if the template does not exist, the options contradict it or each other, or the tokenizer lacks its
            control tokens.
    """
    raise_if([*check_template(options), *check_learning(options)])
    spec = _named_spec(options.template)
    if spec is None and not (options.template or tokenizer.chat_template):
        spec = FALLBACK
    if spec is None:
        return _own_chat_template(options, tokenizer, cutoff_len, family)
    spec = with_options(spec, options)
    _check_control_tokens(spec, options, tokenizer)
    if family is not None:
        check_family(spec.name, family)
    form = SlotFormat(spec, options, tokenizer, family)
    template = Template(spec.name, form, options, tokenizer, spec, cutoff_len)
    template.notes += _notes(spec, options)
    return template


def _own_chat_template(
    options: NamedTemplate, tokenizer: Any, cutoff_len: int | None, family: Family | None
) -> Template:
    """Return the tokenizer's own chat template, or the Jinja file named by the options."""
    chat_template, name = tokenizer.chat_template, "the tokenizer's own"
    if options.template:
        chat_template, name = _read(Path(options.template)), Path(options.template).name
    form = JinjaFormat(chat_template, options, tokenizer, name, family)
    template = Template(name, form, options, tokenizer, None, cutoff_len)
    if options.tool_format:
        template.notes.append(f"tool_format has no effect with {name} chat template, which formats tools itself.")
    return template


def configure_tokenizer(template: Template, tokenizer: Any) -> list[str]:
    """Set the tokenizer's EOS, padding and stop tokens as the template requires.

    Returns:
        Notes about each automatic choice and change.
    """
    notes = list(template.notes)
    size = len(tokenizer)
    recorded = {name: getattr(template.options, name) for name in _RECORDED_OPTIONS}
    if template.spec is not None and recorded["template"] in (None, *table()):
        tokenizer.init_kwargs[RECORDED] = recorded
        if template.forgets_thoughts:
            recorded[_FORGETS] = True
    stop_words = list(template.spec.stop_words) if template.spec else []
    if template.spec and template.spec.replace_eos and tokenizer.eos_token != stop_words[0]:
        notes.append(
            f'EOS token changed from "{tokenizer.eos_token}" to "{stop_words[0]}", which ends turns in template '
            f'"{template.name}".'
        )
        tokenizer.add_special_tokens({"eos_token": stop_words[0]})
    if tokenizer.eos_token_id is None:
        tokenizer.add_special_tokens({"eos_token": "<|endoftext|>"})
        notes.append('The tokenizer has no EOS token; "<|endoftext|>" was added.')
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
        notes.append(f'The tokenizer has no padding token; the EOS token "{tokenizer.eos_token}" is used.')
    if unknown := [word for word in stop_words if word not in tokenizer.all_special_tokens]:
        tokenizer.add_special_tokens({"extra_special_tokens": unknown}, replace_extra_special_tokens=False)
    if len(tokenizer) > size:
        notes.append(f"Tokens added to the vocabulary for the template: {len(tokenizer) - size}.")
    template.form.read_special_tokens()
    return notes


def recorded_options(recorded: Any, where: str) -> dict[str, Any]:
    """Return the template options in an entry ``RECORDED`` of a ``tokenizer_config.json``.

    A model's folder may be from an untrusted source: it can set the options that ``configure_tokenizer`` records, no
    others, and it can name a template, but no file.

    Args:
        recorded: the entry, or None.
        where: the file.
    Raises:
        UserError: for any other entry.
    """
    entry = {} if recorded is None else recorded
    is_named = isinstance(entry, dict) and entry.get("template") in (None, *table())
    if not is_named or not entry.keys() <= {*_RECORDED_OPTIONS, _FORGETS}:
        what = f'Expected "{RECORDED}" to contain a template\'s name and its options. Received: {entry!r:.200}.'
        raise UserError(what, where=where, remedy=f"Allowed: {', '.join(_RECORDED_OPTIONS)}. Remove other entries.")
    entry = {name: value for name, value in entry.items() if name != _FORGETS}
    options, wrong = build(TemplateOptions, {name: RawValue(value, where) for name, value in entry.items()})
    raise_if(wrong)
    return {name: getattr(options, name) for name in entry}


def load_template_of_model(
    options: NamedTemplate, tokenizer: Any, cutoff_len: int | None = None, family: Family | None = None
) -> Template:
    """Load the template for prompts to a trained model (see ``load_template``). Prompts contain the reasoning of
    earlier responses only if the rows of training did, unless ``preserve_thinking`` is set."""
    template, recorded = load_template(options, tokenizer, cutoff_len, family), tokenizer.init_kwargs.get(RECORDED)
    return template.answering_last() if isinstance(recorded, dict) and recorded.get(_FORGETS) is True else template


def _named_spec(name: str | None) -> TemplateSpec | None:
    """Return the named template, or the one in a YAML or JSON file; None for a Jinja file or if ``template`` is
    unset."""
    if name is None or name.endswith((".jinja", ".j2")):
        return None
    if name in table():
        return table()[name]
    if name.endswith((".yaml", ".yml", ".json")):
        return _spec_from_file(Path(name))
    raise UserError(
        f'Unknown template "{name}".{did_you_mean(name, table(), limit=3)}',
        remedy="Remove template to use the tokenizer's chat template, or set it to a .yaml or .jinja file.",
        option="template",
    )


def _spec_from_file(path: Path) -> TemplateSpec:
    text = _read(path)
    try:
        row = yaml_without_duplicate_keys(text, yaml.SafeLoader)
    except DuplicateKeyError as error:
        raise UserError(f"The template file {error}", where=str(path)) from error
    except (yaml.YAMLError, ValueError) as error:
        mark, fault = getattr(error, "problem_mark", None), getattr(error, "problem", None) or str(error)
        where = f"{path}:{mark.line + 1}:{mark.column + 1}" if mark else str(path)
        raise UserError(f"Invalid YAML in the template file: {fault}.", where=where) from error
    if not isinstance(row, dict):
        raise UserError(
            f"Expected a template file with a mapping (user, assistant, ...). Received: {type(row).__name__}.",
            where=str(path),
        )
    return read_row(path.stem, row, where=str(path))


def _read(path: Path) -> str:
    if kind := special_file_kind(path):
        raise UserError(f'Expected "template" to be a file. "{path}" is {kind}.', option="template")
    check_below_roots(path)
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"The template file cannot be read: {error}.", option="template") from error


def _check_control_tokens(spec: TemplateSpec, options: NamedTemplate, tokenizer: Any) -> None:
    encoder = Encoder(tokenizer)
    ids = encoder.encode(spec.control_tokens)
    missing = [token for token in spec.control_tokens if len(ids[token]) != 1]
    if missing and options.missing_control_tokens == "raise":
        raise UserError(
            f'The tokenizer lacks special tokens of template "{spec.name}": {", ".join(missing)}.',
            why="Each of them would be split into several ordinary tokens.",
            remedy="Use the template that the model was trained with (by default the tokenizer's own), add the tokens "
            "with add_special_tokens, or set missing_control_tokens: split.",
            option="template",
        )


def _notes(spec: TemplateSpec, options: NamedTemplate) -> Iterator[str]:
    if spec.name == "empty" and options.template is None:
        yield (
            "The tokenizer has no chat template and template is not set: messages are concatenated without "
            "markers, and each response ends with EOS. Set template to choose one."
        )
    if spec.name == "empty" and options.template is not None:
        yield 'Template "empty" has no end-of-turn token, so the model does not learn to stop.'
    if spec.reasoning:
        thought = {
            True: "it is part of the response",
            False: "it is put in the prompt, and all reasoning is removed",
            None: "it is put in the prompt",
        }
        yield (
            f'Template "{spec.name}" adds an empty reasoning block to responses without one; '
            f"{thought[options.enable_thinking]} (enable_thinking: {str(options.enable_thinking).lower()})."
        )
