"""The bench: what it computes of figures, where it writes them, and that what it takes out of burnish moves no loss."""

import json
import re
import sys
import time
from pathlib import Path

import document
import figures
import gauge
import material
import pack
import processes
import pytest
import resume
import run
import settings
import torch
import ways

from burnish.config.options import RawValue
from burnish.kernels import attention
from burnish.kernels.cpu import buffer_pool
from burnish.kernels.tied import TIED
from burnish.models.patches.fused import ACTIVATION, ATTENTION, GATED, LINEAR, NORM
from burnish.parallel import single as base
from burnish.run import build
from burnish.run.plan.plan import plan
from small_run import make_user

pytestmark = pytest.mark.run

ROOT = Path(__file__).parents[1]
ROUNDS = [
    {"TRL, default": {"labels": 100, "cpu_s": 10.0}, "burnish, bf16": {"labels": 100, "cpu_s": 2.0}},
    {"TRL, default": {"labels": 100, "cpu_s": 40.0}, "burnish, bf16": {"labels": 100, "cpu_s": 4.0}},
    {"TRL, default": {"failed": "no memory"}, "burnish, bf16": {"labels": 100, "cpu_s": 1.0}},
]


def test_a_ratio_is_of_one_round_and_says_its_spread():
    # 10 / 2 and 40 / 4; the round in which one of the two failed is in neither.
    assert figures.ratios(ROUNDS, "burnish, bf16", "TRL, default", figures.speed) == "7.50 (5.00 to 10.00)"
    assert figures.ratios(ROUNDS[:1], "burnish, bf16", "TRL, default", figures.speed) == "5.00"
    assert figures.ratios(ROUNDS[2:], "burnish, bf16", "TRL, default", figures.speed) == "-"


def test_a_table_names_what_failed_and_what_was_not_said():
    columns = {
        "rate": figures.amount(ROUNDS[2:], figures.speed, ".0f"), "loss": figures.amount(ROUNDS[2:], "loss")
    }  # fmt: skip
    lines = figures.table(ROUNDS[2:], columns).splitlines()
    assert lines[0].count("|") == lines[1].count("|") == 4
    assert lines[2:] == ["| TRL, default | failed | failed |", "| burnish, bf16 | 100 | - |"]


def test_the_next_round_runs_what_ratios_are_made_of():
    from measuring import compared

    every = settings.trainings("full", {"longest": 1024, "longest_row": 500, "tokens": 4000, "rows": 24})
    first = {s.name: {"labels": 10, "cpu_s": 1.0, "peak_bytes": 5e9} for s in every}
    first["TRL, packing, no checkpointing"]["cpu_s"] = 0.5
    first["LLaMA-Factory, bf16"] = {"failed": "no memory"}
    chosen = compared(first, every)
    assert {settings.BASE, settings.OURS, "TRL, packing, no checkpointing"} <= chosen
    assert not chosen & {"TRL, padding-free, no checkpointing", "LLaMA-Factory, bf16", "burnish, float32"}


def test_settings_in_float32_ask_no_library_for_bfloat16():
    facts = {"longest": 1024, "longest_row": 500, "tokens": 4000, "rows": 24}
    for method in ("full", "lora"):
        for asked in (settings.trainings(method, facts), settings.preferences("dpo", method)):
            found = settings.in_float32(asked)
            assert [s.name for s in found].count(settings.OURS_FLOAT32) == 1
            assert {s.processor for s in found} == {"avx2"}
            assert not [word for s in found for word in s.words if "bfloat16" in word or word.lower() == "bf16=true"]
            # TRL's configs choose bfloat16 themselves where nothing is said
            assert all("bf16=False" in s.words for s in found if s.words[:2] == ("train_peer.py", "trl"))


# --- parts and the document -------------------------------------------------------------------------------------------


