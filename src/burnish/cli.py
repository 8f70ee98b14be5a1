"""The command line: ``burnish <command> [run.yaml] [key=value ...] [--key value ...]``.

In: the words after ``burnish``. Out: an exit status, 0 for done, 2 for something the user gave that is wrong (options,
data, models, folders), 1 for what the machine did wrong, 3 where a run came to its end and could not save a checkpoint
on the way, 124 where max_train_seconds ended it, 128 + signal where a signal did.

This file imports nothing heavy, so that ``burnish --help`` answers at once: each command imports what it needs.
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
from burnish.utils.sigint import exit_quietly, interruptible, stopping_at_once
from burnish.utils.work import watch_with

if TYPE_CHECKING:
    from burnish.run.plan.plan import Plan

Arguments = list[str]


def command(arguments: Sequence[str] | None = None) -> int:
    """Run ``main`` in a process of its own."""
    # Imports and encoding make a million objects and next to no cycles. With Python's default of 700 objects, the
    # searches for cyclic garbage among them took 1.7 s of a start and a third of encoding 20,000 records.
    gc.set_threshold(100_000, 50, 100)
    status = main(arguments)
    if (parallel := sys.modules.get("burnish.parallel.multi_process")) is not None:  # several processes have worked
        parallel.close_group()
    gc.freeze()  # the interpreter's last searches would go through all that was imported
    exit_quietly(status)
    return status


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Every exception becomes a sentence and an exit status here, and nowhere else."""
    # GNU OpenMP's threads spin while they wait for each other, and on a busy machine hinder each other: ten times
    # slower was measured on two busy cores. The variable is read when torch is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if "RANK" in os.environ:
        # torch's C++ code warns of harmless things (a search for unused weights that found none, for example).
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    words = list(sys.argv[1:] if arguments is None else arguments)
    debug = _take_debug(words)
    try:
        with stopping_at_once():
            return _run(words)
    except BaseException as error:  # the outermost frame: an error that is not explained here would be a traceback
        return _explain(error, words, debug)


def _run(words: Arguments) -> int:
    if not words or words[0] in {"--help", "-h", "help"}:
        print_result(_help().rstrip())
        return 0
    name = "version" if words[0] in {"--version", "-V"} else words[0]
    if name == "_planner":
        return _planner(words[1:])
    command = COMMANDS.get(name)
    if command is None:
        raise UserError(_unknown(name))
    if "--help" in words or "-h" in words:
        return _tell_of(name, words[1:])
    watch_with(WorkLine())
    return (_named(command.run) if isinstance(command.run, str) else command.run)(words[1:])


def _named(place: str) -> Any:
    """Import what ``module:name`` names, ``module`` within burnish."""
    module, _, name = place.partition(":")
    return getattr(import_module(f"burnish.{module}"), name)


def _explain(error: BaseException, words: Arguments, debug: bool) -> int:
    if isinstance(error, SystemExit):
        raise error
    from burnish.run.recovery.failure import explain_failure

    return explain_failure(error, _output_dir(words), debug)


def _output_dir(words: Arguments) -> str | None:
    """The folder for the traceback of a failure, as far as it is known from arguments that may be wrong."""
    from burnish.run.plan.config_files import read_arguments

    try:
        file, flags = read_arguments(words[1:])
    except (UserError, OSError, RecursionError, MemoryError):  # reading the arguments may be the failure itself
        return None
    given = {**file, **flags}.get("output_dir")
    return str(given.value) if given is not None else None


def _take_debug(words: Arguments) -> bool:
    """Remove a bare ``--debug``, and return whether there was one. ``--debug value`` is an option like others."""
    for position, word in enumerate(words):
        following = words[position + 1 : position + 2]
        if word == "--debug" and (not following or following[0].startswith("--") or "=" in following[0]):
            del words[position]
            return True
    return False


# --- commands ---------------------------------------------------------------------------------------------------------


