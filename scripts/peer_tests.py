"""Run TRL's tests of its trainers, unchanged and with burnish's trainers instead: tables of docs/parity-*.md.

    python scripts/peer_tests.py FOLDER            # print the tables; FOLDER: a source tree of TRL, with tests/
    python scripts/peer_tests.py FOLDER --write    # write them into the documents
    python scripts/peer_tests.py FOLDER dpo kto    # the tests of some trainers, with the names of failures

TRL and the packages that its tests import (pytest, parameterized) must be installed. The tests use models and datasets
of the hub; small ones are created in the working folder under the same names, so that nothing is downloaded. Names that
the installed TRL no longer has are replaced by stubs, so that only the tests that use them fail.
"""

from __future__ import annotations

import ast
import importlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import unittest
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]
BEGIN, END = "<!-- tests: made by scripts/peer_tests.py -->", "<!-- end of table -->"
FILES = {
    "sft": "parity-sft.md",
    **dict.fromkeys(("dpo", "kto", "reward", "orpo", "cpo", "grpo", "rloo"), "parity-preferences.md"),
}
"""Trainer -> document with its table."""
REPLACED = {"sft": "SFT", "dpo": "DPO", "kto": "KTO", "reward": "Reward", "orpo": "ORPO", "cpo": "CPO", "grpo": "GRPO",
       "rloo": "RLOO"}  # fmt: skip
HUB = "trl-internal-testing"


# --- the plugin of pytest ---------------------------------------------------------------------------------------------


def pytest_configure(config: Any) -> None:
    """Prepare the test process: stubs first, then the replacement of trainers."""
    import transformers

    make_models(Path(HUB))
    make_datasets(Path(HUB))
    on_cpu(transformers.TrainingArguments)
    transformers.logging.set_verbosity_error()
    for file in Path(os.environ["PEER_TESTS"]).glob("tests/test*.py"):
        for module, name in imported(file):
            add_missing_name(module, name)
    if os.environ["TRAINERS_OF"] == "burnish":
        use_burnish()


def on_cpu(arguments: Any) -> None:
    """Set ``use_cpu``; otherwise TRL requires a GPU with bfloat16."""
    original = arguments.__post_init__

    def with_cpu(self: Any) -> None:
        self.use_cpu = True
        original(self)

    arguments.__post_init__ = with_cpu


