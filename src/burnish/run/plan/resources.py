"""Memory and disk space that a run needs, compared with what the machine has.

The model is created without weights and with its adapter attached, so that its parameters can be counted exactly.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from burnish.adapters.base import ModelAdapter, trainable_summary
from burnish.checkpoint.checkpoint import output_folder
from burnish.config.errors import Problem
from burnish.kernels.cross_entropy import logits_bytes
from burnish.loop.schedule import StepPlan, steps_of
from burnish.losses.base import OBJECTIVES
from burnish.models.quantization.quantize import quantization_method_of
from burnish.optim.builtin import Turns, create_optimizer, keeps_load_precision, planned_turns
from burnish.parallel.precision import autocast_dtype, frozen_dtype, loaded_dtype, name_of
from burnish.parallel.selection import device_of
from burnish.report.pace import format_count
from burnish.run.plan.checks import trains
from burnish.run.plan.memory import (
    DecoderShape,
    Formats,
    Term,
    disk_bytes,
    dora_term,
    memory_terms,
    shown_bytes,
    tower_term,
)
from burnish.run.plan.options import RunOptions
from burnish.run.recovery.failure import available_bytes
from burnish.utils.files import nearest_existing


@dataclass(frozen=True)
class Sizes:
    """Parameter counts of a run's model, counted without its weights.

    Args:
        class_name: class of the model.
        base: parameters of the model as loaded.
        total: parameters including the adapter.
        trained: parameters trained in this run.
        saves_whole_model: whether the whole model is saved instead of an adapter.
        turns: schedule of an optimizer that trains a part of the parameters at a time.
    """

    class_name: str
    base: int
    total: int
    trained: int
    saves_whole_model: bool
    turns: Turns | None = None

    @property
    def active(self) -> int:
        """Maximum number of parameters that have gradients at a time."""
        return self.trained if self.turns is None else self.turns.active


def sizes_of(adapter: ModelAdapter, shapes: nn.Module, options: RunOptions, max_steps: int = 0) -> Sizes:
    """Attach ``adapter`` to ``shapes``, the model on the meta device, and count its parameters."""
    copies = trained_dtype(options, shapes.config) != torch.float32
    name, base = type(shapes).__name__, trainable_summary(shapes)[1]
    with torch.device("meta"):
        model = adapter.attach(shapes)
    trained, total = trainable_summary(model)
    of_each = {name: p.numel() for name, p in model.named_parameters() if p.requires_grad}
    turns = planned_turns(of_each, options, max_steps, copies) if trains(options) else None
    return Sizes(name, base, total, trained if turns is None else turns.trained, adapter.saves_whole_model, turns)


def counts_of(model: nn.Module, sizes: Sizes) -> tuple[int, int]:
    """Return the number of parameters of a loaded model that train in the run, and of all its parameters."""
    trained, total = trainable_summary(model)
    return (trained if sizes.turns is None else sizes.turns.trained), total


def trained_dtype(options: RunOptions, config: Any) -> torch.dtype:
    """Return the dtype of the trained weights."""
    if options.pure_bf16:
        return torch.bfloat16
    return storage_dtype(options, config) if keeps_load_precision(options) else torch.float32


def storage_dtype(options: RunOptions, config: Any) -> torch.dtype:
    """Return the dtype in which the model's own weights are loaded, including those converted to float32 later."""
    if options.pure_bf16:
        return torch.bfloat16
    raised = trains(options) and options.finetuning_type == "full" and not keeps_load_precision(options)
    return loaded_dtype(config) if raised else frozen_dtype(options, device_of(options), loaded_dtype(config))


def load_dtype(options: RunOptions, config: Any, is_frozen: bool = False) -> torch.dtype | str:
    """Return the ``dtype`` argument for loading weights; "auto" if they keep the dtype of their files.

    Args:
        options: options of the run.
        config: config of the model.
        is_frozen: whether all weights are frozen, as in a reference model.
    """
    in_files = loaded_dtype(config)
    stored = frozen_dtype(options, device_of(options), in_files) if is_frozen else storage_dtype(options, config)
    is_kept = stored == in_files or (
        quantization_method_of(config) and stored == torch.float32
    )  # its kernels choose their dtype
    return "auto" if is_kept else stored


def formats_in_words(
    in_files: torch.dtype, frozen: torch.dtype, trained: torch.dtype | None, saved: torch.dtype | None
) -> Iterator[str]:
    """Return a note if weights are converted to another dtype, otherwise an empty list.

    Args:
        in_files: dtype in the files.
        frozen: dtype in memory of the frozen weights, or of all if none are frozen.
        trained: dtype of the trained weights, or None.
        saved: dtype of a saved model, or None for an adapter.
    """
    names = [name_of(dtype) for dtype in (in_files, frozen, trained or frozen, saved or in_files)]
    if len({in_files, frozen, saved or in_files}) == 1:
        return
    text = f"Weights: {names[0]} in the files, {names[1]} in memory"
    text += f", {names[2]} if trainable" if trained not in (None, frozen) else ""
    yield f"{text}; the model is saved in {names[3]}." if saved is not None else f"{text}."