def _train(words: Arguments) -> int:
    from burnish.run.launch import launch
    from burnish.run.plan.config_files import read_arguments

    file, flags = read_arguments(words)
    status = launch(words, {**file, **flags})
    if status is not None:
        return status
    plan = _plan(words)
    from burnish.run.build import train_run
    from burnish.run.plan.plan import placing

    with placing(plan.provenance):
        return train_run(plan).exit_code or 0


def _explain_run(words: Arguments) -> int:
    if "--json" in words:
        from burnish.explain.as_json import as_json

        text, status = as_json(lambda: _plan([word for word in words if word != "--json"]))
        print_result(text)
        return status
    shows_all = "--all" in words
    plan = _plan([word for word in words if word != "--all"])
    from burnish.explain.explain import explain
    from burnish.parallel.process_counts import world_size
    from burnish.run.plan.plan import placing

    plan = replace(plan, world_size=world_size(plan.options))

    with placing(plan.provenance):
        explain(plan, shows_all)
    return 0


def _export(words: Arguments) -> int:
    from burnish.export.export import export
    from burnish.run.plan.plan import placing, provenance_of
    from burnish.serve.command_line import export_values

    interruptible()  # on an interrupt, an incomplete model is removed

    given = export_values(words)
    with placing(provenance_of(given)):
        export(given)
    return 0


def _planner(words: Arguments) -> int:
    """Answers the page's questions about runs that are not begun; started by it, and by nobody else."""
    from burnish.serve.page.planner_process import planner

    return planner()


def _env(words: Arguments) -> int:
    if words == ["--health"]:
        from burnish.explain.env import health

        return health()
    _refuse_words("env", words)
    from burnish.explain.env import environment

    print_result("\n".join(f"{name:<14}{value}" for name, value in environment().items()))
    return 0


def _version(words: Arguments) -> int:
    _refuse_words("version", words)
    from burnish import __version__

    print_result(f"burnish {__version__}")
    return 0


def _refuse_words(command: str, words: Arguments) -> None:
    if words:
        raise UserError(f"burnish {command} takes no options. Received: {' '.join(words)}.")


def _plan(words: Arguments) -> Plan:
    from burnish.run.plan.config_files import merge, read_arguments

    file, flags = read_arguments(words)  # first, so that faults of the arguments are reported before torch is loaded
    from burnish.run.plan.checks import problems_in_files
    from burnish.run.plan.plan import aliases, plan

    return plan(merge(file, flags, aliases()), also=[problems_in_files])


NEEDED_BY_EXPORT = (
    "model_name_or_path", "adapter_name_or_path", "template", "trust_remote_code", "infer_dtype", "hf_hub_token",
    "export_",
)  # fmt: skip
"""Options that ``burnish export`` reads, by the beginning of their names."""
_RUN = ("run.plan.options:RunOptions",)
_WEB = ("serve.page.options:WebOptions",)
_CHAT = ("models.generate:GenerationOptions", "inference.options:InferOptions")
_PREDICT = (
    "serve.eval.dataset:PredictOptions", "data.options:DataOptions", "models.generate:GenerationOptions",
)  # fmt: skip


@dataclass(frozen=True)
class Command:
    """One command. What it needs is imported when it runs: ``module:name`` stands for it until then.

    Args:
        run: takes the words after the command, and returns an exit status.
        options: the groups that its help lists; beginnings: of the names of those that it reads.
    """

    usage: str
    summary: str
    run: Callable[[Arguments], int] | str
    options: tuple[str, ...] = ()
    beginnings: tuple[str, ...] = ("",)


