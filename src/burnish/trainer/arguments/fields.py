# ruff: noqa: RUF036  HfArgumentParser reads unions from left to right
"""The fields of ``TrainingArguments``: those of burnish's components from their option groups; the others, and those
whose default or type differs, declared here with transformers' name, type and default."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from transformers.debug_utils import DebugOption
from transformers.trainer_utils import HubStrategy, IntervalStrategy, SaveStrategy, SchedulerType
from transformers.training_args import OptimizerNames
from transformers.utils import logging

from burnish.checkpoint.checkpoint import CheckpointOptions
from burnish.config.options import option, union
from burnish.data.batches.stream import StreamOptions
from burnish.loop.events import FlowOptions
from burnish.loop.loop import LoopOptions
from burnish.loop.schedule import CurveOptions, StepOptions
from burnish.loop.spikes import SpikeOptions
from burnish.optim.builtin import OPTIMIZERS, OptimOptions
from burnish.parallel.single import EngineOptions
from burnish.utils.patching import PatchOptions

if TYPE_CHECKING:
    from burnish.optim.adam_mini import AdamMiniOptions
    from burnish.optim.badam import BadamOptions
    from burnish.optim.low_rank import LowRankOptions
    from burnish.optim.muon import MuonOptions

if TYPE_CHECKING:  # it does not see into a union; a test holds the two against each other

    @dataclass
    class Groups(
        CheckpointOptions, StepOptions, OptimOptions, CurveOptions, LoopOptions, SpikeOptions, FlowOptions,
        StreamOptions, EngineOptions, PatchOptions, AdamMiniOptions, BadamOptions, LowRankOptions, MuonOptions,
    ):  # fmt: skip
        pass

else:
    Groups = union(
        "Groups", CheckpointOptions, StepOptions, OptimOptions, CurveOptions, LoopOptions, SpikeOptions, FlowOptions,
        StreamOptions, EngineOptions, PatchOptions, *OPTIMIZERS.option_groups(),
    )  # fmt: skip

_LEVELS = (*logging.get_log_levels_dict(), "passive")


@dataclass
class Fields(Groups):
    """Every argument, without what follows from it."""

    if TYPE_CHECKING:  # as they are after __post_init__
        output_dir: str = ""
    declared: ClassVar[dict[str, Any]] = {}

    # --- defaults that differ from burnish's own, because a script that only changes its import expects them
    resume: str = option("never", "Continue from output_dir without being told to: auto, never or must.")
    resume_from_checkpoint: str | None = option(None, "For the script to hand to train(); not read by the Trainer.")
    save_in_background: bool = option(False, "Train on while a checkpoint is written; on_save may come before its end.")
    on_non_finite: str = option("skip", "A step that is not finite is never applied; then stop, or skip it and go on.")
    needed_tokens_only: bool | None = option(
        None, "Compute the tokens of a micro-batch that its loss depends on, laid flat, and no others; where nothing "
        "is given, on a CPU, if model, loss and batch allow it. False gives the model the padded batch.",
    )  # fmt: skip
    save_hf_format: bool = option(False, "Checkpoints that transformers can continue too: optimizer.pt and its like.")

    # --- types that differ
    bf16: bool = option(False, "Compute in bfloat16 under autocast.")
    lr_scheduler_type: SchedulerType | str = option("linear", "The curve of the learning rate.")
    lr_scheduler_kwargs: dict | str | None = option(None, "Arguments of that curve.")  # type: ignore[type-arg, assignment]
    default_optim = "adamw_torch_fused"  # no field: scripts read it from the class
    optim: OptimizerNames | str = option(default_optim, "The optimizer.")
    logging_strategy: IntervalStrategy | str = option("steps", "When to log.")
    eval_strategy: IntervalStrategy | str = option("no", "When to evaluate.")
    save_strategy: SaveStrategy | str = option("steps", "When to save a checkpoint.")
    num_processes: str = option("auto", "Read by burnish train; a script is started by torchrun.")
    gradient_checkpointing: bool | None = option(  # type: ignore[assignment]
        None, "The older name of activation_checkpointing."
    )
    gradient_checkpointing_kwargs: dict[str, Any] | str | None = option(  # type: ignore[assignment]
        None, "The older name, with _kwargs."
    )
    fsdp: str | None = option(None, "Shard the model over processes: full_shard, shard_grad_op.")
    fsdp_config: dict[str, Any] | str | None = option(None, "FSDP's settings, or a JSON file; taken with it.")
    deepspeed: dict | str | None = option(None, "ZeRO 1 to 3: a JSON file, or zero2.")  # type: ignore[type-arg]
    accelerator_config: dict | str | None = option(None, "Settings of accelerate.")  # type: ignore[type-arg]

    # --- bounds that differ: scripts use 0 for a run that learns nothing, or has no step
    learning_rate: float = option(5e-5, "The peak of the learning rate.", ge=0, lt=math.inf)
    num_train_epochs: float = option(3.0, "Passes over the training set.", unit="epochs", ge=0, lt=math.inf)

    # --- fields that only TrainingArguments has
    optim_target_modules: None | str | list[str] = option(None, "Layers of an optimizer that takes some (GaLore).")
    average_tokens_across_devices: bool = option(True, "The mean of a step is over the items of all processes.")
    label_smoothing_factor: float = option(0.0, "The share of probability spread over all labels.", ge=0, le=1)
    activation_checkpointing: bool | None = option(None, "Keep layer inputs only; compute the rest again backwards.")
    activation_checkpointing_kwargs: dict[str, Any] | str | None = option(None, "Its arguments.")
    use_liger_kernel: bool = option(False, "Replace layers by Liger's kernels.")
    liger_kernel_config: dict[str, bool] | None = option(None, "Which of them.")
    use_cache: bool = option(False, "What model.config.use_cache is set to.")
    neftune_noise_alpha: float | None = option(None, "Strength of the noise on embeddings in training (NEFTune).", ge=0)
    torch_empty_cache_steps: int | None = option(None, "Steps between two calls of torch's empty_cache.")
    auto_find_batch_size: bool = option(False, "Halve the micro-batch where memory runs out; the step stays the same.")
    include_num_input_tokens_seen: str | bool = option("no", "Log the tokens seen: no, all, non_padding.")
    log_level: str = option("passive", "What libraries may say on the main process.", choices=_LEVELS)
    log_level_replica: str = option("warning", "What they may say on the others.", choices=_LEVELS)
    log_on_each_node: bool = option(True, "The first process of every node is a main process for logs.")
    disable_tqdm: bool | None = option(None, "Print logs instead of the progress bar.")
    report_to: None | str | list[str] = option("none", "Trackers that receive every log.")
    run_name: str | None = option(None, "The name of the run in a tracker.")
    project: str = option("huggingface", "The project in Trackio.")
    trackio_space_id: str | None = option(None, "The Space of a Trackio project.")
    trackio_bucket_id: str | None = option(None, "The bucket of a Trackio project.")
    trackio_static_space_id: str | None | Literal[False] = option(None, "The static Space of a Trackio project.")
    prediction_loss_only: bool = option(False, "Evaluate the loss alone.")
    eval_do_concat_batches: bool = option(True, "Predictions of all batches in one array; else a list of arrays.")
    eval_use_gather_object: bool = option(False, "Gather nested objects between processes.")
    eval_accumulation_steps: int | None = option(None, "Batches whose predictions stay on the device.", ge=1)
    include_for_metrics: list[str] = option([], 'What compute_metrics gets besides: "inputs", "loss".')
    batch_eval_metrics: bool = option(False, "Call compute_metrics batch by batch.")
    save_on_each_node: bool = option(False, "Save on the first process of every node.")
    enable_jit_checkpoint: bool = option(False, "Save and stop when the process is told to end (SIGTERM).")
    push_to_hub: bool = option(False, "Push the model when it is saved.")
    hub_token: str | None = option(None, "The token for it.", is_secret=True)
    hub_private_repo: bool | None = option(None, "Whether the repository is made private.")
    hub_model_id: str | None = option(None, "The repository; output_dir's name if not given.")
    hub_strategy: HubStrategy | str = option("every_save", "When to push.")
    hub_always_push: bool = option(False, "Push even where the last push goes on.")
    hub_revision: str | None = option(None, "The branch to push to.")
    ignore_data_skip: bool = option(False, "Continue at the start of the epoch instead of where it stood.")
    restore_callback_states_from_checkpoint: bool = option(False, "Callbacks continue with their state.")
    parallelism_config: Any = option(None, "accelerate's parallelism.")
    dataloader_multiprocessing_context: str | None = option(
        None, "How loader processes are started.", choices=("fork", "spawn", "forkserver")
    )
    dataloader_in_order: bool = option(True, "Batches in order although several processes make them.")
    remove_unused_columns: bool = option(True, "Leave out the columns that the model does not take.")
    label_names: list[str] | None = option(None, "The arguments of the model that are labels.")
    train_sampling_strategy: str = option(
        "random", "The order of rows.", choices=("random", "sequential", "group_by_length", "batch_rebalance")
    )
    length_column_name: str = option("length", "The column that holds lengths.")
    debug: str | list[DebugOption] = option("", "underflow_overflow to watch activations.")
    skip_memory_metrics: bool = option(True, "No memory in the metrics.")
    do_train: bool = option(False, "For the script; not read by the Trainer.")
    do_eval: bool = option(False, "For the script; not read by the Trainer.")
    do_predict: bool = option(False, "For the script; not read by the Trainer.")
    overwrite_output_dir: bool = option(False, "For the script, before it writes; not read by the Trainer.")
    logging_dir: str | None = option(None, "The older way to say where TensorBoard's files go.")
    local_rank: int = option(-1, "This process on its node; the launcher says it.")
