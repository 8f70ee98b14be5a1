"""The model card of the Trainer classes: model, data, training, results, and how to load it.

In: a trainer, and a script's information about its model. Out: ``README.md`` with the metadata that transformers
creates for the hub, and the sections of burnish's own card. It contains known facts only and no local paths.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard
from transformers import PreTrainedModel
from transformers.modelcard import TrainingSummary, make_markdown_table

from burnish.adapters.base import trainable_summary
from burnish.adapters.peft import is_peft_model
from burnish.report.card import CardFacts, write_card
from burnish.trainer import inspection
from burnish.trainer.arguments.training import TrainingArguments
from burnish.trainer.arguments.values import plain

_OMITTED_ARGUMENTS = {
    "output_dir", "logging_dir", "run_name", "report_to", "disable_tqdm", "push_to_hub", "local_rank", "resume",
    "resume_from_checkpoint", "dataloader_pin_memory", "activation_checkpointing",
    "trackio_space_id", "project", "do_train", "do_eval", "do_predict",
}  # fmt: skip
"""Arguments that concern the machine or logging, not the model."""


_GENERATED_COLUMNS = ("input_ids", "attention_mask", "labels", "completion_mask", "assistant_masks", "seq_lengths")


def write_trainer_card(trainer: Any, folder: Path, values: Mapping[str, Any]) -> None:
    """Write ``README.md`` to ``folder``.

    Args:
        folder: the destination.
        values: arguments of ``create_model_card``: language, license, tags, model_name, finetuned_from, dataset, ...
    """
    summary = TrainingSummary.from_trainer(trainer, **values)
    if summary.dataset == [None]:  # a dataset that was created in memory has no name
        summary.dataset = summary.dataset_tags = summary.dataset_args = summary.dataset_metadata = None
    write_card(folder, _facts(trainer, summary), ModelCard(summary.to_model_card()).data)


def _facts(trainer: Any, summary: TrainingSummary) -> CardFacts:
    model = inspection.base_model(trainer.model)
    adapters = getattr(trainer.model, "peft_config", {}) if is_peft_model(trainer.model) else {}
    sets = [summary.dataset] if isinstance(summary.dataset, str) else list(summary.dataset or [])
    base: Any = summary.finetuned_from or getattr(getattr(model, "config", None), "_name_or_path", "")
    history = trainer.state.log_history
    last: dict[str, Any] = {}
    for entry in history:
        last |= {name: v for name, v in entry.items() if name.startswith(("train_", "eval_")) or name == "epoch"}
    tokenizer = trainer.processing_class
    trainable, total = trainable_summary(trainer.model)
    return CardFacts(
        name=summary.model_name or "model", base_model=base, datasets=sets, stage=trainer.card_stage,
        stage_title=trainer.card_title,
        method=", ".join(str(plain(config.peft_type)).lower() for config in adapters.values()) or "full",
        trainable_parameters=trainable, all_parameters=total, is_adapter=bool(adapters),
        options=_arguments(trainer.args) | _adapter(adapters), results=last, data=_data(trainer),
        has_chat_template=bool(getattr(tokenizer, "chat_template", None)),
        loader=_loader(model), evaluations=make_markdown_table(summary.eval_lines) if summary.eval_lines else "",
        unnamed="a model defined in the script",
    )  # fmt: skip


def _loader(model: Any) -> str:
    """The class that loads the model; "" for a script's own class."""
    if inspection.is_causal_lm(model):
        return "AutoModelForCausalLM"
    is_theirs = isinstance(model, PreTrainedModel) and type(model).__module__.startswith("transformers.")
    return type(model).__name__ if is_theirs else ""


def _arguments(args: TrainingArguments) -> dict[str, Any]:
    """The arguments that differ from their defaults."""
    shown = [name for name in args.declared if name not in _OMITTED_ARGUMENTS and "hub" not in name]
    values = {name: plain(getattr(args, name)) for name in shown}
    return {
        name: value
        for name, value in values.items()
        if isinstance(value, str | int | float | list) and value not in ([], plain(args.declared[name].default))
    }


def _adapter(adapters: Mapping[str, Any]) -> dict[str, Any]:
    """Rank, alpha, dropout and target modules of LoRA adapters, if they have them."""
    names = ("r", "lora_alpha", "lora_dropout", "target_modules", "modules_to_save")
    settings: dict[str, Any] = {}
    for config in adapters.values():
        values = {name: getattr(config, name, None) for name in names}
        settings |= {n: sorted(v) if isinstance(v, set) else v for n, v in values.items() if v not in (None, [], 0.0)}
    return settings


def _data(trainer: Any) -> list[str]:
    """A sentence for each dataset: number of rows, and columns."""
    evals = trainer.eval_dataset if isinstance(trainer.eval_dataset, dict) else {"": trainer.eval_dataset}
    sets = {"Training set": trainer.train_dataset, **{f"Evaluation set {n}".rstrip(): s for n, s in evals.items()}}
    return [f"{name}: {_size(rows)}." for name, rows in sets.items() if rows is not None]


def _size(rows: Any) -> str:
    columns = [name for name in getattr(rows, "column_names", None) or [] if name not in _GENERATED_COLUMNS]
    suffix = f" of {', '.join(columns)}" if columns else ""
    return f"{len(rows):,} rows{suffix}" if hasattr(rows, "__len__") else f"a streaming dataset{suffix}"
