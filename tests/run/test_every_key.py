"""Every option has its documented effect or reports that it has none; no option is silently ignored.

The tables are in ``option_effects.py``. A run is only executed as far as the compared part requires: rows, parts of the
run, weights and files. An option in neither table fails a test, and so does a named test that does not exist or does
not mention the option.
"""

import ast
import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from burnish.cli import main
from burnish.config.errors import UserError
from burnish.config.options import RawValue, specs
from burnish.models.generate import generation_config
from burnish.parallel.create import create_parallel
from burnish.run import build
from burnish.run.plan.plan import RunOptions, plan
from burnish.run.prepare import prepare
from dataset_helpers import alpaca_record, openai_record, write
from option_effects import OPTION_EFFECTS, TESTED_BY
from small_run import WORDS, make_model

pytestmark = pytest.mark.run


@cache
def sources_of(name: str) -> dict[str, str]:
    """Return the tests of a file: name -> source, including the tables and functions of the file that the test uses."""
    folder, _, file = name.rpartition("/")
    text = (Path(__file__).parents[1] / folder / f"test_{file}.py").read_text(encoding="utf-8")
    lines, sources = text.splitlines(), {}
    for node in ast.parse(text).body:
        first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
        names = [node.name] if isinstance(node, ast.FunctionDef) else [
            target.id for target in getattr(node, "targets", []) if isinstance(target, ast.Name)
        ]  # fmt: skip
        sources.update(dict.fromkeys(names, "\n".join(lines[first - 1 : node.end_lineno])))
    return {
        name: "\n".join([own, *(more for other, more in sources.items() if re.search(rf"\b{other}\b", own))])
        for name, own in sources.items()
        if name.startswith("test_")
    }


def test_every_option_is_in_one_table_and_no_effect_options_in_none():
    known = specs(RunOptions)
    read = {name for name, spec in known.items() if not spec.ignored}
    assert OPTION_EFFECTS.keys() | TESTED_BY.keys() == read
    assert not OPTION_EFFECTS.keys() & TESTED_BY.keys()


@pytest.mark.parametrize("name", TESTED_BY)
def test_named_test_of_each_option_exists_and_mentions_it(name):
    file, _, test = TESTED_BY[name].partition(": ")
    assert f"test_{test}" in sources_of(file)
    assert re.search(rf"\b{name}\b", sources_of(file)[f"test_{test}"])


# --- the runs ---------------------------------------------------------------------------------------------------------

BASE = {
    "model_name_or_path": "model", "dataset": "a.json", "stage": "sft", "finetuning_type": "full", "template": "chatml",
    "cutoff_len": 128, "output_dir": "out", "learning_rate": 1e-3, "lr_scheduler_type": "linear", "max_steps": 3,
    "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "logging_steps": 1, "save_strategy": "no",
    "plot_loss": False, "use_cpu": True, "optim": "adamw_torch",
}  # fmt: skip
TIMES = re.compile("runtime|per_second|flos|time")


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    """Create a folder with two models and some small datasets."""
    folder = tmp_path_factory.mktemp("every_key")
    make_model(folder / "model")
    make_model(folder / "other", seed=1)
    many, few = (
        [alpaca_record(n, " ".join([WORDS[n % 10]] * (1 + n % 5))) for n in numbers]
        for numbers in (range(24), range(6))
    )
    write(folder / "a.json", many)
    write(folder / "b.jsonl", few)
    for place, rows in (("data", many), ("elsewhere", few)):
        write(folder / place / "named.json", rows)
        write(folder / place / "dataset_info.json", {"named": {"file_name": "named.json"}})
    write(folder / "bad.json", [*few, {"instruction": 3, "input": "", "output": "x"}])
    write(folder / "marked.json", [alpaca_record(n, "red <|more|>") for n in range(4)])
    write(folder / "empty.json", [*few, {**alpaca_record(1), "output": ""}])
    write(folder / "texts.jsonl", [{"text": f"{WORDS[n]} " * 30} for n in range(10)])
    talk = [("user", "red"), ("assistant", "green"), ("user", "blue"), ("assistant", "stone")]
    write(folder / "chats.json", [openai_record(*talk)] * 4)
    renamed = [{"who": role[0], "what": words} for role, words in talk]
    write(folder / "renamed.json", [{"talk": renamed}] * 4)
    return folder


class Outcome(dict[str, Any]):
    """The compared parts of one run, as far as it was executed."""


@pytest.fixture(scope="module")
def run_cache() -> dict[str, Outcome]:
    """Cache of runs that several cases compare with."""
    return {}


@pytest.fixture
def outcome(workspace, run_cache, tmp_path, monkeypatch, capfd):
    """Return a function: part, overrides of ``BASE`` -> the parts of that run, up to the requested one."""
    monkeypatch.chdir(workspace)
    monkeypatch.setenv("BURNISH_CACHE", str(workspace / "cache"))

    def run_parts(part: str, run_options: dict[str, Any]) -> Outcome:
        depth = next(d for d, parts in enumerate(PARTS) if part in parts)
        key = f"{depth} {json.dumps(run_options, sort_keys=True)}"
        if key not in run_cache:
            capfd.readouterr()
            overrides = {**BASE, **run_options}
            folder = tmp_path / str(len(run_cache))
            overrides["output_dir"] = str(folder / overrides["output_dir"])
            run_cache[key] = execute(overrides, depth, folder / "out", monkeypatch)
            run_cache[key]["said"] = "".join(capfd.readouterr())
        return run_cache[key]

    return run_parts


