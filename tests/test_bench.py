"""Tests of the benchmarks: ratios and tables, sections of the document, and that disabling optimizations changes no
loss."""

import json
import re
import sys
import time
from pathlib import Path

import document
import figures
import gauge
import material
import optimizations
import pack
import processes
import pytest
import resume
import settings
import torch

import run
from burnish.config.options import RawValue
from burnish.kernels import attention
from burnish.kernels.cpu import buffer_pool
from burnish.kernels.tied import TIED
from burnish.models.patches.fused import ACTIVATION, ATTENTION, GATED, LINEAR, NORM
from burnish.parallel import single as base
from burnish.run import build
from burnish.run.plan.plan import plan
from small_run import make_workspace
from tiny_models import tiny_model
from trainer_run import make_trainer

pytestmark = pytest.mark.run

ROOT = Path(__file__).parents[1]
ROUNDS = [
    {"TRL, default": {"labels": 100, "cpu_s": 10.0}, "burnish, bf16": {"labels": 100, "cpu_s": 2.0}},
    {"TRL, default": {"labels": 100, "cpu_s": 40.0}, "burnish, bf16": {"labels": 100, "cpu_s": 4.0}},
    {"TRL, default": {"failed": "no memory"}, "burnish, bf16": {"labels": 100, "cpu_s": 1.0}},
]


def test_ratios_compare_settings_of_one_round_and_include_the_spread():
    # 10 / 2 and 40 / 4; the round in which one of the two failed is skipped.
    assert figures.ratios(ROUNDS, "burnish, bf16", "TRL, default", figures.speed) == "7.50 (5.00 to 10.00)"
    assert figures.ratios(ROUNDS[:1], "burnish, bf16", "TRL, default", figures.speed) == "5.00"
    assert figures.ratios(ROUNDS[2:], "burnish, bf16", "TRL, default", figures.speed) == "-"


def test_table_marks_failed_settings_and_missing_values():
    columns = {
        "rate": figures.median_cell(ROUNDS[2:], figures.speed, ".0f"), "loss": figures.median_cell(ROUNDS[2:], "loss")
    }  # fmt: skip
    lines = figures.table(ROUNDS[2:], columns).splitlines()
    assert lines[0].count("|") == lines[1].count("|") == 4
    assert lines[2:] == ["| TRL, default | failed | failed |", "| burnish, bf16 | 100 | - |"]


def test_later_rounds_run_only_settings_needed_for_ratios():
    from measuring import names_for_ratios

    every = settings.trainings("full", {"longest": 1024, "longest_row": 500, "tokens": 4000, "rows": 24})
    first = {s.name: {"labels": 10, "cpu_s": 1.0, "peak_bytes": 5e9} for s in every}
    first["TRL, packing, no checkpointing"]["cpu_s"] = 0.5
    first["LLaMA-Factory, bf16"] = {"failed": "no memory"}
    chosen = names_for_ratios(first, every)
    assert {settings.BASE, settings.OURS, "TRL, packing, no checkpointing"} <= chosen
    assert not chosen & {"TRL, padding-free, no checkpointing", "LLaMA-Factory, bf16", "burnish, float32"}


def test_float32_settings_do_not_use_bfloat16():
    facts = {"longest": 1024, "longest_row": 500, "tokens": 4000, "rows": 24}
    for method in ("full", "lora"):
        originals = (settings.trainings(method, facts), settings.preference_settings("dpo", method))
        for result in (*map(settings.in_float32, originals), settings.grpo_settings(64, is_float32=True)):
            assert [s.name for s in result].count(settings.OURS_FLOAT32) == 1
            assert {s.processor for s in result} == {"avx2"}
            assert not [item for s in result for item in s.command if "bfloat16" in item or item.lower() == "bf16=true"]
            # TRL's configs use bfloat16 by default
            assert all("bf16=False" in s.command for s in result if s.command[:2] == ("train_peer.py", "trl"))


# --- parts and the document -------------------------------------------------------------------------------------------


def test_every_part_has_a_section_and_is_listed_in_the_document():
    text = (ROOT / "docs" / "benchmarks.md").read_text()
    result = re.findall(r"<!-- (\S+): made by make bench -->\n.*?<!-- end of (\S+) -->", text, re.DOTALL)
    assert {begin for begin, _ in result} == {*run.PARTS, "times"}
    assert all(begin == end for begin, end in result)
    before = text[: text.index("## ")]
    assert all(f"`{name}`" in before or f'"{name} ' in before for name in run.PARTS)


