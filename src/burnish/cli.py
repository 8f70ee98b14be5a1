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
from typing import TYPE_CHECKING

from burnish.core.collection import without_collection
from burnish.core.errors import Problem, UserError, did_you_mean
from burnish.core.sigint import exit_quietly, interruptible, stopping_at_once
from burnish.core.work import watch_with
from burnish.report.console import answer
from burnish.report.work import WorkLine

if TYPE_CHECKING:
    from burnish.app.plan import Plan

Arguments = list[str]


def command(arguments: Sequence[str] | None = None) -> int:
    """Run ``main`` in a process of its own, which may skip Python's search for cyclic garbage until the training
    begins, and at its end, where all memory returns to the system anyway. This saves half a second."""
    with without_collection():
        status = main(arguments)
    gc.freeze()
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
        answer(_help().rstrip())
        return 0
    if words[0] in {"--version", "-V", "version"}:
        return _version(words[1:])
    if words[0] == "_planner":
        return _planner(words[1:])
    command = COMMANDS.get(words[0])
    if command is None:
        raise UserError(_unknown(words[0]))
    watch_with(WorkLine())
    return command.run(words[1:])


def _explain(error: BaseException, words: Arguments, debug: bool) -> int:
    if isinstance(error, SystemExit):
        raise error
    from burnish.app.failure import explain_failure

    return explain_failure(error, _output_dir(words), debug)


def _output_dir(words: Arguments) -> str | None:
    """The folder for the traceback of a failure, as far as it is known from arguments that may be wrong."""
    from burnish.app.config import read_arguments

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
    if _wants_help(words):
        return _list_options("train", words)
    from burnish.app.config import read_arguments
    from burnish.app.launch import launch

    file, flags = read_arguments(words)
    status = launch(words, {**file, **flags})
    if status is not None:
        return status
    plan = _plan(words)
    from burnish.app.build import train_run
    from burnish.app.plan import placing

    with placing(plan.provenance):
        return train_run(plan).exit_code or 0


def _explain_run(words: Arguments) -> int:
    if _wants_help(words):
        return _list_options("explain", words)
    if "--json" in words:
        from burnish.app.explain_json import as_json

        text, status = as_json(lambda: _plan([word for word in words if word != "--json"]))
        answer(text)
        return status
    plan = _plan(words)
    from burnish.app.explain import explain
    from burnish.app.plan import placing
    from burnish.engine.places import world_size

    plan = replace(plan, world_size=world_size(plan.options))

    with placing(plan.provenance):
        explain(plan)
    return 0


def _export(words: Arguments) -> int:
    if _wants_help(words):
        return _list_options("export", words, beginnings=NEEDED_BY_EXPORT)
    from burnish.app.config import merge, read_arguments

    file, flags = read_arguments(words)
    from burnish.app.export import export
    from burnish.app.plan import aliases, placing, provenance_of

    interruptible()  # on an interrupt, an incomplete model is removed

    given = merge(file, flags, aliases())
    with placing(provenance_of(given)):
        export(given)
    return 0


def _api(words: Arguments) -> int:
    if _wants_help(words):
        from burnish.serve.options import ApiOptions

        return _list_options("api", words, ApiOptions)
    from burnish.serve.api import api

    return api(words)


def _runs(words: Arguments) -> int:
    if _wants_help(words):
        answer(_purpose("runs"))
        return 0
    from burnish.web.listing import runs

    return runs(words)


def _webui(words: Arguments) -> int:
    if _wants_help(words):
        from burnish.web.options import WebOptions

        return _list_options("webui", words, WebOptions)
    from burnish.web.command import webui

    return webui(words)


def _webchat(words: Arguments) -> int:
    if _wants_help(words):
        from burnish.web.options import WebOptions

        return _list_options("webchat", words, WebOptions)
    from burnish.web.command import webchat

    return webchat(words)


def _planner(words: Arguments) -> int:
    """Answers the page's questions about runs that are not begun; started by it, and by nobody else."""
    from burnish.app.explain_json import planner

    return planner()


def _chat(words: Arguments) -> int:
    if _wants_help(words):
        from burnish.core.options import union
        from burnish.infer.options import InferOptions
        from burnish.models.generate import GenerationOptions

        return _list_options("chat", words, union("ChatOptions", GenerationOptions, InferOptions))
    from burnish.serve.terminal.chat import chat

    return chat(words)


def _eval(words: Arguments) -> int:
    if _wants_help(words):
        from burnish.serve.evaluate.command import EvalOptions

        return _list_options("eval", words, EvalOptions)
    from burnish.serve.evaluate.command import evaluate

    return evaluate(words)


def _predict(words: Arguments) -> int:
    if _wants_help(words):
        from burnish.core.options import union
        from burnish.data.options import DataOptions
        from burnish.models.generate import GenerationOptions
        from burnish.serve.evaluate.dataset import PredictOptions

        return _list_options("predict", words, union("Options", PredictOptions, DataOptions, GenerationOptions))
    from burnish.serve.evaluate.dataset import predict

    return predict(words)


def _demo(words: Arguments) -> int:
    if _wants_help(words):
        return _list_options("demo", words)
    from burnish.app.demo import demo

    return demo(words)


