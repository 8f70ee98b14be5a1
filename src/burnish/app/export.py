"""``burnish export``: base model and adapters become one folder that any library loads.

    plan       the options that name the model, its adapters and its template; the same file that trained will do
    merge      the adapters, in their order, into the base
    save       safetensors in shards, config, tokenizer with the chat template, a Modelfile for Ollama
    compare    one conversation, rendered from the folder and by the template that trained: the same ids
    upload     to the hub, where asked for

Refuses, before a weight is read: what ``train`` would refuse of model, adapter and template; a quantised base, into
which nothing can be merged; a folder that holds something already.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from burnish.adapters.base import ADAPTERS
from burnish.adapters.lora import load_adapter
from burnish.adapters.lora_fit import check_fit
from burnish.adapters.lora_model import merge_into_base
from burnish.app.absent import take_absent
from burnish.app.modelfile import modelfile
from burnish.app.plan import RunOptions, aliases
from burnish.core.errors import Problem, UserError
from burnish.core.options import Given, build, raise_if, specs
from burnish.core.types import Example, Message
from burnish.data.rows import Template
from burnish.data.tally import Tally
from burnish.data.templates import check_template, fit_tokenizer, load_template
from burnish.models.check import check_model
from burnish.models.export import inference_dtype, problems_of_export, upload
from burnish.models.load import context_length, load_config, load_model, raise_if_not_finite
from burnish.models.quantize import is_quantised
from burnish.models.save import save_model
from burnish.models.source import adapter_folders, find_source
from burnish.models.tokens import TOKENIZER_FILES, fit_vocabulary, fitted_shapes, load_tokenizer
from burnish.report.console import note

CONVERSATION = (
    Message("user", "What is 2 + 2?"),
    Message("assistant", "4."),
    Message("user", "And in words, per favore: «due»?"),
    Message("assistant", "Four.\nQuattro."),
)
LONG_ENOUGH = 1 << 20  # no cut: what is compared is the template


def export(given: Mapping[str, Given]) -> Path:
    """The whole of ``burnish export``. Returns the folder.

    Raises:
        UserError: for what the user gave.
        RuntimeError: where the exported tokenizer renders another text than was trained.
    """
    options = export_options(given)
    adapters = adapter_folders(options)
    config = load_config(options)
    notes: list[str] = []
    tokenizer, options = tokenizer_of(options, adapters, notes)
    raise_if(problems_of_adapters(options, config, tokenizer, adapters))
    template = load_template(options, tokenizer, LONG_ENOUGH)
    notes += fit_tokenizer(template, tokenizer)
    tokenizer.chat_template = template.jinja()

    model = merged_model(options, config, tokenizer, adapters, notes)
    folder = Path(options.export_dir)
    save_model(
        model, tokenizer, folder, dtype=inference_dtype(options), max_shard_size=f"{options.export_size}GB",
        stop_token_ids=template.stop_token_ids(),
    )  # fmt: skip
    (folder / "Modelfile").write_text(modelfile(template, tokenizer, context_length(model.config)), encoding="utf-8")
    notes += compare(folder, template, options)
    if options.export_hub_model_id:
        notes.append(f"Uploaded to {upload(folder, options)}.")
    for sentence in (*notes, f"The model is in {folder}."):
        note(sentence)
    return folder


# --- plan -------------------------------------------------------------------------------------------------------------


def export_options(given: Mapping[str, Given]) -> Any:
    """The options, where all that an export reads is right. Those of training may stand beside them."""
    present, problems, _ = take_absent(given, {**specs(RunOptions), **aliases()})
    options, wrong = build(RunOptions, present)
    problems += [*wrong, *check_template(options)]
    problems += [] if problems else quantised_base(options) or check_model(options)
    if not problems:
        folders = [find_source(options.model_name_or_path, options).folder, *adapter_folders(options)]
        problems += problems_of_export(options, [folder for folder in folders if folder is not None])
    raise_if(problems)
    return options


def quantised_base(options: Any) -> list[Problem]:
    """A problem where the base is quantised, or would be while it is loaded."""
    try:
        method = is_quantised(options, load_config(options))
    except UserError:
        return []  # check_model says what is wrong with it
    if not method:
        return []
    what = "an adapter cannot be merged into it" if options.adapter_name_or_path else "it stays as it is"
    return [
        Problem(
            f"the base model is quantised ({method}): {what}.",
            where=str(options.model_name_or_path),
            remedy="Leave quantization_bit out, so that the adapter is merged into the model as it was before."
            if options.quantization_bit
            else "Set model_name_or_path to the model that was quantised, in full precision.",
        )
    ]


def problems_of_adapters(options: Any, config: Any, tokenizer: Any, adapters: Sequence[Path]) -> list[Problem]:
    """Adapters that do not fit the base. No weight is read."""
    if _is_of_peft(options):
        return []  # peft checks its own
    model = fitted_shapes(config, tokenizer, options)
    return [problem for folder in adapters for problem in check_fit(model, folder)]


def _is_of_peft(options: Any) -> bool:
    return bool(ADAPTERS.get(options.finetuning_type).traits.get("is_of_peft"))


def tokenizer_of(options: Any, adapters: Sequence[Path], notes: list[str]) -> tuple[Any, Any]:
    """The tokenizer, and the options under which the model fits it: that of the last adapter that brings one, as
    training leaves it, with its new tokens and its chat template; else the model's."""
    for folder in reversed(adapters):
        if any((folder / name).is_file() for name in TOKENIZER_FILES):
            there = replace(options, model_name_or_path=str(folder))
            return load_tokenizer(there, notes), replace(options, resize_vocab=True)
    return load_tokenizer(options, notes), options


