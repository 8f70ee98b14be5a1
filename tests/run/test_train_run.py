"""Training runs through the command line, from input files to output files."""

import gc
import json
import math
import os
import re
import signal
import subprocess
import sys
import time

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from burnish.cli import main
from burnish.loop.meter import Meter
from burnish.utils.collection import collect_garbage_rarely
from representative import representative_slow
from run_outputs import KILLS_ITSELF_AFTER_STEP_FIVE, history, same_weights, weights_in
from small_run import as_arguments, make_workspace, records

pytestmark = pytest.mark.run


def run(options, command="train"):
    return main([command, *as_arguments(options)])


def test_full_run_saves_transformers_model_and_expected_files(tmp_path):
    options = make_workspace(
        tmp_path, val_size=0.25, eval_strategy="steps", eval_steps=4, include_num_input_tokens_seen=True
    )
    assert run({**options, "plot_loss": True}) == 0
    out = tmp_path / "out"
    expected = {
        "model.safetensors", "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
        "chat_template.jinja", "trainer_log.jsonl", "trainer_state.json", "train_results.json", "eval_results.json",
        "all_results.json", "training_loss.png", "training_eval_loss.png", "README.md", "checkpoint-10",
    }  # fmt: skip
    assert expected <= {path.name for path in out.iterdir()}
    assert AutoModelForCausalLM.from_pretrained(out).num_parameters() > 10_000
    assert AutoTokenizer.from_pretrained(out).chat_template
    results = json.loads((out / "all_results.json").read_text())
    assert {"epoch", "eval_loss", "eval_runtime", "num_input_tokens_seen", "total_flos", "train_loss",
            "train_runtime", "train_samples_per_second", "train_steps_per_second"} <= results.keys()  # fmt: skip
    losses = [entry["loss"] for entry in history(out) if "loss" in entry]
    assert losses[-1] < losses[0]


def test_reference_cycles_are_collected_as_usual_during_training(tmp_path):
    usual = gc.get_threshold()
    collect_garbage_rarely()
    assert gc.get_threshold() != usual
    try:
        assert run(make_workspace(tmp_path, max_steps=2)) == 0
        assert gc.get_threshold() == usual
    finally:
        gc.set_threshold(*usual)


def test_evaluation_in_pretraining_reports_the_perplexity_of_each_set(tmp_path):
    for name in ("first", "second"):
        (tmp_path / f"{name}.jsonl").write_text(f'{{"text": "some {name} text to read"}}\n')
    sets = f"{tmp_path / 'first.jsonl'},{tmp_path / 'second.jsonl'}"
    options = make_workspace(tmp_path, stage="pt", dataset=None, val_size=0, do_eval=True, packing=False, cutoff_len=64)
    assert run({**options, "eval_dataset": sets, "eval_on_each_dataset": True}) == 0
    results = json.loads((tmp_path / "out" / "eval_results.json").read_text())
    for name in ("first", "second"):
        assert results[f"eval_{name}_perplexity"] == pytest.approx(math.exp(results[f"eval_{name}_loss"]))


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["bf16_full_eval", "fp16_full_eval"])
def test_weights_are_converted_for_evaluations_outside_of_training(tmp_path, name, capsys):
    options = make_workspace(tmp_path, val_size=0.25, bf16=False, max_steps=2, eval_strategy="epoch")
    assert run(options) == 0
    losses = []
    for more in ({}, {name: True}):
        only = {"model_name_or_path": tmp_path / "out", "output_dir": tmp_path / f"eval{len(more)}", "do_train": False}
        assert run({**options, **only, "eval_strategy": "no", "do_eval": True, **more}) == 0
        losses.append(json.loads((only["output_dir"] / "eval_results.json").read_text())["eval_loss"])
    assert losses[0] != losses[1] == pytest.approx(losses[0], rel=0.01)
    assert ("with weights in float16" if name[0] == "f" else "with weights in bfloat16") in capsys.readouterr().out
    # After training, the model is written and evaluated as trained during the run, and converted for the final one.
    again = {**options, "output_dir": tmp_path / "again", name: True}
    assert run(again) == 0
    assert same_weights(tmp_path / "out", tmp_path / "again")
    assert [entry["eval_loss"] for entry in history(tmp_path / "again") if "eval_loss" in entry] == losses