def _env(words: Arguments) -> int:
    if _wants_help(words):
        answer(_purpose("env"))
        return 0
    if words == ["--health"]:
        from burnish.app.health import health

        return health()
    _refuse_words("env", words)
    from burnish.app.env import environment

    answer("\n".join(f"{name:<14}{value}" for name, value in environment().items()))
    return 0


def _version(words: Arguments) -> int:
    if _wants_help(words):
        answer(_purpose("version"))
        return 0
    _refuse_words("version", words)
    from burnish import __version__

    answer(f"burnish {__version__}")
    return 0


def _refuse_words(command: str, words: Arguments) -> None:
    if words:
        raise UserError(Problem(f"burnish {command} takes no options. Received: {' '.join(words)}."))


def _plan(words: Arguments) -> Plan:
    from burnish.app.config import merge, read_arguments

    file, flags = read_arguments(words)  # first, so that faults of the arguments are reported before torch is loaded
    from burnish.app.checks import problems_in_files
    from burnish.app.plan import aliases, plan

    return plan(merge(file, flags, aliases()), also=[problems_in_files])


@dataclass(frozen=True)
class Command:
    usage: str
    summary: str
    run: Callable[[Arguments], int]


_RUN_USAGE = "[run.yaml] [key=value ...] [--key value ...]"
COMMANDS: dict[str, Command] = {
    "train": Command(_RUN_USAGE, "fine-tune a model", _train),
    "explain": Command(_RUN_USAGE, "say what train would do, and why, before it does it", _explain_run),
    "export": Command(_RUN_USAGE, "merge adapters into their model and write it for use elsewhere", _export),
    "api": Command("PATH [--adapter name=folder ...] [key=value ...]", "answer over HTTP, as OpenAI's API does", _api),
    "webui": Command("[key=value ...]", "the page: set runs up, watch them, talk to what came of them", _webui),
    "webchat": Command("PATH [key=value ...]", "the page, opened at a conversation with one model", _webchat),
    "runs": Command("[FOLDER ...] [--json]", "the runs below some folders, and how they are", _runs),
    "chat": Command(
        "PATH [--adapter name=folder] [--once TEXT] [key=value ...]", "talk to a model at a terminal", _chat
    ),
    "eval": Command("PATH [PATH ...] task=mmlu_test [key=value ...]", "measure models on a task or a data set", _eval),
    "predict": Command(
        "PATH [PATH ...] [eval_dataset=heldout] [key=value ...]",
        "write a model's answers, or a reward model's scores, to a data set",
        _predict,
    ),
    "demo": Command(
        "[dpo] [key=value ...] [--key value ...]",
        "fine-tune the small model that burnish carries, in two minutes; dpo: from pairs of answers",
        _demo,
    ),
    "env": Command("[--health]", "versions and devices, for a report of a fault", _env),
    "version": Command("", "the version of burnish", _version),
}


def _unknown(name: str) -> Problem:
    if name.endswith((".yaml", ".yml", ".json")):
        return Problem(f'"{name}" is a file, not a command.', remedy=f"Try: burnish train {name}")
    if name.startswith("--") or "=" in name:
        return Problem(f'A command comes first. Received: "{name}".', remedy=f"Try: burnish train {name} ...")
    return Problem(
        f'There is no command "{name}".{did_you_mean(name, COMMANDS)}', remedy=f"Known: {', '.join(COMMANDS)}."
    )


# --- help -------------------------------------------------------------------------------------------------------------


def _help() -> str:
    from burnish import __version__

    rows = "".join(f"  {name:<9}{command.summary}\n" for name, command in COMMANDS.items())
    return (
        f"burnish {__version__}: fine-tunes transformer models\n\n"
        f"usage: burnish <command> {_RUN_USAGE}\n\n{rows}\n"
        "Options are LLaMA-Factory's and transformers', in a YAML file or on the command line, which wins:\n"
        "  burnish train --help            every option, by component\n"
        "  burnish train --help warmup     the options whose name or help holds that word\n"
        "  --debug                         print the traceback of a failure\n"
    )


def _purpose(command: str) -> str:
    """The purpose of a command, and its usage."""
    told = COMMANDS[command]
    return f"burnish {command}: {told.summary}\n\nusage: burnish {command} {told.usage}".rstrip()


def _wants_help(words: Arguments) -> bool:
    return "--help" in words or "-h" in words


NEEDED_BY_EXPORT = (
    "model_name_or_path", "adapter_name_or_path", "template", "trust_remote_code", "infer_dtype", "hf_hub_token",
    "export_",
)  # fmt: skip
"""Options that ``burnish export`` reads, by the beginning of their names."""


def _list_options(
    command: str, words: Arguments, options: type | None = None, beginnings: Sequence[str] = ("",)
) -> int:
    """Print what a command does and its options: of a run, or those of ``options``; by the beginning of their names."""
    from burnish.app.config import CONFIG_SUFFIXES
    from burnish.app.listing import list_options

    if options is None:
        from burnish.app.options import RunOptions

        options = RunOptions
    wanted = [word for word in words if not (word.startswith("-") or "=" in word or word.endswith(CONFIG_SUFFIXES))]
    answer(f"{_purpose(command)}\n")
    answer(list_options(options, wanted[0] if wanted else "", beginnings).rstrip())
    return 0