PARTS = (
    {"rows", "learned", "evaluated", "steps", "config", "tokenizer", "refused"},
    {"batch", "order", "cuts", "eval batches", "optimizer", "shapes", "dtypes", "generation", "determinism"},
    {"weights", "moved", "log", "rates", "files", "answers", "said"},
)
"""Values that are known after a run is prepared, after it is assembled, and at its end."""


def execute(run_options: dict[str, Any], depth: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Outcome:
    """Return the parts of a run, or only the error message if it is rejected."""
    try:
        planned = plan({name: RawValue(value, "here") for name, value in run_options.items()})
        if depth < 2:
            prepared = prepare(planned)
            result = prepared_parts(prepared)
            return (
                result
                if depth == 0
                else result | assembled_parts(assembled(planned, prepared), planned.options, prepared)
            )
        return finished_parts(planned, folder, monkeypatch)
    except UserError as error:
        return Outcome(refused=str(error))
    finally:
        torch.use_deterministic_algorithms(False)


def assembled(planned, prepared):
    return build.build_loop(planned, prepared, create_parallel(planned.options), None)


def prepared_parts(prepared):
    rows = [row for row in (prepared.rows[n] for n in range(len(prepared.rows))) if row]
    return Outcome(
        refused="",
        rows=[(list(row["input_ids"]), list(row["labels"])) for row in rows],
        learned=[label for row in rows for label in row["labels"] if label != -100],
        evaluated={name: [list(row["input_ids"]) for row in eval_set] for name, eval_set in prepared.eval_rows.items()},
        steps=prepared.steps.max_steps,
        config=prepared.config.to_dict(),
        tokenizer=list(prepared.tokenizer.get_added_vocab()),
    )


def assembled_parts(run, options, prepared):
    model, stream = run.parts["model"].held.model, run.loader
    order = stream.order(0)
    groups = [order[start : start + stream.cut.rows_per_step] for start in (0, stream.cut.rows_per_step)]
    config = generation_config(model, prepared.tokenizer, prepared.template.stop_token_ids(), options)
    return Outcome(
        batch={n: getattr(v, 'tolist', lambda v=v: v)() for n, v in next(stream.step_batches()).batches[0].items()},
        order=order[:12],
        cuts=[[len(part) for part in stream.cut.micro_batches(group, stream.lengths)] for group in groups],
        optimizer={
            "name": type(run.optimizer).__name__,
            "groups": [{k: v for k, v in group.items() if k not in ("params", "param_names")}
                       for group in run.optimizer.param_groups],
        },
        shapes={name: tuple(tensor.shape) for name, tensor in run.parts["model"].state_dict().items()},
        dtypes={str(p.dtype) for p in model.parameters()},
        generation=config.to_dict(),
        determinism=torch.are_deterministic_algorithms_enabled()
        and not torch.is_deterministic_algorithms_warn_only_enabled(),
        **{"eval batches": [len(part) for some in run.eval_sets.values() for part in some.micro_batches]},
    )  # fmt: skip


def finished_parts(planned, folder, monkeypatch):
    outcomes = []

    def keep(*args):
        run = build_loop(*args)
        outcomes.append((run, {n: t.clone() for n, t in run.parts["model"].state_dict().items()}))
        return run

    build_loop = build.build_loop
    with monkeypatch.context() as patch:
        patch.setattr(build, "build_loop", keep)
        build.train_run(planned)
    ((run, before),) = outcomes
    after = run.parts["model"].state_dict() if planned.options.do_train is not False else {}
    log = [{k: v for k, v in entry.items() if not TIMES.search(k)} for entry in run.state.log_history]
    answers = folder / "generated_predictions.jsonl"
    return Outcome(
        refused="",
        weights={name: tensor.tolist() for name, tensor in after.items()},
        moved=[name for name, tensor in after.items() if not torch.equal(tensor, before[name])],
        log=[entry for entry in log if "train_loss" not in entry],
        rates=[entry["learning_rate"] for entry in log if "learning_rate" in entry],
        files=sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if not path.name.startswith(".")),
        answers=[json.loads(line) for line in answers.read_text().splitlines()] if answers.exists() else [],
    )


@pytest.mark.sample(25)
@pytest.mark.parametrize("name", OPTION_EFFECTS)
def test_option_has_its_documented_effect(outcome, name):
    row = OPTION_EFFECTS[name]
    without, with_it = outcome(row.part, row.beside), outcome(row.part, {**row.beside, name: row.value})
    if row.part != "refused":
        assert (without.get("refused", ""), with_it.get("refused", "")) == ("", "")
    assert row.shows(without.get(row.part), with_it.get(row.part))


@pytest.mark.parametrize(
    ("options", "dtype"), [({}, torch.float32), ({"infer_dtype": "bfloat16"}, torch.bfloat16)], ids=["auto", "named"]
)
def test_exported_weights_have_requested_format(workspace, tmp_path, options, dtype):
    from safetensors.torch import load_file

    argv = [f"{key}={value}" for key, value in options.items()]
    out = tmp_path / "whole"
    assert (
        main(["export", f"model_name_or_path={workspace / 'model'}", "template=chatml", f"export_dir={out}", *argv])
        == 0
    )
    assert {tensor.dtype for tensor in load_file(out / "model.safetensors").values()} == {dtype}
