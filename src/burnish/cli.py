"""The command line: ``burnish <command> [run.yaml] [key=value ...] [--key value ...]``.

Exit status:
    0: success.
    1: a failure of the machine.
    2: an error in what the user passed (options, data, models, folders).
    3: the run finished, but an intermediate checkpoint could not be saved.
    124: ``max_train_seconds`` ended the run.
    128 + signal: a signal ended the run.

This file imports no heavy library, so that ``burnish --help`` starts quickly. Each command imports what it needs.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

from burnish.config.errors import Problem, UserError, did_you_mean
from burnish.report.console import print_result
from burnish.report.work import WorkLine
from burnish.utils.collection import collect_garbage_rarely
from burnish.utils.environment import remove_empty_variables
from burnish.utils.library_warnings import hide_library_warnings
from burnish.utils.sigint import exit_quietly, exit_without_finalization, exiting_on_interrupt, interruptible
from burnish.utils.work import set_watcher

if TYPE_CHECKING:
    from burnish.run.plan.plan import Plan

Arguments = list[str]


def command(arguments: Sequence[str] | None = None) -> int:
    """Entry point of the ``burnish`` process: run ``main``, then exit the interpreter quickly."""
    collect_garbage_rarely()
    status = main(arguments)
    parallel = sys.modules.get("burnish.parallel.multi_process")
    if parallel is not None and parallel.close_group():  # a distributed run
        exit_without_finalization(status)
    gc.freeze()  # otherwise the collections at interpreter exit traverse every imported module
    exit_quietly(status)
    return status


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status. All exceptions are turned into messages here."""
    # GNU OpenMP threads busy-wait for each other, which slows down a loaded machine: ten times slower was measured on
    # two busy cores. The variable is read when torch is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    remove_empty_variables()
    if "RANK" in os.environ:
        # torch's C++ code logs harmless warnings, for example that a search for unused parameters found none.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    argv = list(sys.argv[1:] if arguments is None else arguments)
    debug = _pop_debug_flag(argv)
    try:
        with exiting_on_interrupt():
            return _run(argv)
    except BaseException as error:  # the outermost frame: anything not explained here would print a traceback
        return _explain(error, argv, debug)


def _run(argv: Arguments) -> int:
    if not argv or argv[0] in {"--help", "-h", "help"}:
        print_result(_help().rstrip())
        return 0
    name = "version" if argv[0] in {"--version", "-V"} else argv[0]
    if name == "_planner":
        return _planner(argv[1:])
    command = COMMANDS.get(name)
    if command is None:
        raise UserError(_unknown_command(name))
    if "--help" in argv or "-h" in argv:
        return _print_command_help(name, argv[1:])
    hide_library_warnings()
    set_watcher(WorkLine())
    return (_import_object(command.run) if isinstance(command.run, str) else command.run)(argv[1:])


def _import_object(place: str) -> Any:
    """Import and return the object that ``module:name`` refers to, with ``module`` relative to burnish."""
    module, _, name = place.partition(":")
    return getattr(import_module(f"burnish.{module}"), name)


def _explain(error: BaseException, argv: Arguments, debug: bool) -> int:
    if isinstance(error, SystemExit):
        raise error
    from burnish.run.recovery.failure import explain_failure

    return explain_failure(error, _output_dir(argv), debug)


def _output_dir(argv: Arguments) -> str | None:
    """Return ``output_dir`` for writing a traceback, or None. The arguments may be invalid."""
    from burnish.run.plan.config_files import read_arguments

    try:
        file, flags = read_arguments(argv[1:])
    except (UserError, OSError, RecursionError, MemoryError):  # parsing the arguments may be the failure itself
        return None
    output_dir = {**file, **flags}.get("output_dir")
    return str(output_dir.value) if output_dir is not None else None


def _pop_debug_flag(argv: Arguments) -> bool:
    """Remove ``--debug`` without a value and return whether it was there. ``--debug value`` is an ordinary option."""
    for position, word in enumerate(argv):
        following = argv[position + 1 : position + 2]
        if word == "--debug" and (not following or following[0].startswith("--") or "=" in following[0]):
            del argv[position]
            return True
    return False


# --- commands ---------------------------------------------------------------------------------------------------------


def _train(argv: Arguments) -> int:
    from burnish.run.launch import launch
    from burnish.run.plan.config_files import read_arguments

    file, flags = read_arguments(argv)
    status = launch(argv, {**file, **flags})
    if status is not None:
        return status
    plan = _plan(argv)
    from burnish.report.console import note
    from burnish.run.build import train_run
    from burnish.run.plan.plan import locate_problems

    with locate_problems(plan.provenance):
        result = train_run(plan)
    if result.next_steps:
        note("\n  ".join(["Next steps:", *result.next_steps]))
    return result.exit_code or 0