@pytest.mark.parametrize(("greater_is_better", "evaluations"), [(False, 2), (True, 3)], ids=["last", "first"])
def test_best_model_is_evaluated_again_only_if_it_is_not_the_last(tmp_path, greater_is_better, evaluations):
    options = make_workspace(tmp_path, val_size=0.25, max_steps=2, eval_strategy="steps", eval_steps=1, save_steps=1)
    best = {"load_best_model_at_end": True, "metric_for_best_model": "loss", "greater_is_better": greater_is_better}
    assert run({**options, **best}) == 0
    losses = [entry["eval_loss"] for entry in history(tmp_path / "out") if "eval_loss" in entry]
    assert len(losses) == evaluations
    best_loss = max(losses) if greater_is_better else min(losses)
    assert json.loads((tmp_path / "out" / "eval_results.json").read_text())["eval_loss"] == best_loss


@pytest.mark.parametrize("name", ["bf16_full_eval", "fp16_full_eval"])
def test_weights_of_sharded_models_are_not_converted(tmp_path, name, capsys):
    assert run(make_workspace(tmp_path, val_size=0.25, fsdp="full_shard", **{name: True})) == 2
    assert f'"{name}" is not supported with sharded weights' in capsys.readouterr().err


@pytest.mark.parametrize("name", ["training", "evaluation"])
def test_dataset_without_a_complete_block_is_rejected(tmp_path, name, capsys):
    long, short = [{"text": "red green blue " * 30}] * 8, [{"text": "red green blue " * 3}] * 3
    (tmp_path / "long.json").write_text(json.dumps(long))
    (tmp_path / "short.json").write_text(json.dumps(short))
    files = {"dataset": "long.json", "eval_dataset": "long.json"}
    files["dataset" if name == "training" else "eval_dataset"] = "short.json"
    options = make_workspace(
        tmp_path, stage="pt", cutoff_len=128, drop_incomplete_block=True, eval_strategy="epoch",
        **{option: str(tmp_path / file) for option, file in files.items()},
    )  # fmt: skip
    assert run(options) == 2
    error = capsys.readouterr().err
    assert f"The {name} set has" in error
    assert "less than one block of cutoff_len 128" in error
    assert not (tmp_path / "out").exists()


def test_evaluation_sets_with_underscores_in_their_names_are_evaluated_once_per_step(tmp_path):
    names = ("news__2024", "odd", "odd_")
    for name in names:
        (tmp_path / f"{name}.json").write_text(json.dumps(records(4)))
    options = make_workspace(
        tmp_path, eval_dataset=",".join(f"{tmp_path}/{name}.json" for name in names), eval_on_each_dataset=True,
        metric_for_best_model="eval_news__2024_loss", eval_strategy="epoch", tokenized_path=str(tmp_path / "rows"),
        num_train_epochs=1,
    )  # fmt: skip
    assert run(options) == 0
    log = history(tmp_path / "out")
    for name in names:
        assert sum(f"eval_{name}_loss" in entry for entry in log) == 1
    folders = {path.name for path in (tmp_path / "rows").iterdir() if path.is_dir()}
    assert folders == {"train", *(f"eval_{name}" for name in names)}


def test_lora_run_saves_adapter_that_peft_loads(tmp_path):
    from peft import PeftModel

    assert run(make_workspace(tmp_path, finetuning_type="lora", lora_rank=4, learning_rate=1e-2)) == 0
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    tokens = torch.tensor([[5, 6, 7, 8]])
    before = base(tokens).logits
    adapted = PeftModel.from_pretrained(base, tmp_path / "out")
    assert not torch.allclose(adapted(tokens).logits, before, atol=1e-3)


