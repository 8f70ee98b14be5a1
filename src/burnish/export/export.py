"""``burnish export``: merge base model and adapters into a folder that any library can load.

    plan       the options of the model, its adapters and its template; the training's file can be used
    merge      merge the adapters into the base, in order
    save       sharded safetensors, config, tokenizer with the chat template, a Modelfile for Ollama
    quantize   if export_quantization_bit is set: GPTQ or AWQ instead of full precision
    compare    render a conversation with the exported and the training's template; the ids must be equal
    upload     to the hub, if requested

Refuses, before weights are read: what ``train`` would refuse of model, adapter and template; a quantized base, which
does not support merging; a folder that is not empty.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import torch

from burnish.adapters.chain import incomplete_chain_notes
from burnish.config.errors import Problem, UserError
from burnish.config.options import RawValue, build, raise_if, specs
from burnish.data.chat.choose import check_template, configure_tokenizer, load_template_of_model
from burnish.data.chat.rendering import PROMPT, Conversation, chat_ids
from burnish.data.chat.rows import Template
from burnish.data.chat.truncate import row_length
from burnish.data.images.limits import apply_image_limits
from burnish.data.stats import DataStats
from burnish.export.gguf import check_gguf, gguf_file, write_gguf
from burnish.export.modelfile import modelfile
from burnish.export.quantized import calibration, quantize_into
from burnish.inference.images.family import load_family
from burnish.inference.loading import (
    UNLIMITED_CONTEXT,
    as_chat,
    merged_model,
    problems_of_adapters,
    readable_example,
    reward_head,
    saved_head,
    tokenizer_of,
    writes_answers,
)
from burnish.models.check import check_model
from burnish.models.export import inference_dtype, problems_of_export, upload, without_gguf
from burnish.models.load import context_length, load_config
from burnish.models.options import USED_MODEL
from burnish.models.quantization.export import without_bits
from burnish.models.quantization.quantize import quantization_of
from burnish.models.reward_files import kind_of_head, save_reward_head
from burnish.models.save import save_model, whole_or_nothing
from burnish.models.source import PROCESSOR_FILES, adapter_folders, find_source
from burnish.models.tokens import load_tokenizer
from burnish.report.card import serving_lines
from burnish.report.console import note
from burnish.run.plan.options import RunOptions
from burnish.run.plan.plan import aliases
from burnish.run.plan.unsupported import take_unsupported
from burnish.run.recovery.clearing import BackupOnOverwrite, files_of_killed_run
from burnish.utils.files import exclusive_writer_lock, report_full_disk


def export(values: Mapping[str, RawValue]) -> Path:
    """Run ``burnish export``. Returns the output folder.

    Raises:
        UserError: for errors in the user's input.
        RuntimeError: if the exported tokenizer renders another text than the training's template.
    """
    options = export_options(values)
    adapters = adapter_folders(options)
    notes = [*without_gguf(options), *without_bits(options), *incomplete_chain_notes(adapters)]
    config = load_config(options, row_length(options), notes)
    tokenizer, options = tokenizer_of(options, adapters, notes)
    head = reward_head(options, adapters, config)
    if options.export_format == "gguf":
        raise_if(check_gguf(config, tokenizer, options))
    if options.export_format == "gguf" or options.export_quantization_bit:
        raise_if([_REWARD_MODEL_FORMAT] if head is not None else [])
    raise_if(problems_of_adapters(options, config, tokenizer, adapters))
    family = load_family(options, config, tokenizer, notes)
    template = load_template_of_model(options, tokenizer, UNLIMITED_CONTEXT, family)
    template = template if head is None else template.answering_last()
    notes += configure_tokenizer(template, tokenizer)
    tokenizer.chat_template = template.jinja()
    using = calibration(options, config, tokenizer) if options.export_quantization_bit else None

    device = "cuda" if options.export_device != "cpu" and torch.cuda.is_available() else "cpu"
    if device == "cpu" and options.export_device == "cuda":
        notes.append("export_device: cuda: no GPU is available, so the CPU is used.")
    model = merged_model(options, config, tokenizer, adapters, notes, device, needs_head=head is None)
    folder = Path(options.export_dir or "")
    with (
        exclusive_writer_lock(folder),
        BackupOnOverwrite(folder, also=_OWN_FILES),
        report_full_disk(
            folder, "Free some disk space, or set export_dir to a folder on another disk. Then export again."
        ),
        whole_or_nothing(folder),
        _place_of_weights(folder, using is not None) as place,
    ):
        saving: dict[str, Any] = {"dtype": inference_dtype(options), "max_shard_size": f"{options.export_size}GB"}
        save_model(model, tokenizer, place, stop_token_ids=template.stop_token_ids(), **saving)
        if family is not None:
            files = [place / name for name in PROCESSOR_FILES if not name.startswith("video")]
            notes += apply_image_limits(files, options, options.export_image_limits)
        elif options.export_image_limits:
            notes.append('"export_image_limits" has no effect on a model without images.')
        if head is not None and (saved := saved_head(options, adapters)):
            save_reward_head(head.weights(), model, tokenizer, folder, kind_of_head(saved[1]), **saving)
        gguf = gguf_file(folder, options) if options.export_format == "gguf" else None
        if head is None and using is None:
            context, weights = context_length(cast(Any, model).config), gguf.name if gguf is not None else ""
            (folder / "Modelfile").write_text(modelfile(template, tokenizer, context, weights), encoding="utf-8")
        elif using is not None:  # Ollama does not read quantized safetensors
            del model  # a separate process loads it
            notes += quantize_into(folder, place, tokenizer, using, options)
        notes += compare_templates(folder, template, options)
        notes += write_gguf(folder, gguf, options) if gguf is not None else []
    lines = "\n  ".join(serving_lines(
        str(folder), gguf=gguf.name if gguf is not None else "", gives_scores=head is not None,
    ))  # fmt: skip
    for sentence in (*notes, f"The model is in {folder}. Next steps:\n  {lines}"):
        note(sentence)
    if options.export_hub_model_id:
        note(f"Uploaded to {upload(folder, options)}.")
    return folder


_OWN_FILES = ("*.gguf", "Modelfile", "quantize_config.json")
"""Files of an export, in addition to those that a run writes."""
_REWARD_MODEL_FORMAT = Problem(
    "a reward model cannot be exported as GGUF, GPTQ or AWQ: these formats do not store a reward head.",
    remedy="Remove export_format and export_quantization_bit to export safetensors.",
)


@contextmanager
def _place_of_weights(folder: Path, is_passing: bool) -> Iterator[Path]:
    """The folder for full-precision weights: a temporary one next to ``folder`` if they are an intermediate result."""
    if not is_passing:
        yield folder
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as place:
        yield Path(place) / "whole"


# --- plan -------------------------------------------------------------------------------------------------------------


def export_options(values: Mapping[str, RawValue]) -> RunOptions:
    """Check and build the options of an export. Training options are accepted."""
    present, problems, _ = take_unsupported(values, {**specs(RunOptions), **aliases()})
    options, wrong = build(RunOptions, present)
    problems += [*wrong, *check_template(options)]
    problems += (
        []
        if problems
        else quantized_base(options) or check_model(options, needs_head=writes_answers(options), names=USED_MODEL)
    )
    if not problems:
        folders = [find_source(options.model_name_or_path, options).folder, *adapter_folders(options)]
        problems += problems_of_export(
            options,
            [folder for folder in folders if folder is not None],
            files_of_killed_run(Path(options.export_dir or ""), _OWN_FILES),
        )
    if not problems and options.export_quantization_bit and options.export_format == "gguf":
        what = '"export_quantization_bit" applies to GPTQ and AWQ only, but "export_format" is gguf.'
        problems.append(
            Problem(
                what,
                remedy="Remove one of them. For a 4-bit GGUF file, set export_gguf_type: q4_0.",
                option=("export_quantization_bit", "export_format"),
            )
        )
    raise_if(problems)
    return options


def quantized_base(options: RunOptions) -> list[Problem]:
    """A problem if the base is quantized, or would be quantized while loading."""
    try:
        method = quantization_of(options, load_config(options))
    except UserError:
        return []  # check_model reports the reason
    if not method:
        return []
    what = "an adapter cannot be merged into it" if options.adapter_name_or_path else "it cannot be exported again"
    return [
        Problem(
            f"the base model is quantized ({method}): {what}.",
            where=str(options.model_name_or_path),
            remedy="Remove quantization_bit to merge the adapter into the full-precision model."
            if options.quantization_bit
            else "Set model_name_or_path to the original model in full precision.",
        )
    ]


# --- compare ----------------------------------------------------------------------------------------------------------


def compare_templates(folder: Path, template: Template, options: RunOptions) -> list[str]:
    """Render a conversation with the tokenizer in ``folder`` and with ``template``, and compare the ids.

    Returns:
        Notes on the result.

    Raises:
        RuntimeError: if the texts differ.
    """
    tokenizer = load_tokenizer(
        replace(options, model_name_or_path=str(folder), add_tokens=None, add_special_tokens=None)
    )
    example = readable_example(template)
    if example is None:
        return ["The template cannot render a simple test conversation, so the exported chat template was not checked."]
    row = template.encode([example], DataStats())[0]
    assert row is not None
    chat = as_chat(example)
    for trained, exported in (
        (row["input_ids"], chat_ids(tokenizer, [Conversation(chat)])[0]),
        (template.prompt(example), chat_ids(tokenizer, [Conversation(chat[:-1], parts=[PROMPT])])[0]),
    ):
        if list(trained) != list(exported):
            return [_difference(list(trained), list(exported), tokenizer)]
    length = len(row["input_ids"])
    return [f"Chat template checked: a conversation of {length} tokens has the same token ids as in training."]


def _difference(trained: list[int], exported: list[int], tokenizer: Any) -> str:
    """A sentence about equal texts with different tokens. Raises RuntimeError if the texts differ by more than the
    spaces that a tokenizer inserts before slots.
    """
    texts = [tokenizer.decode(ids, skip_special_tokens=False) for ids in (trained, exported)]
    place = next(
        (i for i, (a, b) in enumerate(zip(trained, exported, strict=False)) if a != b),
        min(map(len, (trained, exported))),
    )
    around = [tokenizer.convert_ids_to_tokens(ids[max(0, place - 2) : place + 3]) for ids in (trained, exported)]
    if texts[0].replace(" ", "") != texts[1].replace(" ", ""):
        raise RuntimeError(
            f"The output of the exported chat template differs from the training text at token {place}: "
            f"training {around[0]}, exported {around[1]}."
        )
    spaces = " except for spaces" if texts[0] != texts[1] else ""
    return (
        f"The output of the exported chat template equals the training text{spaces}, but the tokens differ at token "
        f"{place}: training {around[0]}, exported {around[1]}. The template has no separators between its parts, so "
        "tokens can merge across their boundaries."
    )