# --- merge ------------------------------------------------------------------------------------------------------------


def merged_model(options: Any, config: Any, tokenizer: Any, adapters: Sequence[Path], notes: list[str]) -> nn.Module:
    """The base with every adapter in it, in order. The sums are made in float32, whatever the weights are kept in."""
    wanted = inference_dtype(options)
    device = "cuda" if options.export_device == "auto" and torch.cuda.is_available() else "cpu"
    dtype: Any = torch.float32 if wanted == torch.float32 else "auto"
    model: nn.Module = load_model(options, dtype=dtype, config=config, device=device, notes=notes)
    fit_vocabulary(model, tokenizer, options, notes)
    if adapters and _is_of_peft(options):
        from burnish.adapters.peft import merge_folders

        model = merge_folders(model, adapters)
    else:
        for folder in adapters:
            load_adapter(model, folder)
            merge_into_base(model)
    notes += [f"The adapter {folder} was merged." for folder in adapters]
    raise_if_not_finite(model, str(options.model_name_or_path))
    return model


# --- compare ----------------------------------------------------------------------------------------------------------


def compare(folder: Path, template: Template, options: Any) -> list[str]:
    """Render a conversation with what lies in ``folder`` and with ``template``, and lay the ids side by side.

    Returns:
        a sentence that says what was found.
    Raises:
        RuntimeError: where the two are different texts.
    """
    tokenizer = load_tokenizer(
        replace(options, model_name_or_path=str(folder), add_tokens=None, add_special_tokens=None)
    )
    example = readable_example(template)
    if example is None:
        return ["The template writes no plain conversation, so the exported chat template was not compared with it."]
    row = template.encode([example], Tally())[0]
    assert row is not None
    chat = [{"role": message.role, "content": message.content} for message in example.messages]
    if example.system is not None:
        chat.insert(0, {"role": "system", "content": example.system})
    for trained, exported in (
        (row["input_ids"], tokenizer.apply_chat_template(chat, return_dict=True)["input_ids"]),
        (
            template.prompt(example),
            tokenizer.apply_chat_template(chat[:-1], add_generation_prompt=True, return_dict=True)["input_ids"],
        ),
    ):
        if list(trained) != list(exported):
            return [_difference(list(trained), list(exported), tokenizer)]
    return [f"A conversation of {len(row['input_ids'])} tokens is rendered from {folder} as it was trained."]


def readable_example(template: Template) -> Example | None:
    """A conversation that the template writes: with a system message, else without one."""
    for system in ("You answer in one line.", None):
        example = Example(messages=CONVERSATION, system=system, source="export", number=1)
        if template.encode([example], Tally())[0] is not None:
            return example
    return None


def _difference(trained: list[int], exported: list[int], tokenizer: Any) -> str:
    """A sentence where the same text is cut into other tokens. Raises RuntimeError where it is another text."""
    texts = [tokenizer.decode(ids, skip_special_tokens=False) for ids in (trained, exported)]
    place = next(
        (i for i, (a, b) in enumerate(zip(trained, exported, strict=False)) if a != b),
        min(map(len, (trained, exported))),
    )
    around = [tokenizer.convert_ids_to_tokens(ids[max(0, place - 2) : place + 3]) for ids in (trained, exported)]
    if texts[0] != texts[1]:
        raise RuntimeError(
            f"The exported chat template writes another text than was trained, from token {place} on: "
            f"trained {around[0]}, exported {around[1]}."
        )
    return (
        f"The exported chat template writes the trained text, but the tokenizer cuts it otherwise from {place} on: "
        f"trained {around[0]}, exported {around[1]}. Nothing separates the parts of this template for it."
    )