def test_plain_text_pretraining_runs(tmp_path):
    options = make_workspace(tmp_path, stage="pt", cutoff_len=32)
    (tmp_path / "text.txt").write_text("red green blue stone river\n" * 60)
    assert run({**options, "dataset": str(tmp_path / "text.txt")}) == 0
    assert history(tmp_path / "out")[-1]["train_loss"] > 0


def test_model_can_be_trained_from_scratch(tmp_path):
    assert run(make_workspace(tmp_path, train_from_scratch=True, seed=3)) == 0
    assert not same_weights(tmp_path / "out", tmp_path / "model")


CUTS = {
    "full with dropout and evaluation": {"val_size": 0.25, "eval_strategy": "steps", "eval_steps": 3},
    "lora with dropout": {"finetuning_type": "lora", "lora_dropout": 0.2, "lora_rank": 4, "learning_rate": 1e-2},
    "badam": {"use_badam": True, "badam_switch_interval": 3},
    "neftune": {"neftune_noise_alpha": 5.0},
}


@pytest.mark.slow
@pytest.mark.parametrize("method", CUTS)
def test_run_killed_mid_epoch_resumes_to_same_weights(tmp_path, method):
    options = make_workspace(tmp_path, dropout=0.1, save_steps=4, logging_steps=1, num_train_epochs=2, **CUTS[method])
    assert run({**options, "output_dir": str(tmp_path / "whole")}) == 0
    child = subprocess.Popen(
        [
            sys.executable,
            "-c",
            KILLS_ITSELF_AFTER_STEP_FIVE,
            *as_arguments({**options, "output_dir": str(tmp_path / "cut")}),
        ],
        stdout=subprocess.DEVNULL,
    )
    assert child.wait() == -signal.SIGKILL
    assert not (tmp_path / "cut" / "model.safetensors").exists()
    assert run({**options, "output_dir": str(tmp_path / "cut")}) == 0
    assert same_weights(tmp_path / "whole", tmp_path / "cut")
    assert history(tmp_path / "whole") == history(tmp_path / "cut")
    rows = [json.loads(line)["current_steps"] for line in (tmp_path / "cut" / "trainer_log.jsonl").open()]
    assert rows == sorted(rows)


def test_restarted_finished_run_does_nothing_and_reports_it(tmp_path, capsys):
    options = make_workspace(tmp_path)
    assert run(options) == 0
    stamp = (tmp_path / "out" / "model.safetensors").stat().st_mtime_ns
    capsys.readouterr()
    assert run(options) == 0
    assert "nothing to do" in "".join(capsys.readouterr())
    assert (tmp_path / "out" / "model.safetensors").stat().st_mtime_ns == stamp


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 7}, "seed changed from 42 to 7"),
        ({"per_device_train_batch_size": 4}, "rows_per_step changed from 4 to 8"),
        ({"lr_scheduler_type": "linear"}, "lr_scheduler_type"),
        ({"finetuning_type": "lora"}, "finetuning_type"),
    ],
)
def test_different_run_in_same_folder_is_rejected_with_the_difference(tmp_path, capsys, change, message):
    options = make_workspace(tmp_path, save_steps=4, max_steps=4)
    assert run(options) == 0
    (tmp_path / "out" / "train_results.json").unlink()
    capsys.readouterr()
    assert run({**options, "max_steps": 6, **change}) == 2
    output = " ".join("".join(capsys.readouterr()).split())
    assert message in output
    assert "resume_despite_changes" in output


def test_changed_option_is_rejected_before_reading_data(tmp_path, capsys, monkeypatch):
    options = make_workspace(tmp_path, save_steps=4, max_steps=4)
    assert run(options) == 0
    monkeypatch.setattr("burnish.run.prepare.load_data", lambda *_: pytest.fail("the data were read"))
    for steps in (4, 6):
        assert run({**options, "max_steps": steps, "learning_rate": 5e-3}) == 2
        assert "learning_rate changed from 0.001 to 0.005" in " ".join("".join(capsys.readouterr()).split())