def test_every_part_has_its_place_in_the_document_and_its_name_in_the_text():
    text = (ROOT / "docs" / "benchmarks.md").read_text()
    found = re.findall(r"<!-- (\S+): made by make bench -->\n.*?<!-- end of (\S+) -->", text, re.DOTALL)
    assert {begin for begin, _ in found} == {*run.PARTS, "times"}
    assert all(begin == end for begin, end in found)
    before = text[: text.index("## ")]
    assert all(f"`{name}`" in before or f'"{name} ' in before for name in run.PARTS)


def test_a_part_is_written_between_its_markers_and_the_others_stay(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "# Title\n<!-- a: made by make bench -->\nold\n<!-- end of a -->\n"
        "by hand\n<!-- b: made by make bench -->\n<!-- end of b -->\n"
    )
    document.write("b", "new", page)
    assert page.read_text() == (
        "# Title\n<!-- a: made by make bench -->\nold\n<!-- end of a -->\n"
        "by hand\n<!-- b: made by make bench -->\nnew\n<!-- end of b -->\n"
    )


def test_what_takes_long_runs_by_name_alone():
    assert "train" in run.parts_of([])
    assert not {"other", "large-lora"} & set(run.parts_of([]))
    assert run.parts_of(["all"]) == list(run.PARTS)
    assert run.parts_of(["other"]) == ["other"]


def test_the_time_of_a_run_is_said_as_a_whole_and_by_part():
    assert run.times({"train": (160.4, 300.0), "lora": (80.0, 150.0)}) == (
        "It took 4:00 minutes; with processor seconds in parentheses: train 160 s (300), lora 80 s (150)."
    )


def test_a_section_says_how_to_make_it_again_alone():
    rounds = [{"a": {"versions": {"torch": "2"}}, "b": {"versions": {"torch": "1", "trl": "1"}}, "c": {"failed": ""}}]
    said = document.where(rounds, ["lora", "--rounds", "3"], count=1)
    assert said.endswith('; 1 round; torch 1 and 2, trl 1. Reproduce with: `make bench WHAT="lora --rounds 3"`.')


def test_a_flag_changes_one_thing_about_the_rows_of_a_part(monkeypatch):
    import argparse

    parser = argparse.ArgumentParser()
    material.add_flags(parser)
    arguments = parser.parse_args(["--layers", "24"])
    arguments.rounds = None
    asked = run.Asked(run.PARTS["large"], arguments, bench=None)
    assert asked.material == material.Material(size="large", layers=24, rows=16, longest=256)


# --- what is measured -------------------------------------------------------------------------------------------------


def test_many_conversations_are_written_once(tmp_path):
    path = material.many(30, tmp_path)
    lines = path.read_text().splitlines()
    assert [json.loads(line) for line in lines] == material.conversations(30)
    path.write_text("kept")
    assert material.many(30, tmp_path).read_text() == "kept"


def test_a_start_ends_with_the_first_step(monkeypatch, capsys):
    monkeypatch.setenv(gauge.ENDS_AT_FIRST_STEP, "1")
    with pytest.raises(SystemExit):
        gauge.Gauge().on_step_begin()
    said = json.loads(capsys.readouterr().out.removeprefix(gauge.MARK))
    assert said["ready_cpu_s"] > 0
    assert said["ready_peak_bytes"] >= said["ready_bytes"] * 0.9 > 0


def test_what_is_predicted_is_measured_from_the_end_of_the_training(monkeypatch):
    meter = gauge.Gauge()
    meter.trained_cpu_s = 5.0
    monkeypatch.setattr(gauge.time, "process_time", lambda: 7.5)
    meter.on_predict(64)
    assert (meter.more["prediction_cpu_s"], meter.more["new_tokens"]) == (2.5, 64)


