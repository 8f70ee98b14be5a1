"""What a run depends on, by name: kept in each checkpoint, compared before a run goes on.

Data, template and base model are known by their content, so that a folder may move. Of the options, those that change
the arithmetic of a step are kept one by one; where a run writes, what it logs and how often it saves are not.
"""

from __future__ import annotations

import json
from importlib.metadata import version
from typing import Any

import burnish
from burnish.app.plan import GROUPS, MEMBER_GROUPS, Plan
from burnish.core.options import specs
from burnish.core.schedule import StepPlan
from burnish.data.rows import OPTIONS_OF_ROWS
from burnish.models.fingerprint import base_fingerprint

_KNOWN_BY_CONTENT_OR_HARMLESS = frozenset(
    {"DataOptions", "TemplateOptions", "LearnOptions", "EncodingOptions", "ModelOptions", "ReportOptions",
     "ProfileOptions", "CheckpointOptions", "FlowOptions", "EarlyStoppingOptions", "TaskOptions", "GenerationOptions",
     "MetricOptions", "ExportOptions"}
)  # fmt: skip
_HARMLESS = frozenset(
    {"per_device_eval_batch_size", "logging_nan_inf_filter", "on_non_finite", "engine", "gradient_checkpointing",
     "gradient_checkpointing_kwargs", "padding_free", "needed_tokens_only", "max_tokens_per_batch", "torch_compile",
     "torch_compile_backend", "torch_compile_mode"}
)  # fmt: skip
_HARMLESS_PREFIXES = ("dataloader_", "ddp_", "fsdp", "bf16_full", "fp16_full", "badam_verbose", "eval_")
LIBRARIES = ("torch", "transformers")


def fingerprints_of(plan: Plan, data: str, template: str, steps: StepPlan) -> dict[str, Any]:
    """JSON data by name; see ``core.comparison.MAY_CHANGE`` for those that a continued run may change."""
    values = {
        name: getattr(plan.options, name)
        for group in (*GROUPS, *MEMBER_GROUPS)
        if group.__name__ not in _KNOWN_BY_CONTENT_OR_HARMLESS
        for name in specs(group)
        if name not in _HARMLESS and not name.startswith(_HARMLESS_PREFIXES)
    }
    values |= {name: getattr(plan.options, name) for name in ("cutoff_len", *OPTIONS_OF_ROWS)}
    made: dict[str, Any] = json.loads(json.dumps(values, default=str))
    return made | {
        "data": data,
        "template": template,
        "base_model": base_fingerprint(plan.options),
        "rows_per_step": steps.rows_per_step,
        "world_size": plan.world_size,
        "versions": {"burnish": burnish.__version__, **{name: version(name) for name in LIBRARIES}},
    }