def test_changed_data_under_same_name_is_rejected(tmp_path, capsys):
    options = make_workspace(tmp_path, save_steps=4, max_steps=4)
    assert run(options) == 0
    (tmp_path / "data.json").write_text((tmp_path / "data.json").read_text().replace("stone", "stones"))
    assert run({**options, "max_steps": 6}) == 2
    assert "data has changed" in "".join(capsys.readouterr())


def test_accepted_new_learning_rate_and_more_steps_are_applied_and_reported(tmp_path, capsys):
    options = make_workspace(tmp_path, save_steps=4, max_steps=4, lr_scheduler_type="constant", logging_steps=1)
    assert run(options) == 0
    assert run({**options, "max_steps": 6, "learning_rate": 5e-3, "resume_despite_changes": True}) == 0
    assert "learning_rate was 0.001" in " ".join("".join(capsys.readouterr()).split())
    rates = [entry["learning_rate"] for entry in history(tmp_path / "out") if "learning_rate" in entry]
    assert rates == [1e-3] * 4 + [5e-3] * 2


def test_signal_saves_checkpoint_and_same_command_resumes(tmp_path):
    options = make_workspace(tmp_path, num_train_epochs=200, save_strategy="no", logging_steps=1000)
    child = subprocess.Popen(
        [sys.executable, "-m", "burnish", "train", *as_arguments(options)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    log = tmp_path / "out" / "trainer_log.jsonl"
    deadline = time.monotonic() + 60
    while not log.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.5)
    os.kill(child.pid, signal.SIGTERM)
    assert child.wait(timeout=60) == 128 + signal.SIGTERM
    assert len(list((tmp_path / "out").glob("checkpoint-*"))) == 1


def test_dataset_without_trained_tokens_is_rejected_before_writing(tmp_path, capsys):
    options = make_workspace(tmp_path)
    empty = [{"instruction": "Add", "input": "", "output": ""}] * 5
    (tmp_path / "data.json").write_text(json.dumps(empty))
    assert run(options) == 2
    output = "".join(capsys.readouterr())
    assert "5" in output
    assert "Traceback" not in output
    assert not (tmp_path / "out").exists()


@pytest.mark.sample(3)
@pytest.mark.parametrize("cut", representative_slow([(4, 2), (8, 1), (1, 8)], 1))
@pytest.mark.parametrize(
    "layout",
    [{}, {"padding_free": False}, {"packing": True}, {"max_tokens_per_batch": 64},
     {"max_tokens_per_batch": 64, "padding_free": False}],
)  # fmt: skip
def test_step_does_not_depend_on_micro_batching_and_layout(tmp_path, cut, layout):
    size, accumulation = cut
    options = make_workspace(
        tmp_path, count=8, max_steps=1, max_grad_norm=0, optim="sgd", learning_rate=1.0, lr_scheduler_type="constant"
    )
    plain = {**options, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "padding_free": False}
    assert run({**plain, "output_dir": str(tmp_path / "plain")}) == 0
    other = {**options, "per_device_train_batch_size": size, "gradient_accumulation_steps": accumulation, **layout}
    assert run(other) == 0
    a, b = weights_in(tmp_path / "plain"), weights_in(tmp_path / "out")
    assert max((a[n] - b[n]).abs().max().item() for n in a) < 1e-6


def test_token_budget_below_longest_row_is_rejected_with_its_length(tmp_path, capsys):
    assert run(make_workspace(tmp_path, max_tokens_per_batch=8)) == 2
    output = capsys.readouterr().err
    assert '"max_tokens_per_batch" (8) is smaller than the longest example' in output
    assert not (tmp_path / "out").exists()


def test_four_real_dataset_formats_train_together(tmp_path, golden_folder):
    options = make_workspace(tmp_path)
    info = {
        "en": {"file_name": "alpaca_en_demo.json"}, "zh": {"file_name": "alpaca_zh_demo.json"},
        "me": {"file_name": "identity.json"},
        "tools": {"file_name": "glaive_toolcall_en_demo.json", "formatting": "sharegpt",
                  "columns": {"messages": "conversations", "tools": "tools"}},
    }  # fmt: skip
    folder = tmp_path / "sets"
    folder.mkdir()
    for entry in info.values():
        (folder / entry["file_name"]).symlink_to(golden_folder / "sets" / entry["file_name"])
    (folder / "dataset_info.json").write_text(json.dumps(info))
    options |= {
        "dataset_dir": str(folder),
        "dataset": "en,zh,me,tools",
        "max_samples": 8,
        "template": "qwen",
        "max_steps": 3,
    }
    assert run(options) == 0
    assert history(tmp_path / "out")[-1]["train_loss"] > 0


@pytest.mark.sample(2)
@pytest.mark.run
@pytest.mark.parametrize(
    "options",
    [
        {}, {"max_steps": 10}, {"max_steps": 1}, {"num_train_epochs": 0.5}, {"dataloader_drop_last": True},
        {"max_steps": 3, "streaming": True}, {"packing": True, "max_steps": 7}, {"gradient_accumulation_steps": 1},
    ],
    ids=str,
)  # fmt: skip
def test_first_log_numbers_match_run_and_explain(options, tmp_path, capsys, monkeypatch):
    made = make_workspace(tmp_path, count=22, save_strategy="no", logging_steps=1, **options)
    rows_of_steps, add_step = [], Meter.add_step

    def recorded(self, step_batch, *values):
        rows_of_steps.append(int(step_batch.num_rows))
        add_step(self, step_batch, *values)

    monkeypatch.setattr(Meter, "add_step", recorded)
    assert run(made, "explain") == 0
    explained = capsys.readouterr().out
    assert run(made) == 0
    out = capsys.readouterr().out
    first = re.search(r"Training for ([\d,]+) steps?(?:: ([\d.]+) epochs? of (\d+) (example|pack)s?)?", out)
    factors_of = r"Effective batch size (\d+) = (\d+) per device x (\d+) gradient accumulation x (\d+) process"
    batch = re.search(factors_of, out)
    state = json.loads((tmp_path / "out" / "trainer_state.json").read_text())
    assert int(first[1]) == state["max_steps"] == state["global_step"] == len(rows_of_steps)
    assert f"{first[1]} step" in next(line for line in explained.splitlines() if " total " in line and "step" in line)
    size, *factors = map(int, batch.groups())
    assert size == math.prod(factors)
    assert (
        max(rows_of_steps) == size or state["max_steps"] == 1 or "packing" in options
    )  # the number of examples, not of packs
    assert f"effective batch size {size}" in explained
    per_epoch = math.ceil(int(first[3]) / size)
    assert float(first[2]) == pytest.approx(state["max_steps"] / per_epoch, abs=0.006)
    assert float(first[2]) == pytest.approx(state["epoch"], abs=1 / per_epoch)  # the last step of an epoch is smaller
    assert first[4] == ("pack" if options.get("packing") else "example")
    assert options.get("packing") or int(first[3]) == 22


@pytest.mark.run
@pytest.mark.parametrize(
    ("steps", "logged"),
    [
        (3, [1, 2, 3]),
        (60, [1, *range(2, 61, 2)]),
        pytest.param(101, [1, *range(3, 100, 3), 101], marks=pytest.mark.slow),
    ],
)
def test_about_50_steps_including_first_and_last_are_logged(steps, logged, tmp_path):
    options = make_workspace(tmp_path, count=4, max_steps=steps, save_strategy="no")
    del options["logging_steps"]
    assert run(options) == 0
    assert [entry["step"] for entry in history(tmp_path / "out") if "loss" in entry] == logged


@pytest.mark.run
@pytest.mark.parametrize(("interval", "logged"), [(10, [4]), (3, [3, 4])])
def test_last_step_is_logged_with_any_interval(interval, logged, tmp_path, capsys):
    options = make_workspace(tmp_path, count=4, max_steps=4, logging_steps=interval, save_strategy="no")
    assert run(options) == 0
    assert [entry["step"] for entry in history(tmp_path / "out") if "loss" in entry] == logged
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines() if line.startswith("step ")] == [
        f"{step}/4" for step in logged
    ]
