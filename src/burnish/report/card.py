"""The model card: ``README.md`` beside the weights, which says what they are and how to load them.

In: facts about the run (``CardFacts``). Out: markdown under a YAML header that the Hugging Face hub accepts
(https://huggingface.co/docs/hub/model-cards). The card says nothing that is not known: no license unless it is given,
no base model or data set by a name that exists on one machine only, no local folder, no secret.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import CardData, ModelCard, ModelCardData
from yaml import YAMLError

import burnish
from burnish.config.secrets import has_secret_name
from burnish.report.results import write_whole

CARD_NAME = "README.md"

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_LOCAL_OPTIONS = {"output_dir", "dataset_dir", "cache_dir", "resume_from_checkpoint", "logging_dir", "config_name"}
"""Options that name a place on one machine and say nothing about the model."""
_ADAPTERS = {"lora": "A LoRA adapter"}
_FILE_ENDINGS = (".json", ".jsonl", ".csv", ".parquet", ".arrow", ".txt")


@dataclass(frozen=True)
class CardFacts:
    """Facts for a model card.

    Args:
        name: of the model: the last part of ``output_dir``.
        folder: for the commands that load it; its name if empty.
        base_model: ``model_name_or_path`` as given; "" when trained from scratch.
        datasets: names or files as given.
        stage: the name of the stage.
        method: ``finetuning_type``.
        is_adapter: whether an adapter was saved rather than the whole model.
        loads_in_peft: whether an adapter is in peft's format; one of another package may have its own.
        options: those that are not at their default.
        results: the final metrics.
        stats: a sentence per reason why rows were dropped or cut.
        has_chat_template: whether the saved tokenizer renders conversations.
        plots: what a plot shows -> the name of its file beside the card.
        stage_title: how a sentence names the stage; its name if empty.
        has_prompts: whether the stage trained responses to prompts.
        license: of the weights, where it is known.
        data: a sentence for each set.
        evaluations: a table of the evaluations, in markdown.
        unnamed: the beginning of a model without ``base_model``.
        loader: the class of transformers that loads the model; "" for one of a script's own.
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
    unnamed: str = "trained from random weights"
    folder: str = ""


def write_card(folder: str | Path, facts: CardFacts, metadata: CardData | None = None) -> Path:
    path = Path(folder) / CARD_NAME
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, card_text(facts, metadata))
    return path


def card_text(facts: CardFacts, metadata: CardData | None = None) -> str:
    """The whole card.

    Args:
        metadata: in place of ``hub_metadata(facts)``.
    """
    sections = [_opening(facts), _use(facts), _training(facts), _results(facts), _rows(facts), _versions()]
    return under_metadata(metadata or hub_metadata(facts), "\n\n".join(section for section in sections if section))


def hub_metadata(facts: CardFacts) -> ModelCardData:
    """The metadata that the hub reads."""
    base = hub_name_of(facts.base_model)
    return ModelCardData(
        library_name=_library(facts) or None, pipeline_tag="text-generation", license=facts.license or None,
        base_model=base, base_model_relation=("adapter" if facts.is_adapter else "finetune") if base else None,
        datasets=[name for name in facts.datasets if is_hub_name(name)] or None,
        tags=list(dict.fromkeys(["burnish", facts.stage, facts.method])),
    )  # fmt: skip


def under_metadata(metadata: CardData, text: str) -> str:
    """``text`` below the YAML block of its metadata."""
    return f"---\n{metadata.to_yaml()}\n---\n\n{text}\n"


def _library(facts: CardFacts) -> str:
    """The library that loads the weights; the empty string for an adapter that only its own package can load."""
    if not facts.is_adapter:
        return "transformers"
    return "peft" if facts.loads_in_peft else ""


def hub_name_of(base: str) -> str | None:
    """The hub id of a base model; of a local folder the one that its own card names, if any."""
    if is_hub_name(base):
        return base
    card = Path(base).expanduser() / CARD_NAME
    try:
        named = ModelCard.load(card).data.base_model if base and card.is_file() else None
    except (OSError, ValueError, YAMLError):
        return None
    return named if isinstance(named, str) and is_hub_name(named) else None


def is_hub_name(name: str) -> bool:
    """Return whether ``name`` is ``owner/name``, and no file or folder of this machine."""
    return bool(_HUB_ID.fullmatch(name)) and not name.endswith(_FILE_ENDINGS) and not Path(name).exists()


