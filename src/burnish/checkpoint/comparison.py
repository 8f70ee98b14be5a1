"""Compare a resumed run with the run that wrote the checkpoint.

In: the fingerprints in a checkpoint's manifest and those of the current command. Out: a sentence for each accepted
change. Refuses changes that make it a different run, such as another learning rate. The error contains both values and
the possible remedies.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any

from burnish.checkpoint.manifest import read_manifest
from burnish.config.errors import UserError

_HASH = re.compile(r"^[0-9a-f]{32,}$")
EVALUATION = frozenset({"eval_data", "eval_on_each_dataset", "eval_packing", "bf16_full_eval", "fp16_full_eval"})
"""Fingerprints that change the results of an evaluation. A resumed run may change them, unless these results select the
best weights or stop training."""
MAY_CHANGE = EVALUATION | frozenset(
    {"max_steps", "num_train_epochs", "world_size", "versions",
     "per_device_train_batch_size", "gradient_accumulation_steps", "output_dir",
     # completions: logging, and time limits of reward functions
     "log_completions", "num_completions_to_print", "log_unique_prompts", "reward_timeout_s", "on_changed_reward",
     "steps_per_generation", "generation_batch_size",
     # intervals
     "logging_strategy", "logging_steps", "logging_first_step", "eval_strategy", "eval_steps", "eval_delay",
     "save_strategy", "save_steps", "on_non_finite", "early_stopping_steps", "early_stopping_threshold",
     "load_best_model_at_end", "metric_for_best_model", "greater_is_better",
     # how the same numbers are computed, up to rounding
     "engine", "use_cpu", "flash_attn", "attn_implementation", "use_cache", "padding_free", "needed_tokens_only",
     "max_tokens_per_batch", "pad_to_multiple_of", "gradient_checkpointing", "gradient_checkpointing_kwargs",
     "activation_offloading", "torch_compile", "torch_compile_backend", "torch_compile_mode", "tf32",
     "full_determinism", "deepspeed", "fsdp", "fsdp_config"}
)  # fmt: skip
"""Fingerprints that may change when an unfinished run is resumed or a finished run is trained further. The change is
applied and reported. Batch sizes are included because ``rows_per_step``, their product, may not change;
nor may the completions per step."""
AFTER_THE_END = MAY_CHANGE - EVALUATION - {
    "eval_strategy", "early_stopping_steps", "early_stopping_threshold", "load_best_model_at_end",
    "metric_for_best_model", "greater_is_better",
}  # fmt: skip
"""Fingerprints that may also change when the command of a finished run is repeated, because the result is the same.
After any other change the old weights would be mistaken for the result of the new command."""


def compare_with_checkpoint(
    folder: Path, now: Mapping[str, Any], allows_changes: bool = False, may_change: Set[str] = MAY_CHANGE
) -> list[str]:
    """Return a sentence for each accepted change since the checkpoint.

    Raises:
        UserError: if a change makes it another run, unless ``allows_changes`` is true.
    """
    return compare_fingerprints(read_manifest(folder)["fingerprints"], now, folder, allows_changes, may_change)


def compare_fingerprints(
    before: Mapping[str, Any], now: Mapping[str, Any], folder: Path, allows_changes: bool = False,
    may_change: Set[str] = MAY_CHANGE,
) -> list[str]:  # fmt: skip
    """Compare two sets of fingerprints. ``before`` belongs to a checkpoint or a finished run in ``folder``."""
    changed = {
        name: _differing_entries(before[name], now[name])
        for name in now
        if name in before and before[name] != now[name]
    }
    fatal = {name: pair for name, pair in changed.items() if name not in may_change}
    if fatal and not allows_changes:
        raise UserError(
            f"it contains a different run: {'; '.join(_difference(name, *pair) for name, pair in fatal.items())}.",
            where=str(folder),
            remedy="Set a different output_dir, or set overwrite_output_dir: true to start over. To resume despite the "
            "change, set resume_despite_changes: true.",
            option=tuple(fatal),
        )
    return [_accepted_change(name, *pair, folder.name) for name, pair in changed.items()]


def _accepted_change(name: str, old: Any, new: Any, folder: str) -> str:
    if _is_hash(old):
        return f"{name} has changed since {folder}."
    before, now = _short_pair(old, new)
    return f"{name} was {before} in {folder} and is {now} now."


def _differing_entries(old: Any, new: Any) -> tuple[Any, Any]:
    """Return the entries that differ between two mappings, or both values if they are not mappings."""
    if not isinstance(old, Mapping) or not isinstance(new, Mapping):
        return old, new
    same = {name for name in old if name in new and old[name] == new[name]}
    before, now = ({name: value for name, value in side.items() if name not in same} for side in (old, new))
    return before, now


def _difference(name: str, old: Any, new: Any) -> str:
    """Return ``seed was 42, is 7``. For a hash, only that it has changed."""
    return f"{name} has changed" if _is_hash(old) else "{} changed from {} to {}".format(name, *_short_pair(old, new))


def _is_hash(value: Any) -> bool:
    return isinstance(value, str) and _HASH.match(value) is not None


def _short_pair(old: Any, new: Any, width: int = 60) -> tuple[str, str]:
    """Return two different values as short texts that differ. A common beginning of long JSON texts is left out."""
    texts = ["not set" if value is None else json.dumps(value, default=str) for value in (old, new)]
    shared = next((i for i, pair in enumerate(zip(*texts, strict=False)) if pair[0] != pair[1]), 0)
    if shared > width // 2 and max(map(len, texts)) > width:
        texts = [f"...{text[shared - width // 3 :]}" for text in texts]
    before, now = (text if len(text) <= width else f"{text[: width - 3]}..." for text in texts)
    return before, now