def _explain_run(argv: Arguments) -> int:
    if "--json" in argv:
        from burnish.explain.as_json import as_json

        text, status = as_json(lambda: _plan([word for word in argv if word != "--json"]))
        print_result(text, masks_secrets=False)
        return status
    shows_all = "--all" in argv
    plan = _plan([word for word in argv if word != "--all"])
    from burnish.explain.explain import explain
    from burnish.parallel.process_counts import world_size
    from burnish.run.plan.plan import locate_problems

    plan = replace(plan, world_size=world_size(plan.options))

    with locate_problems(plan.provenance):
        explain(plan, shows_all)
    return 0


def _export(argv: Arguments) -> int:
    from burnish.export.export import export
    from burnish.run.plan.plan import locate_problems, provenance_of
    from burnish.serve.command_line import export_values

    interruptible()  # an interrupted export removes its incomplete model

    values = export_values(argv)
    with locate_problems(provenance_of(values)):
        export(values)
    return 0


def _planner(argv: Arguments) -> int:
    """Answer the web UI's questions about planned runs. The web UI starts this process."""
    from burnish.serve.page.planner_process import planner

    return planner()


def _env(argv: Arguments) -> int:
    if argv == ["--health"]:
        from burnish.explain.env import health

        return health()
    _refuse_arguments("env", argv)
    from burnish.explain.env import environment

    print_result("\n".join(f"{name:<13} {value}" for name, value in environment().items()))
    return 0


def _version(argv: Arguments) -> int:
    _refuse_arguments("version", argv)
    from burnish import __version__

    print_result(f"burnish {__version__}")
    return 0


def _refuse_arguments(command: str, argv: Arguments) -> None:
    if argv:
        raise UserError(f"burnish {command} takes no options. Received: {' '.join(argv)}.")


def _plan(argv: Arguments) -> Plan:
    from burnish.run.plan.config_files import merge, read_arguments

    file, flags = read_arguments(argv)  # first, so that argument errors are reported before torch is loaded
    from burnish.run.plan.files import problems_in_files
    from burnish.run.plan.plan import aliases, plan
    from burnish.run.recovery.resume import refuse_changed_options

    chosen = plan(merge(file, flags, aliases()), extra_checks=[problems_in_files])
    refuse_changed_options(chosen.options)  # before the data are encoded
    return chosen


NEEDED_BY_EXPORT = (
    "model_name_or_path", "adapter_name_or_path", "template", "trust_remote_code", "infer_dtype", "hf_hub_token",
    "export_", "llama_cpp", "overwrite_output_dir",
)  # fmt: skip
"""Options that ``burnish export`` reads: full names or prefixes."""
NEEDED_BY_SCORE = (
    "save_dir", "score_name", "batch_size", "output_dir", "overwrite_output_dir", "dataset", "eval_dataset",
    "dataset_dir", "formatting", "columns", "tags", "max_samples", "on_bad_record", "preprocessing_batch_size",
    "model_name_or_path", "adapter_name_or_path", "template", "default_system", "enable_thinking", "preserve_thinking",
    "tool_format", "trust_remote_code", "quantization_", "infer_context", "infer_dtype", "hf_hub_token", "use_cpu",
)  # fmt: skip
"""Options that ``burnish score`` reads."""
_RUN_OPTIONS = ("run.plan.options:RunOptions",)
_WEB_OPTIONS = ("serve.page.options:WebOptions",)
_PROMPT_OPTIONS = ("data.chat.choose:TemplateOptions", "data.images.options:ImageOptions")
_MODEL_OPTIONS = ("models.options:ModelOptions", "models.quantization.quantize:QuantizationOptions", *_PROMPT_OPTIONS)
_CHAT = ("models.generate:GenerationOptions", "inference.options:InferOptions", *_MODEL_OPTIONS)
_PREDICT = (
    "serve.eval.dataset:PredictOptions", "data.options:DataOptions", "models.generate:GenerationOptions",
    "run.response_metrics:MetricOptions", *_MODEL_OPTIONS,
)  # fmt: skip


@dataclass(frozen=True)
class Command:
    """One command of the command line.

    ``run`` and ``options`` may be strings of the form ``module:name``, which are imported when the command runs.

    Args:
        usage: arguments, as shown in the help.
        summary: one-line description.
        run: function that takes the arguments after the command and returns an exit status.
        options: option groups to list in the command's help.
        beginnings: prefixes of the options that the command reads; only those are listed.
        unread: ``module:name`` of the names of options that the command does not read, or "".
    """

    usage: str
    summary: str
    run: Callable[[Arguments], int] | str
    options: tuple[str, ...] = ()
    beginnings: tuple[str, ...] = ("",)
    unread: str = ""