def formats_in(model: nn.Module) -> tuple[torch.dtype, torch.dtype | None]:
    """Return the dtypes of a model's frozen weights (of all if none are frozen) and of its trained weights."""
    of_kind = {p.requires_grad: p.dtype for p in reversed(list(model.parameters())) if p.is_floating_point()}
    return of_kind.get(False, of_kind.get(True, torch.float32)), of_kind.get(True)


def compute_dtype(options: RunOptions, config: Any) -> torch.dtype:
    """Return the dtype of the forward pass: autocast's, otherwise that of most weights."""
    is_mostly_trained = options.pure_bf16 or (options.finetuning_type == "full" and trains(options))
    default = trained_dtype(options, config) if is_mostly_trained else storage_dtype(options, config)
    return autocast_dtype(options, device_of(options)) or default


def formats_of(options: RunOptions, config: Any, sizes: Sizes, model: nn.Module | None = None) -> Formats:
    """Return the bytes per number in this run. It runs an optimizer step, so it should be called once.

    Args:
        options: options of the run.
        config: config of the model.
        sizes: parameter counts.
        model: model on the meta device, as left by ``sizes_of``; the optimizer state is then counted exactly.
    """
    compute, trained = compute_dtype(options, config), trained_dtype(options, config)
    frozen = options.quantization_bit / 8 if options.quantization_bit else compute.itemsize
    frozen = trained.itemsize if sizes.turns else frozen  # it is trained at another time
    if sizes.turns is not None:
        moment_bytes = sizes.turns.kept_bytes / sizes.turns.active
    else:
        counted = None if model is None else _state_without_weights(options, model, trained)
        moment_bytes = _moment_bytes(options, config, trained) if counted is None else counted / max(1, sizes.trained)
    return Formats(frozen, trained.itemsize, compute.itemsize, moment_bytes)


def _state_without_weights(options: RunOptions, model: nn.Module, dtype: torch.dtype) -> int | None:
    """Return the bytes of the optimizer state of a model on the meta device; None if its step needs real values.

    Those of AdamW are computed, because a step on the meta device takes a millisecond per parameter.
    """
    moved = [p for p in model.parameters() if p.requires_grad]
    for parameter in moved:
        parameter.data = parameter.data.to(dtype)
    try:
        optimizer = create_optimizer(model.named_parameters(), model, options)
        if type(optimizer) is torch.optim.AdamW:
            return sum(_moments_of_adamw(group) for group in optimizer.param_groups)
        if callable(switch := getattr(optimizer, "train", None)):
            switch()
        for parameter in moved:
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    except (RuntimeError, NotImplementedError):
        return None
    finally:
        for parameter in moved:
            parameter.grad = None
    return _bytes_of(optimizer)


def _moments_of_adamw(group: Mapping[str, Any]) -> int:
    """Return the bytes of two moments per parameter, or three with amsgrad."""
    weights: int = sum(parameter.nbytes for parameter in group["params"])
    return (3 if group["amsgrad"] else 2) * weights


def _bytes_of(optimizer: Any) -> int:
    tensors = {id(tensor): tensor for tensor in _tensors_in(optimizer.state_dict())}
    return sum(tensor.nbytes for tensor in tensors.values() if tensor.numel() > 1)


def _tensors_in(state: Any) -> Iterator[torch.Tensor]:
    if isinstance(state, torch.Tensor):
        yield state
    elif isinstance(state, Mapping | list | tuple):
        for value in state.values() if isinstance(state, Mapping) else state:
            yield from _tensors_in(value)


def _moment_bytes(options: RunOptions, config: Any, dtype: torch.dtype) -> float:
    """Return the bytes of optimizer state per trained parameter, measured by a step on a small matrix."""
    width = min(DecoderShape.of(config.get_text_config()).hidden, 512)
    weight = nn.Linear(width, width, bias=False, dtype=dtype)
    model = nn.ModuleDict({"layers": nn.ModuleList([weight])})  # a layer's matrix, for optimizers that check names
    of_any_name = replace(options, galore_target=["all"], apollo_target=["all"], optim_target_modules=None)
    optimizer = create_optimizer(model.named_parameters(), model, of_any_name)
    if callable(switch := getattr(optimizer, "train", None)):
        switch()
    weight.weight.grad = torch.zeros_like(weight.weight)
    optimizer.step()
    return round(_bytes_of(optimizer) / weight.weight.numel(), 2)