_RUN_USAGE = "[run.yaml] [key=value ...] [--key value ...]"
COMMANDS: dict[str, Command] = {
    "train": Command(_RUN_USAGE, "fine-tune a model", _train, _RUN),
    "explain": Command(
        f"[--all | --json] {_RUN_USAGE}", "dry run: show what train would do, and why", _explain_run, _RUN
    ),
    "export": Command(
        "[PATH or run.yaml] [key=value ...] [--key value ...]",
        "merge adapters into the base model and save it, also as GGUF, GPTQ or AWQ",
        _export,
        _RUN,
        NEEDED_BY_EXPORT,
    ),
    "api": Command(
        "PATH [--adapter name=folder ...] [key=value ...]",
        "serve a model over HTTP with an OpenAI-compatible API",
        "serve.api.command:api",
        ("serve.api.options:ApiOptions",),
    ),
    "webui": Command(
        "[key=value ...]",
        "web UI: configure and monitor runs, chat with the resulting models",
        "serve.page.command:webui",
        _WEB,
    ),
    "webchat": Command(
        "PATH [key=value ...]", "web UI, opened at a chat with one model", "serve.page.command:webchat", _WEB
    ),
    "runs": Command(
        "[FOLDER ...] [--json]", "list runs under the given folders and their status", "serve.page.runs.listing:runs"
    ),
    "chat": Command(
        "PATH [--adapter name=folder] [--once TEXT] [key=value ...]",
        "chat with a model in the terminal",
        "serve.chat.command:chat",
        _CHAT,
    ),
    "eval": Command(
        "PATH [PATH ...] task=mmlu_test [key=value ...]",
        "evaluate models on a task or a dataset",
        "serve.eval.command:evaluate",
        ("serve.eval.command:EvalOptions",),
    ),
    "predict": Command(
        "PATH [PATH ...] [eval_dataset=heldout] [key=value ...]",
        "generate a model's responses to a dataset, or score it with a reward model",
        "serve.eval.dataset:predict_sets",
        _PREDICT,
    ),
    "demo": Command(
        "[dpo | grpo | picture] [key=value ...] [--key value ...]",
        "fine-tune a small model in minutes; dpo: with preferences; grpo: with rewards; picture: on images",
        "demo.command:demo",
        _RUN,
    ),
    "env": Command("[--health]", "print versions and devices (for bug reports)", _env),
    "version": Command("", "print the version of burnish", _version),
}


def _unknown(name: str) -> Problem:
    if name.endswith((".yaml", ".yml", ".json")):
        return Problem(f'"{name}" is a file, not a command.', remedy=f"Try: burnish train {name}")
    if name.startswith("--") or "=" in name:
        return Problem(
            f'The first argument must be a command. Received: "{name}".', remedy=f"Try: burnish train {name} ..."
        )
    return Problem(f'Unknown command "{name}".{did_you_mean(name, COMMANDS)}', remedy=f"Known: {', '.join(COMMANDS)}.")


# --- help -------------------------------------------------------------------------------------------------------------


def _help() -> str:
    from burnish import __version__

    rows = "".join(f"  {name:<9}{command.summary}\n" for name, command in COMMANDS.items())
    return (
        f"burnish {__version__}: fine-tunes transformer models\n\n"
        f"usage: burnish <command> {_RUN_USAGE}\n\n{rows}\n"
        "Options have the names of LLaMA-Factory and transformers. The command line overrides the YAML file.\n\n"
        "  burnish train --help            list every option, by component\n"
        "  burnish train --help warmup     list options whose name or description contains a word\n"
        "  burnish explain --all           also show the callbacks of each event\n"
        "  --debug                         print the traceback of an error\n"
    )


def _purpose(command: str) -> str:
    """The purpose of a command, and its usage."""
    told = COMMANDS[command]
    return f"burnish {command}: {told.summary}\n\nusage: burnish {command} {told.usage}".rstrip()


def _tell_of(command: str, words: Arguments) -> int:
    """Print what a command does, and its options: all of them, or those that speak of the first word."""
    print_result(_purpose(command))
    if groups := COMMANDS[command].options:
        from burnish.config.options import union
        from burnish.run.plan.config_files import CONFIG_SUFFIXES
        from burnish.run.plan.listing import list_options

        wanted = [word for word in words if not (word.startswith("-") or "=" in word or word.endswith(CONFIG_SUFFIXES))]
        options = _named(groups[0]) if len(groups) == 1 else union("Options", *map(_named, groups))
        listed = list_options(options, wanted[0] if wanted else "", COMMANDS[command].beginnings)
        print_result(f"\n{listed.rstrip()}")
    return 0