def test_packs_are_as_full_as_is_said(capsys):
    pack.main(["burnish", "--rows", "300", "--median", "40"])
    said = json.loads(capsys.readouterr().out.removeprefix(gauge.MARK))
    each = pack.lengths(300, 40, 512)
    fewest = -(-sum(each) // 512)
    assert sum(each) / ((fewest + 1) * 512) <= said["filled_512"] <= sum(each) / (fewest * 512)


def test_a_resumed_epoch_goes_on_with_the_batch_behind_the_step():
    first, later = (resume.burnish(resume.Rows(1000), step).batches[0]["input_ids"] for step in (0, 40))
    order = torch.randperm(1000, generator=torch.Generator().manual_seed(17)).tolist()
    assert first[0, ::32].tolist() == order[:8]
    assert later[0, ::32].tolist() == order[320:328]


# --- burnish's own ways -----------------------------------------------------------------------------------------------


def test_the_table_of_ways_begins_with_all_taken_out_and_ends_with_none():
    first, *_, last = settings.ways()
    assert set(_words(first)["without"].split(",")) == set(ways.WAYS)
    assert set(_words(first)["leave_out"].split(",")) == {why.kind for why in KINDS} - {"attention layer"}
    assert {"fused_loss": "false", "padding_free": "false", "optim": "adamw_torch"}.items() <= _words(first).items()
    assert _words(last) == {"bf16": "true", "num_train_epochs": "1.01", "without": ""}


def _words(setting):
    return dict(word.split("=", 1) for word in setting.words[3:])


PLAIN = {"patches": False,
         "padding_free": False, "fused_loss": False, "attn_implementation": "sdpa", "optim": "adamw_torch",
         "needed_tokens_only": False}  # fmt: skip
KINDS = (NORM, GATED, ACTIVATION, ATTENTION, LINEAR, TIED)
OWN = {
    "attention": [(attention, "is_half_on_cpu")], "memory": [(base, "keep_freed_memory"), (buffer_pool, "empty")],
}  # fmt: skip


@pytest.fixture
def own(monkeypatch):
    """Names of burnish's own ways that are taken out; they are put back behind the test."""
    before = {way: [getattr(owner, name) for owner, name in functions] for way, functions in OWN.items()}
    for owner, name in (function for functions in OWN.values() for function in functions):
        monkeypatch.setattr(owner, name, getattr(owner, name))
    return lambda: {way for way in OWN if [getattr(owner, name) for owner, name in OWN[way]] != before[way]}


@pytest.mark.parametrize("way", ways.WAYS)
def test_a_way_is_taken_out_alone(own, way):
    ways.take_out([way])
    assert own() == {way}


def test_what_is_taken_out_changes_no_loss(tmp_path, monkeypatch, own):
    monkeypatch.setenv("BURNISH_CACHE", str(tmp_path / "cache"))
    usual = _loss(tmp_path / "usual", {})
    ways.take_out(ways.WAYS)
    assert own() == set(ways.WAYS)
    assert _loss(tmp_path / "plain", PLAIN) == pytest.approx(usual, abs=2e-6)  # float32, another order of sums


def _loss(folder, options):
    """The mean loss of three steps in float32."""
    folder.mkdir()
    given = make_user(folder, max_steps=3, template="qwen", **options)
    made = plan({name: RawValue(value, "the command line") for name, value in given.items()})
    return build.train_run(made).output.training_loss


# --- several processes ------------------------------------------------------------------------------------------------


def test_figures_of_two_processes_are_those_of_one_training():
    rank = {"labels": 10, "cpu_s": 2.0, "process_cpu_s": 3.0, "peak_bytes": 5, "steps_peak_bytes": 4, "ends_s": 0.5,
            "wall_s": 4.0, "waited_s": 1.0, "save_waits_s": [0.1], "loss": 7.0}  # fmt: skip
    other = {**rank, "labels": 20, "peak_bytes": 9, "waited_s": 0.0, "save_waits_s": [0.3]}
    found = processes.joined([rank, other])
    assert (found["labels"], found["cpu_s"], found["peak_bytes"], found["save_waits_s"]) == (30, 4.0, 9, [0.3])
    assert found["waited_share"] == pytest.approx(1 / 8)


def test_a_process_that_fails_ends_the_others_and_its_words_are_kept():
    script = "import os, sys, time; os.environ['RANK'] == '1' and sys.exit('no rows'); time.sleep(60)"
    began = time.monotonic()
    with pytest.raises(RuntimeError, match=r"rank 1: no rows"):
        processes.outputs(2, [sys.executable, "-c", script])
    assert time.monotonic() - began < 30
