"""The options of a run: the union of all groups that components declare, as one flat class.

A component takes the group that it declares. Code that compares several groups takes ``RunOptions``, so that a type
checker finds misspelt fields everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from burnish.adapters.base import ADAPTERS, FinetuningOptions
from burnish.adapters.freeze import FreezeOptions
from burnish.adapters.lora import LoraOptions, RateChoices
from burnish.adapters.peft import OftOptions, PeftOptions
from burnish.checkpoint.checkpoint import CheckpointOptions
from burnish.config.options import option, union
from burnish.data.batches.batching import BatchingOptions, PackingChoices
from burnish.data.batches.loader import LoaderOptions
from burnish.data.chat.choose import TemplateOptions
from burnish.data.chat.truncate import EncodingOptions
from burnish.data.images.options import ImageOptions
from burnish.data.options import DataOptions
from burnish.inference.options import InferOptions
from burnish.loop.early_stopping import EarlyStoppingOptions
from burnish.loop.events import IntervalOptions
from burnish.loop.loop import LoopChoices, LoopOptions
from burnish.loop.schedule import LRScheduleOptions, StepOptions
from burnish.loop.spikes import SpikeOptions
from burnish.losses.base import OBJECTIVES
from burnish.losses.kto import KtoOptions
from burnish.losses.lm import LmChoices, LmOptions
from burnish.losses.preference_options import PairOptions, PreferenceOptions, ReferenceOptions
from burnish.losses.reward import RewardOptions
from burnish.models.export import ExportChoices, ExportOptions
from burnish.models.generate import GenerationOptions
from burnish.models.images.ahead import ImageCacheOptions
from burnish.models.options import ModelOptions
from burnish.models.patches.liger import LigerOptions
from burnish.models.quantization.export import QuantizedExportOptions
from burnish.models.quantization.quantize import QuantizationOptions
from burnish.optim.adam_mini import AdamMiniOptions
from burnish.optim.badam import BadamOptions
from burnish.optim.builtin import OPTIMIZERS, OptimOptions
from burnish.optim.low_rank import LowRankOptions
from burnish.optim.muon import MuonOptions
from burnish.parallel.options import ParallelChoices, ParallelOptions
from burnish.report.options import HubOptions, ReportOptions
from burnish.report.profile import ProfileOptions
from burnish.report.trackers import TRACKERS
from burnish.rollouts.online_pairs import OnlinePairObjective  # noqa: F401  registers its stage
from burnish.rollouts.options import RolloutOptions
from burnish.rollouts.ppo import PpoOptions
from burnish.run.recovery.interrupt import ClockOptions
from burnish.run.response_metrics import MetricOptions
from burnish.utils.patching import PatchOptions


@dataclass
class TaskOptions:
    """Task."""

    stage: str = option(
        "sft",
        "Training stage: supervised fine-tuning (sft), pretraining (pt), preference optimization (dpo, kto)"
        ", reward modeling (rm), or reinforcement learning on the model's own completions (grpo, rloo, ppo, and dpo "
        "with online: true).",
        choices=OBJECTIVES.names,
    )
    do_train: bool | None = option(None, "Train the model. Default: true, unless only do_eval or do_predict is set.")
    do_eval: bool = option(False, "Evaluate on the evaluation set, after training if the run trains.")
    do_predict: bool = option(False, "Predict on the evaluation set, after training if the run trains.")


GROUPS: tuple[type, ...] = (
    TaskOptions,
    ModelOptions,
    LigerOptions,
    PatchOptions,
    QuantizationOptions,
    FinetuningOptions,
    PreferenceOptions,
    ReferenceOptions,
    RolloutOptions,
    DataOptions,
    ImageOptions,
    TemplateOptions,
    EncodingOptions,
    BatchingOptions,
    LoaderOptions,
    ImageCacheOptions,
    StepOptions,
    LRScheduleOptions,
    OptimOptions,
    LoopOptions,
    SpikeOptions,
    IntervalOptions,
    EarlyStoppingOptions,
    ClockOptions,
    CheckpointOptions,
    GenerationOptions,
    InferOptions,
    MetricOptions,
    ExportOptions,
    QuantizedExportOptions,
    ReportOptions,
    HubOptions,
    ProfileOptions,
    ParallelOptions,
)
"""Option groups that every run reads, in the order of ``burnish train --help``."""
MEMBER_GROUPS: tuple[type, ...] = (
    *ADAPTERS.option_groups(),
    *OBJECTIVES.option_groups(),
    *OPTIMIZERS.option_groups(),
    *TRACKERS.option_groups(),
)
"""Option groups of single members of a family, including plugins."""

if TYPE_CHECKING:  # type checkers do not understand the union; a test compares the two
    from burnish.inference.options import AnsweringOptions

    @dataclass
    class RunOptions(
        KtoOptions, PairOptions, ReferenceOptions, ReportOptions, HubOptions, RolloutOptions, AnsweringOptions,
        ExportChoices, LmChoices, LoopChoices, PackingChoices, ParallelChoices, RateChoices, TaskOptions, MetricOptions,
        LigerOptions, PreferenceOptions, BatchingOptions, DataOptions, LoaderOptions, ImageCacheOptions,
        LRScheduleOptions, OptimOptions, CheckpointOptions, IntervalOptions, SpikeOptions, StepOptions, LoopOptions,
        EarlyStoppingOptions, ClockOptions, QuantizedExportOptions, ProfileOptions,
        FreezeOptions, LoraOptions, PeftOptions, OftOptions, PatchOptions,
        LmOptions, RewardOptions, PpoOptions, AdamMiniOptions, BadamOptions, LowRankOptions, MuonOptions,
    ):  # fmt: skip
        """Every option of a run, flat."""

else:
    RunOptions = union("RunOptions", *GROUPS, *MEMBER_GROUPS, doc="All options of a run.")
