"""The model card: ``README.md`` next to the weights, which describes the model and how to load it.

It is markdown below a YAML header that the Hugging Face Hub accepts (https://huggingface.co/docs/hub/model-cards). The
card contains only known facts: no license unless one is given, no base model or dataset that exists on one machine
only, no local folder, no secret.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from yaml import YAMLError

import burnish
from burnish.config.secrets import has_secret_name, without_secrets
from burnish.report.results import write_text_atomically

if TYPE_CHECKING:
    from huggingface_hub import CardData, ModelCardData

CARD_NAME = "README.md"

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_LOCAL_OPTIONS = {"output_dir", "dataset_dir", "cache_dir", "resume_from_checkpoint", "logging_dir", "config_name"}
"""Options that name a local path and say nothing about the model."""
_VISION_LOADER = "AutoModelForImageTextToText"
_ADAPTERS = {"lora": "A LoRA adapter"}
_FILE_ENDINGS = (".json", ".jsonl", ".csv", ".parquet", ".arrow", ".txt")


@dataclass(frozen=True)
class CardFacts:
    """Facts for a model card.

    Args:
        name: name of the model: the last part of ``output_dir``.
        base_model: ``model_name_or_path``; "" when trained from scratch.
        datasets: names or files.
        stage: name of the stage.
        method: ``finetuning_type``.
        trainable_parameters: number of trained parameters.
        all_parameters: number of all parameters.
        is_adapter: whether an adapter was saved instead of the whole model.
        loads_in_peft: whether the adapter has PEFT's format; adapters of other packages may have their own.
        options: options that differ from their defaults.
        results: final metrics.
        stats: sentences about dropped and truncated rows.
        has_chat_template: whether the saved tokenizer has a chat template.
        plots: description -> file name of a plot in the same folder.
        license: license of the weights, if known.
        data: a sentence per dataset.
        evaluations: table of evaluations, in markdown.
        loader: transformers class that loads the model; "" for a class that a script defines.
        stage_title: description of the stage. Default: its name.
        has_prompts: whether the stage trained responses to prompts.
        unnamed: text used in place of a missing ``base_model``.
        folder: folder shown in the commands. Default: the name.
        merged_adapters: adapters that were merged into the base model before training, in order.
        packages: name and version of the packages that extend burnish in this run.
        gives_scores: whether it is a reward model, whose head only burnish reads.
    """

    name: str
    base_model: str
    datasets: Sequence[str]
    stage: str
    method: str
    trainable_parameters: int
    all_parameters: int
    is_adapter: bool = False
    loads_in_peft: bool = True
    options: Mapping[str, Any] = field(default_factory=dict)
    results: Mapping[str, float] = field(default_factory=dict)
    stats: Sequence[str] = ()
    has_chat_template: bool = True
    plots: Mapping[str, str] = field(default_factory=dict)
    license: str = ""
    data: Sequence[str] = ()
    evaluations: str = ""
    loader: str = "AutoModelForCausalLM"
    stage_title: str = ""
    has_prompts: bool = True
    unnamed: str = "random weights"
    folder: str = ""
    merged_adapters: Sequence[str] = ()
    packages: Sequence[str] = ()
    gives_scores: bool = False


def write_card(folder: str | Path, facts: CardFacts, metadata: CardData | None = None) -> Path:
    path = Path(folder) / CARD_NAME
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text_atomically(path, without_secrets(card_text(facts, metadata)))
    return path


def card_text(facts: CardFacts, metadata: CardData | None = None) -> str:
    """Return the whole card.

    Args:
        facts: facts about the model.
        metadata: replaces ``hub_metadata(facts)``.
    """
    sections = [
        _opening(facts),
        _usage_section(facts),
        _training(facts),
        _results(facts),
        _rows(facts),
        _versions(facts),
    ]
    return with_metadata_header(
        metadata or hub_metadata(facts), "\n\n".join(section for section in sections if section)
    )


def hub_metadata(facts: CardFacts) -> ModelCardData:
    """Return the metadata that the Hub reads."""
    from huggingface_hub import ModelCardData

    base = hub_name_of(facts.base_model)
    task = "image-text-to-text" if facts.loader == _VISION_LOADER else "text-generation"
    return ModelCardData(
        library_name=_library(facts) or None, pipeline_tag=None if facts.gives_scores else task,
        license=facts.license or None,
        base_model=base, base_model_relation=("adapter" if facts.is_adapter else "finetune") if base else None,
        datasets=[name for name in facts.datasets if is_hub_name(name)] or None,
        tags=list(dict.fromkeys(["burnish", facts.stage, facts.method])),
    )  # fmt: skip


def with_metadata_header(metadata: CardData, text: str) -> str:
    """Return ``text`` below a YAML block with its metadata."""
    return f"---\n{metadata.to_yaml()}\n---\n\n{text}\n"


def _library(facts: CardFacts) -> str:
    """Return the library that loads the weights; "" for an adapter that only its own package can load."""
    if not facts.is_adapter:
        return "transformers"
    return "peft" if facts.loads_in_peft else ""


def hub_name_of(base: str) -> str | None:
    """Return the hub id of a base model. For a local folder, it is the base model named in its card, if any."""
    if is_hub_name(base):
        return base
    from huggingface_hub import ModelCard

    card = Path(base).expanduser() / CARD_NAME
    try:
        named = ModelCard.load(card).data.base_model if base and card.is_file() else None
    except (OSError, ValueError, YAMLError):
        return None
    return named if isinstance(named, str) and is_hub_name(named) else None


def is_hub_name(name: str) -> bool:
    """Return whether ``name`` has the form ``owner/name`` and is not a local file or folder."""
    return bool(_HUB_ID.fullmatch(name)) and not name.endswith(_FILE_ENDINGS) and not Path(name).exists()


def _opening(facts: CardFacts) -> str:
    product = _ADAPTERS.get(facts.method, "An adapter") if facts.is_adapter else "A model"
    origin = _public_form(facts.base_model) if facts.base_model else facts.unnamed
    made = f"for {origin}, created by" if facts.is_adapter else f"created from {origin} by"
    share = 100 * facts.trainable_parameters / max(facts.all_parameters, 1)
    lines = [
        f"# {facts.name}",
        f"{product} {made} {facts.stage_title or facts.stage} on {_names_in_words(facts.datasets)}. "
        f"{facts.trainable_parameters:,} of {facts.all_parameters:,} parameters were trained ({share:.3g}%).",
    ]
    lines += [f"![{shown}]({name})" for shown, name in facts.plots.items()]
    return "\n\n".join(lines)


def _public_form(name: str) -> str:
    """Return a hub id unchanged, but only the last part of a local path, so that no local folder is published."""
    return f"`{name}`" if is_hub_name(name) else f"`{Path(name).name or name}`"


def _names_in_words(names: Sequence[str]) -> str:
    if not names:
        return "an unnamed dataset"
    return _listed([_public_form(name) for name in names])


def _listed(words: Sequence[str]) -> str:
    *others, last = words
    return f"{', '.join(others)} and {last}" if others else last


def _usage_section(facts: CardFacts) -> str:
    if not facts.loader:
        return (
            "## How to use it\n\nUse the script that defines the model class; `model.safetensors` contains the weights."
        )
    if not _library(facts):
        return f"## How to use it\n\nUse the package that adds finetuning_type {facts.method} to burnish."
    if facts.gives_scores:
        served = serving_lines(facts.folder or facts.name, gives_scores=True)
        return "\n".join(["## How to use it", "", "burnish returns the scores:", "", "```sh", *served, "```"])
    writes = facts.loader in ("AutoModelForCausalLM", _VISION_LOADER)
    imports = [f"from transformers import {facts.loader}, AutoTokenizer"]
    load = [
        'folder = "."  # path of this folder, or its ID on the Hub',
        "tokenizer = AutoTokenizer.from_pretrained(folder)",
    ]
    if facts.is_adapter:
        is_named = is_hub_name(facts.base_model)  # otherwise adapter_config.json has the local path
        base = f'"{facts.base_model}"' if is_named else "PeftConfig.from_pretrained(folder).base_model_name_or_path"
        imports = [f"from peft import {'' if is_named else 'PeftConfig, '}PeftModel", *imports]
        load += [
            f"base = {facts.loader}.from_pretrained({base})",
            *(
                f'base = PeftModel.from_pretrained(base, "{_public_name(name)}").merge_and_unload()  # as in training'
                for name in facts.merged_adapters
            ),
            "model = PeftModel.from_pretrained(base, folder)",
        ]
    else:
        load.append(f"model = {facts.loader}.from_pretrained(folder)")
    code = [*imports, "", *load, *(["", *_generate(facts.has_prompts and facts.has_chat_template)] if writes else [])]
    if not writes:
        return "\n".join(["## How to use it", "", "```python", *code, "```"])
    served = serving_lines(facts.folder or facts.name, facts.is_adapter)
    lines = ["## How to use it", "", "```python", *code, "```"]
    return "\n".join([*lines, "", "In the terminal, and as a server:", "", "```sh", *served, "```"])


def serving_lines(folder: str, is_adapter: bool = False, gguf: str = "", gives_scores: bool = False) -> list[str]:
    """Return the commands that use a model folder and serve it, with burnish and other programs.

    Args:
        folder: folder of the model.
        is_adapter: whether the folder contains an adapter.
        gguf: name of a GGUF file in the folder, or "".
        gives_scores: whether it is a reward model, whose head only burnish reads.
    """
    quoted = shlex.quote(folder)
    if gives_scores:
        return [f"burnish score {quoted} dataset=FILE", f"burnish api {quoted}"]
    lines = [f"burnish chat {quoted}", f"burnish api {quoted}"]
    if is_adapter:
        return lines
    lines += [f"vllm serve {quoted}", f"python -m sglang.launch_server --model-path {quoted}"]
    if gguf:
        name, modelfile = shlex.quote(Path(folder).name.lower()), shlex.quote(f"{folder}/Modelfile")
        lines += [f"ollama create {name} -f {modelfile}", f"llama-server -m {shlex.quote(f'{folder}/{gguf}')}"]
    return lines


def _public_name(folder: str) -> str:
    """Return the name under which the card mentions an adapter: its ID if ``folder`` is in the cache of the Hub
    (``models--OWNER--NAME/snapshots/REVISION``), else its last part, with the folder of the run for a checkpoint."""
    parts = Path(folder).parts
    if len(parts) > 2 and parts[-2] == "snapshots" and parts[-3].startswith("models--"):
        return parts[-3].removeprefix("models--").replace("--", "/", 1)
    return "/".join(parts[-2:] if parts[-1].startswith("checkpoint-") else parts[-1:])


def _generate(is_chat: bool) -> list[str]:
    inputs = (
        [
            'messages = [{"role": "user", "content": "Hello"}]',
            "inputs = tokenizer.apply_chat_template(",
            '    messages, add_generation_prompt=True, return_tensors="pt", return_dict=True',
            ")",
        ]
        if is_chat
        else ['inputs = tokenizer("Once upon a time", return_tensors="pt")']
    )
    return [
        *inputs,
        "output = model.generate(**inputs, max_new_tokens=100)",
        'print(tokenizer.decode(output[0][inputs["input_ids"].shape[1] :], skip_special_tokens=True))',
    ]


def _training(facts: CardFacts) -> str:
    """Return the section with the options of the run, as YAML for ``burnish train``."""
    shown = {k: v for k, v in facts.options.items() if k not in _LOCAL_OPTIONS and not has_secret_name(k)}
    if not shown:
        return ""
    plain = _without_folders(json.loads(json.dumps(shown, default=str)))
    written = yaml.safe_dump(plain, sort_keys=False, allow_unicode=True, width=10_000)
    opening = "Options that differ from their defaults:"
    return f"## How it was trained\n\n{opening}\n\n```yaml\n{written}```"


def _without_folders(value: Any) -> Any:
    """Shorten local paths to their last part, so that no local folder is published."""
    if isinstance(value, list):
        return [_without_folders(item) for item in value]
    if isinstance(value, dict):
        return {name: _without_folders(item) for name, item in value.items()}
    if not isinstance(value, str) or "/" not in value:
        return value
    is_local = value.startswith(("/", "~", "./", "../")) or os.path.exists(value)
    return Path(value).name if is_local else value


def _results(facts: CardFacts) -> str:
    rows = [f"| {name} | {_number(value)} |" for name, value in facts.results.items()]
    tables = ["\n".join(["| metric | value |", "|---|---|", *rows])] if rows else []
    tables += [facts.evaluations.strip()] if facts.evaluations else []
    return "\n\n".join(["## Results", *tables]) if tables else ""


def _number(value: Any) -> str:
    if not isinstance(value, int | float):
        return str(value)
    return f"{value:,.4g}" if isinstance(value, float) and abs(value) < 1e6 else f"{value:,.0f}"


def _rows(facts: CardFacts) -> str:
    lines = [f"- {sentence}" for sentence in (*facts.data, *facts.stats)]
    title = "## Data" if facts.data else "## Data preprocessing"
    return "\n".join([title, "", *lines]) if lines else ""


def _versions(facts: CardFacts) -> str:
    return f"Made with {_listed([f'burnish {burnish.__version__}', *facts.packages])}."