def test_writing_a_section_changes_only_the_text_between_its_markers(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "# Title\n<!-- a: made by make bench -->\nold\n<!-- end of a -->\n"
        "by hand\n<!-- b: made by make bench -->\n<!-- end of b -->\n"
    )
    document.write_section("b", "new", page)
    assert page.read_text() == (
        "# Title\n<!-- a: made by make bench -->\nold\n<!-- end of a -->\n"
        "by hand\n<!-- b: made by make bench -->\nnew\n<!-- end of b -->\n"
    )


def test_long_parts_run_only_if_requested_by_name():
    assert "train" in run.parts_of([])
    assert not {"other", "large-lora"} & set(run.parts_of([]))
    assert run.parts_of(["all"]) == list(run.PARTS)
    assert run.parts_of(["other"]) == ["other"]


def test_duration_is_reported_in_total_and_by_part():
    assert run.times({"train": (160.4, 300.0), "lora": (80.0, 150.0)}) == (
        "It took 4:00 minutes; with processor seconds in parentheses: train 160 s (300), lora 80 s (150)."
    )


def test_section_contains_the_command_that_reproduces_it():
    rounds = [{"a": {"versions": {"torch": "2"}}, "b": {"versions": {"torch": "1", "trl": "1"}}, "c": {"failed": ""}}]
    line = document.provenance(rounds, ["lora", "--rounds", "3"], count=1)
    assert line.endswith('; 1 round; torch 1 and 2, trl 1. Reproduce with: `make bench WHAT="lora --rounds 3"`.')


def test_flag_overrides_one_option_of_the_material_of_a_part(monkeypatch):
    import argparse

    parser = argparse.ArgumentParser()
    material.add_arguments(parser)
    arguments = parser.parse_args(["--layers", "24"])
    arguments.rounds = None
    part_run = run.PartRun(run.PARTS["large"], arguments, bench=None)
    assert part_run.material == material.Material(size="large", layers=24, rows=16, longest=256)


# --- what is measured -------------------------------------------------------------------------------------------------


def test_large_dataset_is_written_once(tmp_path):
    path = material.make_large_dataset(30, tmp_path)
    lines = path.read_text().splitlines()
    assert [json.loads(line) for line in lines] == material.conversations(30)
    path.write_text("kept")
    assert material.make_large_dataset(30, tmp_path).read_text() == "kept"


def test_start_measurement_ends_at_the_first_step(monkeypatch, capsys):
    monkeypatch.setenv(gauge.ENDS_AT_FIRST_STEP, "1")
    with pytest.raises(SystemExit):
        gauge.Gauge().on_step_begin()
    printed = json.loads(capsys.readouterr().out.removeprefix(gauge.MARK))
    assert printed["ready_cpu_s"] > 0
    assert printed["ready_peak_bytes"] >= printed["ready_bytes"] * 0.9 > 0


def test_counting_labels_overrides_no_method_of_a_trainer(tmp_path):
    trainer = make_trainer(
        tmp_path, model=tiny_model(), train=[{"input_ids": [1, 2, 3], "labels": [1, 2, 3]}] * 4, max_steps=2
    )
    own = gauge.Gauge()
    own.count_trainer_labels(trainer)
    trainer.train()
    assert not trainer.loss_is_scripted
    assert own.labels > 0


@pytest.mark.slow
def test_engine_is_measured_without_a_server():
    import generation

    measured = generation.engine_alone()
    assert measured.keys() == {"small_token_s", "small_token_cpu_s", "slot_bytes_per_token"}
    assert min(measured.values()) > 0


def test_prediction_is_measured_from_the_end_of_training(monkeypatch):
    meter = gauge.Gauge()
    meter.trained_cpu_s = 5.0
    monkeypatch.setattr(gauge.time, "process_time", lambda: 7.5)
    meter.on_predict(64)
    assert (meter.more["prediction_cpu_s"], meter.more["new_tokens"]) == (2.5, 64)


