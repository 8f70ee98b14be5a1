"""The command line: ``burnish <command> [run.yaml] [key=value ...] [--key value ...]``.

In: the words after ``burnish``. Out: an exit status, 0 for done, 2 for something the user gave that is wrong (options,
data, models, folders), 1 for what the machine did wrong, 128 + signal where a signal ended it.

This file imports nothing heavy, so that ``burnish --help`` answers at once: each command imports what it needs.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from burnish.core.collection import without_collection
from burnish.core.errors import Problem, UserError, did_you_mean

if TYPE_CHECKING:
    from burnish.app.plan import Plan

Arguments = list[str]


def command(arguments: Sequence[str] | None = None) -> int:
    """``main`` as all that its process does, so that the process may leave Python's search for cyclic garbage out until
    the training begins, and at its own end, where the memory goes back to the system without it: half a second."""
    with without_collection():
        status = main(arguments)
    gc.freeze()
    return status


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Every exception becomes a sentence and an exit status here, and nowhere else."""
    # GNU OpenMP's threads spin while they wait for each other. On a machine that does something else too they spin in
    # each other's way: ten times slower was measured on two busy cores. It is read when torch is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    words = list(sys.argv[1:] if arguments is None else arguments)
    debug = _take_debug(words)
    try:
        return _run(words)
    except BaseException as error:  # the outermost frame: what is not explained here would be a traceback for the user
        return _explain(error, words, debug)


def _run(words: Arguments) -> int:
    if not words or words[0] in {"--help", "-h", "help"}:
        print(_help(), end="")
        return 0
    if words[0] in {"--version", "-V", "version"}:
        return _version(words[1:])
    command = COMMANDS.get(words[0])
    if command is None:
        raise UserError(_unknown(words[0]))
    return command.run(words[1:])


def _explain(error: BaseException, words: Arguments, debug: bool) -> int:
    if isinstance(error, SystemExit):
        raise error
    from burnish.app.failure import explain_failure

    return explain_failure(error, _output_dir(words), debug)


def _output_dir(words: Arguments) -> str | None:
    """Where the traceback of a failure may be written, as far as it can be known from arguments that may be wrong."""
    from burnish.app.config import read_arguments

    try:
        file, flags = read_arguments(words[1:])
    except UserError:
        return None
    given = {**file, **flags}.get("output_dir")
    return str(given.value) if given is not None else None


def _take_debug(words: Arguments) -> bool:
    """Whether a bare ``--debug`` asks for tracebacks; it is taken out. ``--debug value`` is an option like others."""
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
    plan = _plan(words)
    from burnish.app.build import train_run
    from burnish.app.plan import placing

    with placing(plan.provenance):
        return train_run(plan).exit_code or 0


def _explain_run(words: Arguments) -> int:
    if _wants_help(words):
        return _list_options("explain", words)
    plan = _plan(words)
    from burnish.app.explain import explain
    from burnish.app.plan import placing

    with placing(plan.provenance):
        explain(plan)
    return 0


def _export(words: Arguments) -> int:
    if _wants_help(words):
        return _list_options("export", [*words, "export_"])
    from burnish.app.config import merge, read_arguments

    file, flags = read_arguments(words)
    from burnish.app.export import export
    from burnish.app.plan import aliases, placing, provenance_of

    given = merge(file, flags, aliases())
    with placing(provenance_of(given)):
        export(given)
    return 0


def _demo(words: Arguments) -> int:
    if _wants_help(words):
        return _list_options("demo", words)
    from burnish.app.demo import demo

    return demo(words)


def _env(words: Arguments) -> int:
    _refuse_words("env", words)
    from burnish.app.env import environment

    for name, value in environment().items():
        print(f"{name:<14}{value}")
    return 0


def _version(words: Arguments) -> int:
    _refuse_words("version", words)
    from burnish import __version__

    print(f"burnish {__version__}")
    return 0


def _refuse_words(command: str, words: Arguments) -> None:
    if others := [word for word in words if word not in {"--help", "-h"}]:
        raise UserError(Problem(f"burnish {command} takes no options. Received: {' '.join(others)}."))


def _plan(words: Arguments) -> Plan:
    from burnish.app.config import merge, read_arguments

    file, flags = read_arguments(words)  # first: what is wrong here is said before torch is loaded
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
    "demo": Command(
        "[key=value ...] [--key value ...]", "fine-tune the small model that burnish carries, in two minutes", _demo
    ),
    "env": Command("", "versions and devices, for a report of a fault", _env),
    "version": Command("", "the version of burnish", _version),
}
# Commands of the same kind of tool that burnish does not have yet -> what serves instead.
_NOT_YET = {
    "chat": "Load output_dir with transformers' AutoModelForCausalLM and call generate().",
    "api": "Load output_dir in any server that reads Hugging Face models.",
    "eval": "burnish train evaluates on eval_dataset: do_eval: true does only that.",
    "webui": "Write the options into a YAML file: burnish train --help lists them all.",
    "webchat": "Load output_dir with transformers' AutoModelForCausalLM and call generate().",
}


def _unknown(name: str) -> Problem:
    if name in _NOT_YET:
        return Problem(f'burnish has no command "{name}" yet.', remedy=_NOT_YET[name])
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


def _wants_help(words: Arguments) -> bool:
    return "--help" in words or "-h" in words


def _list_options(command: str, words: Arguments) -> int:
    from burnish.app.config import CONFIG_SUFFIXES
    from burnish.app.listing import list_options
    from burnish.app.plan import RunOptions

    wanted = [word for word in words if not (word.startswith("-") or "=" in word or word.endswith(CONFIG_SUFFIXES))]
    print(f"usage: burnish {command} {COMMANDS[command].usage}\n")
    print(list_options(RunOptions, wanted[0] if wanted else ""), end="")
    return 0
