"""End of a run: write the model, final evaluation, predictions, results and plots to ``output_dir``."""

from __future__ import annotations

import math
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from torch import nn

from burnish.adapters.base import ModelState
from burnish.adapters.chain import previously_merged
from burnish.checkpoint.checkpoint import output_folder
from burnish.config.errors import NotSavedError
from burnish.loop.best import eval_prefix
from burnish.loop.loop import Loop, TrainOutput
from burnish.models.load import auto_class
from burnish.models.save import save_model
from burnish.parallel.precision import full_eval_dtype, name_of
from burnish.report.card import CardFacts, write_card
from burnish.report.console import note, warn
from burnish.report.options import counts_tokens
from burnish.report.plots import TRAINING_LOSS, TRAINING_REWARDS, plot_history, plot_margins
from burnish.report.results import save_metrics, save_state
from burnish.run.plan.checks import evaluates
from burnish.run.plan.options import RunOptions
from burnish.run.plan.plan import Plan
from burnish.run.plan.resources import counts_of
from burnish.run.predictions.predict import predict_all
from burnish.run.prepare import Prepared
from burnish.run.recovery.failure import failure_in_words
from burnish.run.recovery.fingerprints import packages_used, post_training_options
from burnish.run.recovery.resume import write_finished
from burnish.run.reward_heads import save_head

P = ParamSpec("P")
T = TypeVar("T")


def finish(run: Loop, plan: Plan, prepared: Prepared, output: TrainOutput | None) -> dict[str, float]:
    """Write the model, the results and the plots to ``output_dir``, and return the metrics.

    Args:
        prepared: output of ``prepare``.
        output: result of training; None if nothing was trained.
    """
    options, folder, is_first = plan.options, output_folder(plan.options), run.parallel.rank == 0
    results: dict[str, float] = {}
    run.set_training_mode(False)  # a schedule-free optimizer has different weights for inference than for training
    if output is not None and (is_first or run.parallel.is_sharded):
        with checkpoint_on_error(run):
            write_trained_model(run, prepared, folder)
    reports = Reports(run, is_of_model=output is not None)
    if output is not None and is_first:
        results |= {**output.metrics, "epoch": run.state.epoch}
        if counts_tokens(options):
            results["num_input_tokens_seen"] = run.state.num_input_tokens_seen
        reports.write(save_metrics, "train", results, folder)
    is_cast = (run.eval_sets or options.do_predict) and cast_for_evaluation(run.model, options)
    if run.eval_sets and evaluates(options):
        last = {} if is_cast else last_evaluation(run, options)
        losses = last or run.evaluate()
        metrics = {**losses, **perplexities(losses, run, options), "epoch": run.state.epoch}
        if is_first:
            reports.write(save_metrics, "eval", metrics, folder)
        results |= metrics
    margins = margins_of(run) if options.plot_loss and output is not None else {}
    if options.do_predict:
        results |= predict_all(run, prepared, plan)
    if is_first and prepared.rows.is_streamed:  # its rows were encoded during training
        prepared.stats.merge(prepared.rows.statistics())
        for sentence in prepared.stats.sentences():
            warn(sentence)
    if is_first and output is not None:
        reports.write(save_state, run.state, folder)
        plots = reports.write(draw_plots, run, options, margins) or {}
        reports.write(describe, run, plan, prepared, results, plots)
        reports.raise_if_missing()
        reports.write(write_finished, folder, run.state, prepared.fingerprints(), post_training_options(options))
        reports.raise_if_missing()
        note(output_message(folder))
    return results


def write_trained_model(run: Loop, prepared: Prepared, folder: Path) -> None:
    """Write the model or adapter, with tokenizer and reward head.

    If the model is sharded, all ranks must call this; rank 0 writes.
    """
    state, parallel = run.parts["model"].held, run.parallel
    assert isinstance(state, ModelState)
    is_adapter = not state.adapter.saves_whole_model
    parallel.reshard(run.model)  # after an evaluation some weights are still gathered
    save_model(
        state.model, prepared.tokenizer, folder, adapter=state.adapter if is_adapter else None,
        stop_token_ids=prepared.template.stop_token_ids(), whole=parallel.full_tensor if parallel.is_sharded else None,
        writes=parallel.rank == 0,
    )  # fmt: skip
    save_head(run.objective, state.model, prepared.tokenizer, folder, is_adapter=is_adapter, parallel=parallel)


_LISTED_FILES = ("*model*.safetensors", "README.md", TRAINING_LOSS, TRAINING_REWARDS, "generated_predictions.jsonl")


def output_message(folder: Path) -> str:
    """Return a message with the output folder and its most important files."""
    files = [path.name for pattern in _LISTED_FILES for path in sorted(folder.glob(pattern))]
    more = f" and {len(files) - 4} more" if len(files) > 5 else ""
    return f"Written to {folder}: {', '.join(files[:4] if more else files)}{more}."


def next_steps(folder: Path, gives_scores: bool) -> list[str]:
    """Return the commands that use a trained model, or a reward model. None can load the adapter of another package."""
    if not any((folder / name).is_file() for name in ("config.json", "adapter_config.json")):
        return []
    place = shlex.quote(str(folder))
    first = f"burnish score {place} dataset=FILE" if gives_scores else f"burnish chat {place}"
    return [first, f"burnish api {place}"]


@contextmanager
def checkpoint_on_error(run: Loop) -> Iterator[None]:
    """Save a checkpoint if the ``with`` block fails to write the model, so that the same command can retry from it.

    The error is raised again.
    """
    is_written = False
    try:
        yield
        is_written = True
    finally:
        is_kept = run.checkpoints.path(run.state.global_step).is_dir()
        if not (is_written or is_kept) and run.parallel.world_size == 1:  # other ranks would not take part in saving
            run.set_training_mode(True)
            run.save()
            run.checkpoints.wait()