def memory_of(
    options: RunOptions, config: Any, sizes: Sizes, formats: Formats, tokens: int, patches: int = 0
) -> list[Term]:
    """Return the memory of the run as a list of terms. ``tokens`` and ``patches`` are of the largest micro-batch."""
    shape = DecoderShape.of(config.get_text_config())
    has_dora = options.finetuning_type == "lora" and options.use_dora
    keeps_casts = device_of(options).type != "cpu" or options.torch_compile or not options.patches
    terms = memory_terms(
        sizes.total,
        sizes.active if trains(options) else 0,
        shape,
        formats,
        tokens,
        logits_term(options, shape, tokens, formats.compute),
        learns=trains(options),
        copies=keeps_casts,  # else ``kernels.cpu.cast_linear`` keeps none
        recompute=options.gradient_checkpointing,
        selective=bool((options.gradient_checkpointing_kwargs or {}).get("selective")),
        offload=options.activation_offloading and device_of(options).type != "cpu",
        adapter=dora_term(shape, tokens, formats.compute) if has_dora else None,
    )
    if options.finetuning_type in ("peft", "oft") and trains(options):
        besides = f"; excludes activations of the {options.finetuning_type} method"
        terms = [replace(one, reason=one.reason + besides) if one.name == "activations" else one for one in terms]
    if patches:
        is_trained = trains(options) and not options.freeze_vision_tower
        terms.append(tower_term(config.vision_config, patches, formats.compute, is_trained))
    return terms


def logits_term(options: RunOptions, shape: DecoderShape, tokens: int, compute_bytes: int) -> Term:
    """Return the term of the logits that are in memory at a time, if every token is trained."""
    if options.fused_loss is False:  # all logits, and in float32 their log-probabilities and gradients
        num_bytes = tokens * shape.vocabulary * (compute_bytes + 8)
        return Term("logits", num_bytes, f"{tokens:,} tokens x vocabulary of {shape.vocabulary:,} (fused_loss: false)")
    num_bytes = logits_bytes(tokens, shape.vocabulary, device_of(options))
    return Term("logits", num_bytes, "computed in chunks by the loss")


def rows_of_batch(options: RunOptions) -> int:
    """Return the rows of a micro-batch, of evaluation if the run does not train."""
    return int(options.per_device_train_batch_size if trains(options) else options.per_device_eval_batch_size)


def tokens_of_largest_batch(rows: Sequence[Any], options: RunOptions) -> int:
    """Return an upper bound of the tokens of a micro-batch: the longest rows of the set together."""
    lengths = getattr(rows, "lengths", None) or [len(row["input_ids"]) for row in rows]
    if OBJECTIVES[options.stage].records == "prompts":  # each is trained with a generated completion
        lengths = [max(lengths, default=0) + options.max_completion_length] * rows_of_batch(options)
    largest = sorted(lengths, reverse=True)[: rows_of_batch(options)]
    if options.max_tokens_per_batch is not None:
        return int(min(sum(lengths), options.max_tokens_per_batch))
    if options.padding_free:
        return sum(largest)
    return max(largest, default=0) * len(largest)


def patches_of_largest_batch(patches: Sequence[int], options: RunOptions) -> int:
    """Return an upper bound of the image patches of a micro-batch. Args: patches: image patches of each row."""
    largest = sorted(patches, reverse=True)[: rows_of_batch(options)]
    if options.max_tokens_per_batch is not None:
        return min(sum(patches), max(options.max_tokens_per_batch, max(patches, default=0)))
    return sum(largest)


def available_memory(options: RunOptions) -> int:
    """Return the bytes of free memory on the device; 0 if unknown."""
    device = device_of(options)
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return available_bytes() or 0


# --- disk -------------------------------------------------------------------------------------------------------------


def disk_of(options: RunOptions, config: Any, sizes: Sizes, formats: Formats, steps: StepPlan) -> int:
    """Return the maximum bytes in ``output_dir``, without results and generated responses."""
    if not trains(options):
        return 0
    model = (
        sizes.total * storage_dtype(options, config).itemsize
        if sizes.saves_whole_model
        else sizes.trained * formats.trained
    )
    weights = (sizes.total if sizes.saves_whole_model else sizes.trained) * formats.trained
    moments = 0 if options.save_only_model else sizes.active * formats.moments
    return disk_bytes(model, round(weights + moments), _checkpoints_kept(options, steps))


def _checkpoints_kept(options: RunOptions, steps: StepPlan) -> int:
    num_saves = {
        "no": 0,
        "epoch": steps.num_train_epochs,
        "best": 1,
        "steps": -(-steps.max_steps // steps_of(options.save_steps, steps.max_steps, 500)),
    }[options.save_strategy]
    return min(num_saves, options.save_total_limit or num_saves)


def free_disk(folder: Path) -> int:
    return shutil.disk_usage(nearest_existing(folder)).free


def check_disk(options: RunOptions, config: Any, sizes: Sizes, formats: Formats, steps: StepPlan) -> Iterator[Problem]:
    """Yield a problem if the disk is too small for the model and the checkpoints."""
    needed, free = disk_of(options, config, sizes, formats, steps), free_disk(output_folder(options))
    if needed <= free:
        return
    num_checkpoints = _checkpoints_kept(options, steps)
    more = f", {format_count(num_checkpoints, 'checkpoint')} and one being written" if num_checkpoints else ""
    yield Problem(
        f'Not enough disk space in output_dir "{options.output_dir}": {shown_bytes(free)} free. '
        f"The run needs about {shown_bytes(needed)} for the model{more}.",
        remedy="Free some space, set output_dir to a folder on another disk"
        + (", or set save_total_limit: 1 or save_only_model: true." if num_checkpoints else "."),
        option="output_dir",
    )