def imported(file: Path) -> Iterator[tuple[str, str]]:
    """Yield (module, name) of the imports of a file from TRL and from transformers' test utilities."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (
            (node.module or "").split(".")[0] == "trl" or node.module == "transformers.testing_utils"
        ):
            yield from ((str(node.module), alias.name) for alias in node.names)


class StubType(type):
    """Metaclass of stubs for names that the installed TRL no longer has: classes that may be inherited from and fail
    when called. Their attributes are such classes, with a ``value`` like enums."""

    def __getattr__(cls, attribute: str) -> Any:
        if attribute.startswith("_"):
            raise AttributeError(attribute)
        return cls.__name__.lower() if attribute == "value" else stub(attribute)


def stub(name: str) -> type:
    def fail(self: object, *given: Any, **named: Any) -> None:
        raise NotImplementedError(f"{name} is not in the installed TRL")

    return StubType(name, (), {"__init__": fail})


def add_missing_name(module: str, name: str) -> None:
    """Add a missing name to a module: from TRL's experimental part, or else a stub that fails; a ``require_`` decorator
    skips the test."""
    try:
        holder: Any = importlib.import_module(module)
    except ImportError:
        holder = sys.modules[module] = ModuleType(module)
    try:
        getattr(holder, name)
    except (AttributeError, ImportError, RuntimeError):
        if name.startswith("require_"):
            setattr(holder, name, unittest.skip(f"{name} is not in the installed {module}"))
            return
        kind = name.removesuffix("Trainer").removesuffix("Config").lower()
        try:
            setattr(holder, name, getattr(importlib.import_module(f"trl.experimental.{kind}"), name))
        except (AttributeError, ImportError):
            setattr(holder, name, stub(name))


def use_burnish() -> None:
    """Replace TRL's trainers and configs by burnish's."""
    import trl

    import burnish
    from burnish.trainer.trl.sft.collator import DataCollatorForLanguageModeling

    for kind in REPLACED.values():
        for name in (f"{kind}Trainer", f"{kind}Config"):
            setattr(trl, name, getattr(burnish, name))
    importlib.import_module("trl.trainer.sft_trainer").DataCollatorForLanguageModeling = DataCollatorForLanguageModeling  # type: ignore[attr-defined]


def make_models(folder: Path) -> None:
    import torch
    import transformers

    import burnish

    tokenizer = transformers.AutoTokenizer.from_pretrained(Path(burnish.__file__).parent / "demo" / "model")
    sizes = {"vocab_size": len(tokenizer), "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2,
             "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": tokenizer.pad_token_id,
             "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}  # fmt: skip
    experts = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 4}
    models: dict[str, dict[str, Any]] = {
        "Qwen2ForCausalLM-2.5": sizes, "Qwen3ForCausalLM": {**sizes, "head_dim": 4}, "LlamaForCausalLM-3.2": sizes,
        "Qwen3MoeForCausalLM": {**sizes, **experts}, "GPTNeoXForCausalLM": sizes,
        "GptOssForCausalLM": {**sizes, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 4},
        "Qwen2ForSequenceClassification-2.5": {**sizes, "num_labels": 1},
        "Qwen3ForSequenceClassification": {**sizes, "head_dim": 4, "num_labels": 1},
        "LlamaForSequenceClassification-3.2": {**sizes, "num_labels": 1},
        "T5ForConditionalGeneration": {"vocab_size": len(tokenizer), "d_model": 8, "d_ff": 16, "d_kv": 4,
                                       "num_layers": 2, "num_heads": 2, "decoder_start_token_id": 0},
    }  # fmt: skip
    for name, given in models.items():
        kind = name.split("-")[0]
        torch.manual_seed(0)
        config_class = getattr(transformers, kind).config_class
        model_folder = folder / f"tiny-{name}"
        getattr(transformers, kind)(config_class(**given)).save_pretrained(model_folder)
        tokenizer.save_pretrained(model_folder)


def make_datasets(folder: Path) -> None:
    """Create the variants of TRL's dataset ``zen``, with the same names and numbers of rows, and two datasets of
    conversations."""
    others = ("ornate", "dark", "long", "wide", "loud", "dense", "late")
    lines = [f"{word} is better than {other}" for word in ("Plain", "Clear", "Short") for other in others][:19]
    cut = [(line[: line.index("better")], line[line.index("better") :], "worse.") for line in lines]

    def message(role: str, text: str) -> list[dict[str, str]]:
        return [{"role": role, "content": text}]

    def asked(text: str) -> list[dict[str, str]]:
        return message("user", f"What is {text.split()[0]}?")

    answers = [(asked(line), message("assistant", line), message("assistant", "No.")) for line in lines]
    standard = {
        "language_modeling": [{"text": line} for line in lines],
        "prompt_only": [{"prompt": p} for p, _, _ in cut],
        "prompt_completion": [{"prompt": p, "completion": c} for p, c, _ in cut],
        "preference": [{"prompt": p, "chosen": c, "rejected": r} for p, c, r in cut],
        "implicit_prompt_preference": [{"chosen": p + c, "rejected": p + r} for p, c, r in cut],
        "unpaired_preference": [{"prompt": p, "completion": c, "label": n % 2 == 0} for n, (p, c, _) in enumerate(cut)],
    }
    conversational = {
        "language_modeling": [{"messages": p + c} for p, c, _ in answers],
        "prompt_only": [{"prompt": p} for p, _, _ in answers],
        "prompt_completion": [{"prompt": p, "completion": c} for p, c, _ in answers],
        "preference": [{"prompt": p, "chosen": c, "rejected": r} for p, c, r in answers],
        "implicit_prompt_preference": [{"chosen": p + c, "rejected": p + r} for p, c, r in answers],
        "unpaired_preference": [
            {"prompt": p, "completion": c, "label": n % 2 == 0} for n, (p, c, _) in enumerate(answers)
        ],
    }
    both = (("standard", standard), ("conversational", conversational))
    zen = {f"{prefix}_{name}": rows for prefix, forms in both for name, rows in forms.items()}
    write_dataset(folder / "zen", zen)
    write_dataset(
        folder / "harmony", {name: conversational[name] for name in ("language_modeling", "prompt_completion")}
    )
    write_dataset(
        folder / "toolcall", {"default": [{**row, "tools": "[]"} for row in conversational["language_modeling"]]}
    )


def write_dataset(folder: Path, forms: dict[str, list[dict[str, Any]]]) -> None:
    """Write a folder that ``load_dataset`` reads by the names of its variants, with two test rows each."""
    lines = ["---", "configs:"]
    for name, rows in forms.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        lines += [f"- config_name: {name}", "  data_files:"]
        for split, part in (("train", rows[:-2]), ("test", rows[-2:])):
            (folder / name / f"{split}.jsonl").write_text("\n".join(map(json.dumps, part)))
            lines += [f"  - split: {split}", f"    path: {name}/{split}.jsonl"]
    (folder / "README.md").write_text("\n".join([*lines, "---", ""]))


# --- the two runs -----------------------------------------------------------------------------------------------------


def outcomes(source: Path, trainer: str, backend: str) -> dict[str, str]:
    """Return name of a test -> passed, failed or skipped."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(
            source / "tests", f"{folder}/tests"
        )  # without the package itself, which may have another version
        Path(folder, "tests", "__init__.py").touch()
        environment = {
            **os.environ, "PEER_TESTS": str(source), "TRAINERS_OF": backend, "HF_HUB_OFFLINE": "1",
            "WANDB_MODE": "disabled",
            "PYTHONPATH": os.pathsep.join(
                [str(ROOT / "scripts"), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
            ),
        }  # fmt: skip
        pytest_arguments = ["-p", "peer_tests", "-q", "--tb=native", "--no-header", "-p", "no:cacheprovider",
                            "--junitxml",
                 f"{folder}/found.xml", "-o", "addopts=", "-c", os.devnull, "--rootdir", folder]  # fmt: skip
        file = f"tests/test_{trainer}_trainer.py"
        subprocess.run(
            [sys.executable, "-m", "pytest", *pytest_arguments, file], cwd=folder, env=environment, stdout=sys.stderr
        )
        cases = ElementTree.parse(f"{folder}/found.xml").iter("testcase")  # noqa: S314 - written a line above
        return {case.get("name", ""): next((child.tag for child in case), "passed") for case in cases}


def line_of(source: Path, trainer: str) -> tuple[str, list[str]]:
    """Return a line of the table, and the tests that pass with TRL only."""
    theirs, ours = (outcomes(source, trainer, backend) for backend in ("trl", "burnish"))
    there = [name for name, outcome in theirs.items() if outcome != "skipped"]
    passed = [name for name in there if theirs[name] == "passed"]
    failed_with_burnish = [name for name in passed if ours.get(name) != "passed"]
    num_common = len(passed) - len(failed_with_burnish)
    additional = sum(ours.get(name) == "passed" for name in there if name not in passed)
    return (
        f"| `test_{trainer}_trainer.py` | {len(there)} | {len(passed)} | {num_common} | {additional} |",
        failed_with_burnish,
    )


def main(arguments: list[str]) -> str | None:
    """Run the tests and print or write the tables. Returns an error message or None."""
    names = [word for word in arguments[1:] if word != "--write"]
    if not arguments or not Path(arguments[0], "tests").is_dir():
        return "Expected a source folder of TRL with tests/."
    if unknown := [name for name in names if name not in FILES]:
        return f"Unknown trainer: {', '.join(unknown)}. Expected: {', '.join(FILES)}."
    writes = "--write" in arguments
    if writes and names:
        return "--write replaces entire tables and cannot be combined with names of trainers."
    if writes:  # before the tests, which take minutes
        sys.path.insert(0, str(ROOT / "src"))
        import transformers
        import trl
        from parity_sft import processor, put_into

        installed = f"TRL {trl.__version__}, transformers {transformers.__version__}; {processor()}"
    source, found = Path(arguments[0]).resolve(), dict[str, tuple[str, list[str]]]()
    for trainer in names or FILES:
        found[trainer] = line_of(source, trainer)
        print(found[trainer][0], *found[trainer][1], sep="\n    ", flush=True)
    if not writes:
        return None
    head = "| tests | run | pass on TRL | of these on burnish | on burnish only |\n|---|---|---|---|---|"
    version = source.name.removeprefix("trl-")
    for document in dict.fromkeys(FILES.values()):
        lines = [line for trainer, (line, _) in found.items() if FILES[trainer] == document]
        names_lost = (
            name
            for trainer, (_, failed_with_burnish) in found.items()
            if FILES[trainer] == document
            for name in failed_with_burnish
        )
        missed = [f"`{name}`" for name in dict.fromkeys(names_lost)]
        heading = f"Tests of TRL {version}, on {installed}."
        missed_line = f"Pass on TRL only: {', '.join(missed) or 'none'}."
        put_into(ROOT / "docs" / document, "\n".join([heading, "", head, *lines, "", missed_line]), BEGIN)
    return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