class Reports:
    """Writes the reports of a run whose model is already saved. A report that fails does not prevent the others.

    Args:
        is_of_model: false if nothing was trained. The reports are then the result, and a failure is raised at once.
    """

    def __init__(self, run: Loop, is_of_model: bool) -> None:
        self._run, self._is_of_model = run, is_of_model
        self._failures: list[OSError] = []

    def write(self, report: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
        """Call ``report`` and return its result, or None if it could not be written."""
        try:
            return report(*args, **kwargs)
        except OSError as error:
            if not self._is_of_model or failure_in_words(error, None) is None:
                raise
            self._failures.append(error)
            return None

    def raise_if_missing(self) -> None:
        """Raise NotSavedError for the first report that could not be written."""
        if not self._failures:
            return
        checkpoints, step = self._run.checkpoints, self._run.state.global_step
        failure = failure_in_words(self._failures[0], str(checkpoints.folder))
        assert failure is not None
        can_go_on = checkpoints.path(step).is_dir()  # resuming from it needs no step and writes what is missing
        remedy = failure.remedy if can_go_on else f"{failure.remedy.partition(', then ')[0].rstrip('.')}."
        why = f'The model in "{checkpoints.folder}" is complete and fully trained.'
        raise NotSavedError(replace(failure, why=why, remedy=remedy)) from self._failures[0]


def cast_for_evaluation(model: nn.Module, options: RunOptions) -> bool:
    """Convert the weights in place to the dtype that ``bf16_full_eval`` or ``fp16_full_eval`` requests, if any.

    Returns:
        Whether one of them is set.
    """
    dtype = full_eval_dtype(options)
    if dtype is not None:
        nn.Module.to(model, dtype)  # transformers' own ``to`` rejects quantized models, whose packed weights stay as is
        note(f"Evaluating with weights in {name_of(dtype)}.")
    return dtype is not None


def perplexities(metrics: Mapping[str, float], run: Loop, options: RunOptions) -> dict[str, float]:
    """Return the perplexity of each evaluation set in pretraining, ``exp`` of its loss; empty for other stages."""
    if options.stage != "pt":
        return {}
    prefixes = [eval_prefix(name) for name in run.eval_sets]
    largest = math.log(sys.float_info.max)
    losses = {prefix: metrics[f"{prefix}_loss"] for prefix in prefixes}
    return {f"{prefix}_perplexity": math.inf if loss > largest else math.exp(loss) for prefix, loss in losses.items()}


def last_evaluation(run: Loop, options: RunOptions) -> dict[str, float]:
    """Return the metrics of an evaluation after the last step; empty if the weights have changed since."""
    if options.load_best_model_at_end and run.state.best_global_step != run.state.global_step:
        return {}
    entries = [entry for entry in run.state.log_history if entry["step"] == run.state.global_step]
    metrics = {name: value for entry in entries for name, value in entry.items() if name.startswith("eval_")}
    is_whole = all(f"{eval_prefix(name)}_loss" in metrics for name in run.eval_sets)
    return metrics if is_whole else {}


def margins_of(run: Loop) -> dict[str, list[float]]:
    """Return the reward margins of pairs by evaluation set, or those of the training set if there is none."""
    margins = getattr(run.objective, "margins", None)
    if margins is None:
        return {}
    by_set = {name or "evaluation": margins.of(batches) for name, batches in run.eval_sets.items()}
    by_set = by_set if any(by_set.values()) else {"training": margins.of(None)}
    of_ranks: list[dict[str, list[float]]] = run.parallel.gather_objects(by_set)
    return {name: [margin for of_rank in of_ranks for margin in of_rank[name]] for name in by_set}


def draw_plots(run: Loop, options: RunOptions, margins: Mapping[str, list[float]]) -> dict[str, str]:
    """Plot the loss, rewards and reward margins. Returns description -> file name."""
    folder = output_folder(options)
    history = run.state.log_history
    plots = plot_history(history, folder, folder.name, run.eval_sets) if options.plot_loss else []
    shown = {TRAINING_LOSS: "Training loss", TRAINING_REWARDS: "Rewards"}
    plotted = [(shown[path.name], path) for path in plots if path.name in shown]
    plotted += [("Reward margins of pairs", path) for path in plot_margins(margins, folder, folder.name)]
    return {what: path.name for what, path in plotted}


def describe(run: Loop, plan: Plan, prepared: Prepared, results: Mapping[str, float], plots: Mapping[str, str]) -> None:
    """Write the model card."""
    options, folder = plan.options, output_folder(plan.options)
    trained: Any = run.parts["model"].held
    trainable, total = counts_of(trained.model, prepared.sizes)
    write_card(
        folder,
        CardFacts(
            name=folder.resolve().name, folder="" if folder.is_absolute() else str(folder),
            base_model="" if options.train_from_scratch else options.model_name_or_path or "",
            datasets=[str(name) for name in options.dataset or []],
            stage=options.stage, stage_title=prepared.objective.title,
            has_prompts=prepared.objective.has_prompts,
            method=options.finetuning_type, trainable_parameters=trainable, all_parameters=total,
            is_adapter=not trained.adapter.saves_whole_model,
            loads_in_peft=(folder / "adapter_config.json").is_file(),
            options={spec.name: value for spec, value, _ in plan.non_default_options()}, results=results,
            stats=prepared.stats.sentences(),
            has_chat_template=bool(prepared.tokenizer.chat_template),
            plots=plots, merged_adapters=previously_merged(folder),
            packages=packages_used(options),
            loader=auto_class(prepared.config).__name__, gives_scores=not prepared.objective.uses_lm_head,
        ),
    )  # fmt: skip