def _opening(facts: CardFacts) -> str:
    product = _ADAPTERS.get(facts.method, "An adapter") if facts.is_adapter else "A model"
    relation = "for" if facts.is_adapter else "made from"
    origin = f"{relation} {_shown(facts.base_model)}" if facts.base_model else facts.unnamed
    share = 100 * facts.trainable_parameters / max(facts.all_parameters, 1)
    lines = [
        f"# {facts.name}",
        f"{product} {origin}, by {facts.stage_title or facts.stage} on {_listed(facts.datasets)}. "
        f"{facts.trainable_parameters:,} of {facts.all_parameters:,} parameters were trained ({share:.3g}%).",
    ]
    lines += [f"![{shown}]({name})" for shown, name in facts.plots.items()]
    return "\n\n".join(lines)


def _shown(name: str) -> str:
    """Return a hub id as it is; of a local path only the last part, so that no folder of this machine is named."""
    return f"`{name}`" if is_hub_name(name) else f"`{Path(name).name or name}`"


def _listed(names: Sequence[str]) -> str:
    if not names:
        return "an unnamed dataset"
    *others, last = [_shown(name) for name in names]
    return f"{', '.join(others)} and {last}" if others else last


def _use(facts: CardFacts) -> str:
    if not facts.loader:
        return "## How to use it\n\nUse the script that defines its class; `model.safetensors` holds the weights."
    if not _library(facts):
        return f"## How to use it\n\nUse the package that adds finetuning_type {facts.method} to burnish."
    writes = facts.loader == "AutoModelForCausalLM"
    imports = [f"from transformers import {facts.loader}, AutoTokenizer"]
    load = [
        'folder = "."  # this folder: its path, or its name on the hub',
        "tokenizer = AutoTokenizer.from_pretrained(folder)",
    ]
    if facts.is_adapter:
        is_named = is_hub_name(facts.base_model)  # a folder of one machine is adapter_config.json's to say
        base = f'"{facts.base_model}"' if is_named else "PeftConfig.from_pretrained(folder).base_model_name_or_path"
        imports = [f"from peft import {'' if is_named else 'PeftConfig, '}PeftModel", *imports]
        load += [
            f"base = {facts.loader}.from_pretrained({base})",
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


def serving_lines(folder: str, is_adapter: bool = False, gguf: str = "") -> list[str]:
    """The commands that answer with a folder, here and elsewhere.

    Args:
        gguf: the name of a GGUF file in it.
    """
    lines = [f"burnish chat {folder}", f"burnish api {folder}"]
    if is_adapter:
        return lines
    lines += [f"vllm serve {folder}", f"python -m sglang.launch_server --model-path {folder}"]
    lines += [f"ollama create {Path(folder).name.lower()} -f {folder}/Modelfile"] if gguf else []
    return lines + ([f"llama-server -m {folder}/{gguf}"] if gguf else [])


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
    """The options of the run, as a YAML file that ``burnish train`` takes."""
    shown = {k: v for k, v in facts.options.items() if k not in _LOCAL_OPTIONS and not has_secret_name(k)}
    if not shown:
        return ""
    plain = _without_folders(json.loads(json.dumps(shown, default=str)))
    written = yaml.safe_dump(plain, sort_keys=False, allow_unicode=True, width=10_000)
    opening = "Options that differ from their defaults:"
    return f"## How it was trained\n\n{opening}\n\n```yaml\n{written}```"


def _without_folders(value: Any) -> Any:
    """Shorten absolute paths to their last part, so that no folder of this machine is named."""
    if isinstance(value, list):
        return [_without_folders(item) for item in value]
    if isinstance(value, dict):
        return {name: _without_folders(item) for name, item in value.items()}
    return Path(value).name if isinstance(value, str) and value.startswith(("/", "~/")) else value


def _results(facts: CardFacts) -> str:
    rows = [f"| {name} | {_number(value)} |" for name, value in facts.results.items()]
    every = ["", facts.evaluations.strip()] if facts.evaluations else []
    return "\n".join(["## Results", "", "| metric | value |", "|---|---|", *rows, *every]) if rows else ""


def _number(value: Any) -> str:
    if not isinstance(value, int | float):
        return str(value)
    return f"{value:,.4g}" if isinstance(value, float) and abs(value) < 1e6 else f"{value:,.0f}"


def _rows(facts: CardFacts) -> str:
    lines = [f"- {sentence}" for sentence in (*facts.data, *facts.stats)]
    title = "## Data" if facts.data else "## Data preprocessing"
    return "\n".join([title, "", *lines]) if lines else ""


def _versions() -> str:
    return f"Made with burnish {burnish.__version__}."