def test_reported_share_of_filled_packs_is_correct(capsys):
    pack.main(["burnish", "--rows", "300", "--median", "40"])
    printed = json.loads(capsys.readouterr().out.removeprefix(gauge.MARK))
    each = pack.lengths(300, 40, 512)
    fewest = -(-sum(each) // 512)
    assert sum(each) / ((fewest + 1) * 512) <= printed["filled_512"] <= sum(each) / (fewest * 512)


def test_resumed_epoch_continues_with_the_next_batch():
    first, later = (resume.burnish(resume.Rows(1000), step).batches[0]["input_ids"] for step in (0, 40))
    order = torch.randperm(1000, generator=torch.Generator().manual_seed(17)).tolist()
    assert first[0, ::32].tolist() == order[:8]
    assert later[0, ::32].tolist() == order[320:328]


# --- optimizations ---------------------------------------------------------------------------------------------------


def test_optimization_settings_start_with_all_disabled_and_end_with_none():
    first, *_, last = settings.optimization_settings()
    assert set(_options(first)["without"].split(",")) == set(optimizations.DISABLE)
    assert set(_options(first)["leave_out"].split(",")) == {patch.kind for patch in PATCHES} - {"attention layer"}
    assert {"fused_loss": "false", "padding_free": "false", "optim": "adamw_torch"}.items() <= _options(first).items()
    assert _options(last) == {"bf16": "true", "num_train_epochs": "1.01", "without": ""}


def _options(setting):
    return dict(item.split("=", 1) for item in setting.command[3:])


PLAIN = {"patches": False,
         "padding_free": False, "fused_loss": False, "attn_implementation": "sdpa", "optim": "adamw_torch",
         "needed_tokens_only": False}  # fmt: skip
PATCHES = (NORM, GATED, ACTIVATION, ATTENTION, LINEAR, TIED)
FUNCTIONS = {
    "attention": [(attention, "is_half_on_cpu")], "memory": [(base, "keep_freed_memory"), (buffer_pool, "empty")],
}  # fmt: skip


@pytest.fixture
def disabled(monkeypatch):
    """A function that returns the names of disabled optimizations. They are enabled again after the test."""
    previous = {name: [getattr(owner, name) for owner, name in functions] for name, functions in FUNCTIONS.items()}
    for owner, name in (function for functions in FUNCTIONS.values() for function in functions):
        monkeypatch.setattr(owner, name, getattr(owner, name))
    return lambda: {
        name for name in FUNCTIONS if [getattr(owner, name) for owner, name in FUNCTIONS[name]] != previous[name]
    }


@pytest.mark.parametrize("name", optimizations.DISABLE)
def test_disabling_one_optimization_keeps_the_others(disabled, name):
    optimizations.disable([name])
    assert disabled() == {name}


def test_disabled_optimizations_change_no_loss(tmp_path, monkeypatch, disabled):
    monkeypatch.setenv("BURNISH_CACHE", str(tmp_path / "cache"))
    expected = _loss(tmp_path / "usual", {})
    optimizations.disable(optimizations.DISABLE)
    assert disabled() == set(optimizations.DISABLE)
    assert _loss(tmp_path / "plain", PLAIN) == pytest.approx(expected, abs=2e-6)  # float32, another order of sums


def _loss(folder, overrides):
    """Return the mean loss of three steps in float32."""
    folder.mkdir()
    options = make_workspace(folder, max_steps=3, template="qwen", **overrides)
    planned = plan({name: RawValue(value, "the command line") for name, value in options.items()})
    return build.train_run(planned).output.training_loss


# --- several processes ------------------------------------------------------------------------------------------------


def test_measurements_of_two_processes_are_combined():
    rank = {"labels": 10, "cpu_s": 2.0, "process_cpu_s": 3.0, "peak_bytes": 5, "steps_peak_bytes": 4, "ends_s": 0.5,
            "wall_s": 4.0, "waited_s": 1.0, "save_waits_s": [0.1], "loss": 7.0}  # fmt: skip
    other = {**rank, "labels": 20, "peak_bytes": 9, "waited_s": 0.0, "save_waits_s": [0.3]}
    result = processes.combine([rank, other])
    assert (result["labels"], result["cpu_s"], result["peak_bytes"], result["save_waits_s"]) == (30, 4.0, 9, [0.3])
    assert result["waited_share"] == pytest.approx(1 / 8)


def test_failed_process_stops_the_others_and_its_output_is_kept():
    script = "import os, sys, time; os.environ['RANK'] == '1' and sys.exit('no rows'); time.sleep(60)"
    began = time.monotonic()
    with pytest.raises(RuntimeError, match=r"rank 1: no rows"):
        processes.outputs(2, [sys.executable, "-c", script])
    assert time.monotonic() - began < 30
