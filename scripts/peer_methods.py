"""List the methods that the trainers of transformers and TRL call on themselves.

A subclass that overrides one of them changes the training of that library. burnish warns about overrides that it would
not call (``trainer/constructor.py``), using the list that this script writes.

    python scripts/peer_methods.py            # fail if a list differs from the installed libraries
    python scripts/peer_methods.py --write    # write peer_methods.json (trainer/) and a table of docs/parity.md

It reads the sources of transformers and TRL, which must be installed. The list maps a class to names of methods; for
classes of TRL, those that transformers' ``Trainer`` does not have. The document lists those that burnish does not call,
with the reason.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import inspect
import json
import sys
import textwrap
from pathlib import Path
from types import FunctionType

FILE = Path(__file__).parents[1] / "src" / "burnish" / "trainer" / "peer_methods.json"
PEERS = {
    "Trainer": ("transformers",), "Seq2SeqTrainer": ("transformers",), "SFTTrainer": ("trl",), "DPOTrainer": ("trl",),
    "KTOTrainer": ("trl", "trl.experimental.kto"), "RewardTrainer": ("trl",),
    "ORPOTrainer": ("trl", "trl.experimental.orpo"), "CPOTrainer": ("trl", "trl.experimental.cpo"),
    "GRPOTrainer": ("trl",), "RLOOTrainer": ("trl",),
}  # fmt: skip
"""burnish's class -> modules that may have the class of the same name."""


DOCUMENT = Path(__file__).parents[1] / "docs" / "parity.md"
BEGIN, END = "<!-- table: made by scripts/peer_methods.py -->", "<!-- end of table -->"
REASONS = {
    "The loop is `burnish/loop/loop.py`: it has no such method. Callbacks receive the same events.": (
        "_inner_training_loop", "_run_epoch", "_prepare_for_training", "_init_training_state", "_evaluate",
        "_finalize_training", "_maybe_log_save_evaluate", "_track_num_input_tokens", "_update_auto_batch_size",
        "_determine_best_metric",
    ),
    "The engine (`burnish/parallel`) wraps the model and clips; `on_pre_optimizer_step` has access to the gradients.": (
        "_wrap_model", "_build_accelerator_args", "_clip_grad_norm", "_get_grad_norm", "_has_mixed_mesh_grads",
        "_mixed_mesh_grad_norm", "_defer_fsdp_gradient_reduction", "_sync_replicated_trainable_parameters",
    ),
    "A checkpoint is one list of parts with a manifest (`burnish/checkpoint`). `_save_checkpoint` is called.": (
        "_load_from_checkpoint", "_load_best_model", "_load_callback_state", "_load_optimizer_and_scheduler",
        "_load_rng_state", "_load_scaler", "_save_optimizer_and_scheduler", "_save_rng_state", "_save_scaler",
        "_issue_warnings_after_load", "_finish_current_push", "_tune_save_checkpoint",
    ),
    "burnish has no tensor, context or sequence parallelism.": (
        "get_tp_size", "get_cp_size", "get_sp_size", "_prepare_context_parallel_inputs",
    ),
    "Generated ids are padded when batches are concatenated.": ("_pad_tensors_to_max_len",),
    "No telemetry.": ("_send_telemetry",),
    "The constructor checks this.": ("_reject_skip_prepare_without_labels",),
    "Only causal language models are supported.": ("_shift_right",),
    "`generate_during_eval` is not supported. Use `burnish predict`.": ("generate_from_model",),
    "`burnish/rollouts` generates completions; pass `rollout_func` to replace it.": (
        "_generate", "_generate_single_turn", "_tokenize_prompts",
        "_tool_call_loop", "_get_tool_suffix_ids",
    ),
    "The loss is `burnish/losses/rollouts`. `_compute_loss` is called.": (
        "get_gamma_weights", "get_high_entropy_mask", "get_off_policy_mask",
    ),
    "Reward functions receive all columns of a record.": ("_remove_unused_columns",),
    "Passed to reward functions as `log_extra` and `log_metric`.": ("_log_completion_extra", "_log_metric"),
}  # fmt: skip
"""Reason -> methods that burnish does not call."""


def peer_class(name: str) -> type:
    """Return the class of the other library.

    Raises:
        ImportError: if no module of ``PEERS`` has it.
    """
    for module in PEERS[name]:
        try:
            return getattr(importlib.import_module(module), name)  # type: ignore[no-any-return]
        except (AttributeError, ImportError):
            continue
    raise ImportError(f"none of {', '.join(PEERS[name])} has {name}; install transformers and trl")


def called_methods(kind: type) -> set[str]:
    """Return names of methods that ``kind`` and its bases define and call on ``self``."""
    defined: set[str] = set()
    called: set[str] = set()
    for base in kind.__mro__:
        if base.__module__.split(".")[0] not in ("transformers", "trl"):
            continue
        kinds = FunctionType | staticmethod | classmethod
        defined |= {name for name, value in vars(base).items() if isinstance(value, kinds)}
        tree = ast.parse(textwrap.dedent(inspect.getsource(base)))
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
                called.add(node.attr)
    return {name for name in defined & called if not name.startswith("__")}


def peer_methods() -> dict[str, list[str]]:
    """Return class -> names of methods."""
    of_trainer = called_methods(peer_class("Trainer"))
    methods = {"Trainer": sorted(of_trainer)}
    for name in PEERS:
        if name != "Trainer":
            methods[name] = sorted(called_methods(peer_class(name)) - of_trainer)
    return methods


def uncalled() -> dict[str, list[str]]:
    """Return burnish's class -> methods of the other library that it does not call."""
    import burnish

    def marked(kind: str) -> set[str]:
        return {name for base in getattr(burnish, kind).__mro__ for name in vars(base).get("_uncalled", ())}

    return {
        kind: [name for name in names if not hasattr(getattr(burnish, kind), name)]
        + sorted(marked(kind) - (set() if kind == "Trainer" else marked("Trainer")))
        for kind, names in json.loads(FILE.read_text(encoding="utf-8")).items()
    }


def table() -> str:
    """Return the table of methods that burnish does not call.

    Raises:
        KeyError: if a method has no reason.
    """
    reason_of = {name: reason for reason, names in REASONS.items() for name in names}
    classes: dict[str, list[str]] = {}
    for kind, names in uncalled().items():
        for name in names:
            classes.setdefault(name, []).append(kind)
    made: dict[tuple[str, str], list[str]] = {}
    for name, kinds in classes.items():
        made.setdefault((", ".join(kinds), reason_of[name]), []).append(f"`{name}`")
    lines = [f"| {kinds} | {', '.join(names)} | {reason} |" for (kinds, reason), names in made.items()]
    return "\n".join(["| class | methods | why they are not called |", "|---|---|---|", *lines])


def main() -> str | None:
    """Compare or write the list and the table. Returns an error message or None."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--write", action="store_true")
    writes, text = parser.parse_args().write, json.dumps(peer_methods(), indent=1) + "\n"
    is_current = FILE.read_text(encoding="utf-8") == text
    if writes:
        FILE.write_text(text, encoding="utf-8")
    document = DOCUMENT.read_text(encoding="utf-8")
    before, rest = document.split(BEGIN)
    made = f"{before}{BEGIN}\n{table()}\n{END}{rest.split(END, 1)[1]}"
    if writes:
        DOCUMENT.write_text(made, encoding="utf-8")
        return None
    stale = [file.name for file, is_same in ((FILE, is_current), (DOCUMENT, made == document)) if not is_same]
    return f"{', '.join(stale)} differs from the installed libraries: run with --write" if stale else None


if __name__ == "__main__":
    sys.exit(main())
