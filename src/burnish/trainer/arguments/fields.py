# ruff: noqa: RUF036  HfArgumentParser reads unions from left to right
"""The fields of ``TrainingArguments``. Fields of burnish's components are inherited from their option groups. The
others, and those with another default or type, are declared here with transformers' name, type and default."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from transformers.debug_utils import DebugOption
from transformers.trainer_utils import HubStrategy, IntervalStrategy, SaveStrategy, SchedulerType
from transformers.training_args import OptimizerNames

from burnish.checkpoint.checkpoint import CheckpointOptions
from burnish.config.options import option, union
from burnish.data.batches.loader import LoaderOptions
from burnish.loop.events import IntervalOptions
from burnish.loop.loop import LoopChoices, LoopOptions
from burnish.loop.schedule import LRScheduleOptions, StepOptions
from burnish.loop.spikes import SpikeOptions
from burnish.optim.builtin import OPTIMIZERS, OptimOptions
from burnish.parallel.options import ParallelChoices, ParallelOptions
from burnish.report.options import HubFields, ReportFields
from burnish.report.trackers import TRACKERS
from burnish.utils.patching import PatchOptions

if TYPE_CHECKING:
    from burnish.optim.adam_mini import AdamMiniOptions
    from burnish.optim.badam import BadamOptions
    from burnish.optim.low_rank import LowRankOptions
    from burnish.optim.muon import MuonOptions

if TYPE_CHECKING:  # type checkers cannot evaluate a union; a test compares both

    @dataclass
    class Groups(
        LoopChoices, ParallelChoices, CheckpointOptions, IntervalOptions, SpikeOptions, ParallelOptions, StepOptions,
        LoopOptions, OptimOptions, LRScheduleOptions, LoaderOptions, PatchOptions, AdamMiniOptions, BadamOptions,
        LowRankOptions, MuonOptions,
    ):  # fmt: skip
        pass

else:
    Groups = union(
        "Groups", CheckpointOptions, StepOptions, OptimOptions, LRScheduleOptions, LoopOptions, SpikeOptions,
        IntervalOptions, LoaderOptions, ParallelOptions, PatchOptions, *OPTIMIZERS.option_groups(),
        *TRACKERS.option_groups(),
    )  # fmt: skip


@dataclass
class Fields(HubFields, ReportFields, Groups):
    """All arguments, without derived values."""

    if TYPE_CHECKING:  # types after __post_init__
        output_dir: str = ""
    declared: ClassVar[dict[str, Any]] = {}

    # --- defaults that differ from burnish's own, for scripts that only change their import
    logging_steps: float = option(500, "Number of steps between logs. Below 1: a fraction of all steps.", gt=0)
    logging_first_step: bool = option(False, "Log the first step as well.")
    resume: str = option(
        "never",
        "Whether train() resumes from the latest checkpoint in output_dir. auto: if one exists; never: do not resume; "
        "must: raise an error if none exists.",
    )
    resume_from_checkpoint: str | None = option(
        None, "Not used by the Trainer; a script may pass it to train(resume_from_checkpoint=...)."
    )
    save_in_background: bool = option(
        False, "Continue training while a checkpoint is written; on_save may be called before it is complete."
    )
    on_non_finite: str = option(
        "skip",
        "What to do after a step whose loss or gradient is not finite: stop, or skip it and continue. The "
        "update of such a step is never applied.",
    )
    needed_tokens_only: bool | None = option(
        None,
        "Skip padding and all tokens that do not affect the loss. Default: on for CPUs if model, loss and "
        "batch allow it. False passes the padded batch to the model.",
    )  # fmt: skip
    save_hf_format: bool = option(
        False,
        "Also write the files that transformers needs to resume (optimizer.pt, scheduler.pt, rng_state.pth).",
    )

    # --- types that differ
    bf16: bool = option(False, "Mixed precision training in bfloat16 (autocast).")
    lr_scheduler_type: SchedulerType | str = option("linear", "Learning rate schedule.")
    lr_scheduler_kwargs: dict | str | None = None  # type: ignore[type-arg, assignment]
    default_optim = "adamw_torch_fused"  # not a field; scripts read it from the class
    optim: OptimizerNames | str = option(default_optim, "Optimizer, named as in transformers.")
    logging_strategy: IntervalStrategy | str = option("steps", "When to log.")
    eval_strategy: IntervalStrategy | str = option("no", "When to evaluate.")
    save_strategy: SaveStrategy | str = option("steps", "When to save checkpoints.")
    num_processes: str = option("auto", "Used by burnish train only; start scripts with torchrun or accelerate launch.")
    gradient_checkpointing: bool | None = option(  # type: ignore[assignment]
        None, "Same as activation_checkpointing; transformers 5.23 deprecates this name."
    )
    gradient_checkpointing_kwargs: dict[str, Any] | str | None = option(  # type: ignore[assignment]
        None, "Same as activation_checkpointing_kwargs; transformers 5.23 deprecates this name."
    )
    fsdp: str | None = None
    fsdp_config: dict[str, Any] | str | None = None
    deepspeed: dict | str | None = None  # type: ignore[type-arg]
    accelerator_config: dict | str | None = option(None, "Settings of accelerate, or a JSON file with them.")  # type: ignore[type-arg]

    # --- bounds that differ: scripts use 0 to train nothing or to run no steps
    learning_rate: float = option(5e-5, "Peak learning rate.", ge=0, lt=math.inf)
    num_train_epochs: float = option(3.0, "Number of training epochs.", unit="epochs", ge=0, lt=math.inf)

    # --- fields that only TrainingArguments has
    optim_target_modules: None | str | list[str] = None
    average_tokens_across_devices: bool = option(True, "Average the loss over the tokens of all processes.")
    label_smoothing_factor: float = option(0.0, "Label smoothing factor.", ge=0, le=1)
    activation_checkpointing: bool | None = option(None, "Recompute activations in the backward pass to save memory.")
    activation_checkpointing_kwargs: dict[str, Any] | str | None = option(
        None, "Arguments of activation checkpointing."
    )
    use_liger_kernel: bool = option(False, "Use Liger kernels.")
    liger_kernel_config: dict[str, bool] | None = option(
        None, "Parts that Liger replaces: {rope: true, rms_norm: true, swiglu: true}. Default: all."
    )
    use_cache: bool = option(False, "Value for model.config.use_cache.")
    neftune_noise_alpha: float | None = option(None, "Alpha of NEFTune noise on the embeddings in training.", ge=0)
    torch_empty_cache_steps: int | None = option(None, "Number of steps between calls of torch's empty_cache.")
    auto_find_batch_size: bool = option(
        False, "Halve the micro-batch size when memory runs out. The effective batch size stays the same."
    )
    include_num_input_tokens_seen: str | bool = option(
        "no", "Log the number of tokens seen so far: no, all, non_padding."
    )
    disable_tqdm: bool | None = option(None, "Print logs instead of a progress bar.")
    report_to: None | str | list[str] = option(
        "none", "Experiment trackers: tensorboard, wandb, mlflow, ...; all: every installed one."
    )
    trackio_static_space_id: str | None | Literal[False] = option(
        None, "Static Space that keeps the Trackio project after the run. false: none."
    )
    prediction_loss_only: bool = option(False, "Return only the loss from evaluation and prediction.")
    eval_do_concat_batches: bool = option(
        True, "Concatenate the predictions of all batches; false returns a list of arrays."
    )
    eval_use_gather_object: bool = option(False, "Gather nested objects from all processes.")
    eval_accumulation_steps: int | None = option(
        None, "Number of batches whose predictions are kept on the device before they are moved to the CPU.", ge=1
    )
    include_for_metrics: list[str] = option([], 'Additional inputs of compute_metrics: "inputs", "loss".')
    batch_eval_metrics: bool = option(False, "Call compute_metrics after each batch.")
    save_on_each_node: bool = option(False, "Save on the first process of each node.")
    enable_jit_checkpoint: bool = option(False, "Save a checkpoint and stop on SIGTERM.")
    hub_strategy: HubStrategy | str = option("every_save", "When to push to the Hub.")
    ignore_data_skip: bool = option(
        False, "Resume at the start of the epoch instead of the position of the checkpoint."
    )
    restore_callback_states_from_checkpoint: bool = option(
        False, "Restore the states of callbacks from the checkpoint."
    )
    parallelism_config: Any = option(None, "Parallelism config of accelerate.")
    dataloader_multiprocessing_context: str | None = option(
        None, "Multiprocessing start method of data loader workers.", choices=("fork", "spawn", "forkserver")
    )
    dataloader_in_order: bool = option(True, "Return batches in order with several workers.")
    remove_unused_columns: bool = option(True, "Remove the dataset columns that the model's forward does not accept.")
    label_names: list[str] | None = option(None, "Names of the model's arguments that are labels.")
    train_sampling_strategy: str = option(
        "random",
        "Order of the examples within an epoch.",
        choices=("random", "sequential", "group_by_length", "batch_rebalance"),
    )
    length_column_name: str = option("length", "Column that contains precomputed lengths.")
    debug: str | list[DebugOption] = option("", "Debugging tools: underflow_overflow.")
    skip_memory_metrics: bool = option(True, "Exclude memory from the metrics.")
    do_train: bool = option(False, "Not used by the Trainer; for scripts.")
    do_eval: bool = option(False, 'Not used by the Trainer; for scripts. True if eval_strategy is not "no".')
    do_predict: bool = option(False, "Not used by the Trainer; for scripts.")
    overwrite_output_dir: bool = option(False, "Not used by the Trainer; for scripts.")
    logging_dir: str | None = option(None, "Deprecated: TensorBoard log folder.")
    local_rank: int = option(-1, "Rank of this process on its node, set by the launcher.")