_RUN_USAGE = "[run.yaml] [key=value ...] [--key value ...]"
COMMANDS: dict[str, Command] = {
    "train": Command(_RUN_USAGE, "fine-tune a model", _train, _RUN_OPTIONS),
    "explain": Command(
        f"[--all | --json] {_RUN_USAGE}", "dry run: show what train would do, and why", _explain_run, _RUN_OPTIONS
    ),
    "export": Command(
        "[PATH or run.yaml] [key=value ...] [--key value ...]",
        "merge adapters into the base model and save it, also as GGUF, GPTQ or AWQ",
        _export,
        _RUN_OPTIONS,
        NEEDED_BY_EXPORT,
    ),
    "api": Command(
        "PATH [--adapter name=folder ...] [key=value ...]",
        "serve a model over HTTP with an OpenAI-compatible API",
        "serve.api.command:api",
        ("serve.api.options:ApiOptions", "inference.options:InferOptions", *_PROMPT_OPTIONS),
        unread="inference.options:TRAINING_ONLY",
    ),
    "webui": Command(
        "[--page NAME] [key=value ...]",
        "web UI: configure and monitor runs, chat with the resulting models",
        "serve.page.command:webui",
        _WEB_OPTIONS,
    ),
    "webchat": Command(
        "PATH [key=value ...]", "open the web UI in a chat with one model", "serve.page.command:webchat", _WEB_OPTIONS
    ),
    "runs": Command(
        "[FOLDER ...] [--json]", "list runs under the given folders and their status", "serve.page.runs.listing:runs"
    ),
    "chat": Command(
        "PATH [--adapter name=folder] [--once TEXT [--image PATH]] [key=value ...]",
        "chat with a model in the terminal",
        "serve.chat.command:chat",
        _CHAT,
        unread="serve.command_line:UNREAD",
    ),
    "eval": Command(
        "PATH [PATH ...] [task=mmlu_test | eval_dataset=heldout] [key=value ...]",
        "evaluate models on a task or a dataset",
        "serve.eval.command:evaluate",
        ("serve.eval.command:EvalOptions",),
    ),
    "predict": Command(
        "PATH [PATH ...] [eval_dataset=heldout] [key=value ...]",
        "generate responses to the prompts of a dataset, or score it with a reward model",
        "serve.eval.dataset:predict_sets",
        _PREDICT,
        unread="serve.eval.dataset:UNREAD",
    ),
    "score": Command(
        "PATH dataset=FILE [key=value ...]",
        "score the responses of a dataset with a reward model",
        "serve.eval.score:score_sets",
        ("serve.eval.score:ScoreOptions", *_RUN_OPTIONS),
        NEEDED_BY_SCORE,
    ),
    "demo": Command(
        "[dpo | grpo | picture] [key=value ...] [--key value ...]",
        "fine-tune a small model in minutes; dpo: with preferences; grpo: with rewards; picture: on images",
        "demo.command:demo",
        _RUN_OPTIONS,
    ),
    "env": Command("[--health]", "print versions and devices (for bug reports)", _env),
    "version": Command("", "print the version of burnish", _version),
}


def _unknown_command(name: str) -> Problem:
    if name.endswith((".yaml", ".yml", ".json")):
        return Problem(f'"{name}" is a file, not a command.', remedy=f"Try: burnish train {name}")
    if name.startswith("--") or "=" in name:
        return Problem(
            f'The first argument must be a command. Received: "{name}".', remedy=f"Try: burnish train {name} ..."
        )
    return Problem(
        f'Unknown command "{name}".{did_you_mean(name, COMMANDS)}', remedy=f"Available: {', '.join(COMMANDS)}."
    )


# --- help -------------------------------------------------------------------------------------------------------------


def _help() -> str:
    from burnish import __version__

    rows = "".join(f"  {name:<9}{command.summary}\n" for name, command in COMMANDS.items())
    return (
        f"burnish {__version__}: fine-tunes transformer models\n\n"
        f"usage: burnish <command> {_RUN_USAGE}\n\n{rows}\n"
        "Options have the same names as in LLaMA-Factory and transformers. "
        "The command line overrides the YAML file.\n\n"
        "  burnish train --help            list every option, by component\n"
        "  burnish train --help warmup     list options whose name or description contains a word\n"
        "  burnish explain --all           also show the callbacks of each event\n"
        "  --debug                         print the traceback of an error\n"
    )


def _print_command_help(name: str, argv: Arguments) -> int:
    """Print a command's help with all its options, or only the options that contain the first of ``argv``."""
    command = COMMANDS[name]
    print_result(f"burnish {name}: {command.summary}\n\nusage: burnish {name} {command.usage}".rstrip())
    if groups := command.options:
        from burnish.config.options import union
        from burnish.run.plan.config_files import CONFIG_SUFFIXES
        from burnish.run.plan.listing import list_options

        wanted = [word for word in argv if not (word.startswith("-") or "=" in word or word.endswith(CONFIG_SUFFIXES))]
        options = _import_object(groups[0]) if len(groups) == 1 else union("Options", *map(_import_object, groups))
        unread = _import_object(command.unread) if command.unread else ()
        listed = list_options(options, wanted[0] if wanted else "", command.beginnings, unread)
        print_result(f"\n{listed.rstrip()}")
    return 0
