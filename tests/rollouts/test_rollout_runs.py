"""Runs of stages grpo and rloo over a tiny model: logs, outputs, freed memory, and exact resume within a generation."""

import json
import re
import shutil
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

from burnish.config.errors import UserError
from burnish.config.options import RawValue
from burnish.explain.explain import explain
from burnish.inference.types import ROLLOUT, NoiseKey, Sampling
from burnish.loop.state import TrainerControl, TrainerState
from burnish.parallel.single import SingleProcess
from burnish.rollouts.completions import CompletionLimits, SlotSource
from burnish.rollouts.journal import RolloutNotesCallback
from burnish.run.build import train_run
from burnish.run.plan.plan import plan
from burnish.run.prepare import prepare
from representative import representative_slow
from run_outputs import history, same_weights
from small_run import make_model, make_workspace

REWARDS = """
def short(completions, answer, log_extra=None, **kwargs):
    assert len(answer) == len(completions)
    log_extra("asked", answer)
    return [len(set(text)) / 10 for text in map(str, completions)]


def often_none(completion_ids, **kwargs):
    return [None if ids[0] % 2 else 1.0 for ids in completion_ids]


def often_bad(completion_ids, **kwargs):
    return [None if ids[0] % 2 else -1.0 for ids in completion_ids]
"""


def user(folder, **options):
    """Return the options of a run that samples 16 completions of 4 prompts and trains on them twice in 2 steps."""
    base = make_workspace(folder)
    (folder / "my_rewards.py").write_text(REWARDS)
    base.pop("num_train_epochs")
    return {
        **base, "stage": "grpo", "reward_funcs": [f"{folder}/my_rewards.py:short"], "num_generations": 4,
        "max_completion_length": 12, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2,
        "steps_per_generation": 4, "num_iterations": 2, "max_steps": 6, "logging_steps": 1, "save_strategy": "steps",
        "save_steps": 1, "report_to": "none", "plot_loss": False, "lr_scheduler_type": "constant", **options,
    }  # fmt: skip


def train(options):
    result = train_run(plan({name: RawValue(value, "test") for name, value in options.items()}))
    return result.folder


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory):
    """Return the working folder and the folder of an uninterrupted run."""
    folder = tmp_path_factory.mktemp("rollouts")
    return folder, train(user(folder))


def test_first_step_of_a_generation_logs_rewards_lengths_and_times(finished_run):
    _, run = finished_run
    log = [entry for entry in history(run) if "loss" in entry]
    assert len(log) == 6
    for step, entry in enumerate(log):
        assert ("reward" in entry) == (step % 4 == 0), entry
        assert {"entropy", "clip_ratio/region_mean", "grad_norm"} <= entry.keys()
    first = log[0]
    assert {"reward_std", "frac_reward_zero_std", "rewards/short/mean", "completions/mean_length",
            "completions/clipped_ratio", "time/generate", "time/reward", "time/logps"} <= first.keys()  # fmt: skip
    assert first["reward"] == pytest.approx(first["rewards/short/mean"])
    assert log[0]["clip_ratio/region_mean"] == 0  # the first step is on-policy


@pytest.mark.sample(2)
@pytest.mark.parametrize("stopped", [1, 3, 4])  # within a generation, in its second iteration, and between two
def test_run_resumed_inside_a_generation_gives_the_same_weights(finished_run, tmp_path, stopped):
    folder, run = finished_run
    out = tmp_path / "out"
    out.mkdir()
    shutil.copytree(run / f"checkpoint-{stopped}", out / f"checkpoint-{stopped}")
    assert (out / f"checkpoint-{stopped}" / "rollout_0.json").is_file()
    resumed = train({**user(folder), "output_dir": str(out)})
    assert same_weights(run / "checkpoint-6", resumed / "checkpoint-6")
    times = {"time/generate", "time/reward", "time/logps", "time/train", "step_time"}
    lines = [
        [json.loads(line) for line in (each / "completions.jsonl").read_text().splitlines()] for each in (run, out)
    ]
    assert [line for line in lines[0] if line["step"] > stopped] == lines[1]
    strip = [[{k: v for k, v in e.items() if k not in times} for e in history(each / "checkpoint-6")]
             for each in (run, resumed)]  # fmt: skip
    assert strip[0] == strip[1]


def test_evaluation_changes_nothing_and_samples_the_same_each_time(finished_run, tmp_path):
    folder, _ = finished_run
    options = {"val_size": 4, "eval_strategy": "steps", "eval_steps": 1, "num_generations_eval": 2, "save_steps": 6}
    a, b = (train({**user(folder), **options, **more, "output_dir": str(tmp_path / str(at)), "learning_rate": rate})
            for at, (more, rate) in enumerate([({}, 1e-3), ({"eval_steps": 3}, 1e-3)]))  # fmt: skip
    assert same_weights(a, b)
    still = train({**user(folder), **options, "output_dir": str(tmp_path / "still"), "learning_rate": 1e-30})
    rewards = {e["eval_reward"] for e in history(still / "checkpoint-6") if "eval_reward" in e}
    assert len(rewards) == 1


def test_kv_cache_is_freed_before_first_backward_pass(tmp_path, monkeypatch):
    recorded, sources = [], []
    made, backward = SlotSource.__init__, SingleProcess.backward

    def started(self, *args, **kwargs):
        made(self, *args, **kwargs)
        sources.append(self)

    def watched(self, loss):
        recorded.append(sources[0].scheduler.backend.cache_bytes)
        backward(self, loss)

    monkeypatch.setattr(SlotSource, "__init__", started)
    monkeypatch.setattr(SingleProcess, "backward", watched)
    train(user(tmp_path, max_steps=1, save_strategy="no"))
    assert recorded == [0, 0]
    facts = sources[0].scheduler.facts()
    assert facts.cached_prompt_tokens > 0.5 * facts.prompt_tokens  # three of the four prompts of a group are copies


@pytest.mark.parametrize(
    "more",
    representative_slow([
        {"stage": "rloo", "beta": 0.05, "num_generations": 2},
        {"beta": 0.04, "loss_type": "grpo", "reward_funcs": ["{}/my_rewards.py:short", "{}/my_rewards.py:often_none"]},
        {"top_entropy_quantile": 0.5, "entropy_coef": 0.01, "temperature": 0.8},
        {"finetuning_type": "lora", "beta": 0.1, "steps_per_generation": 2, "num_iterations": 1},
        {"generation_batch_size": 4, "steps_per_generation": None, "gradient_accumulation_steps": 1},
        {"steps_per_generation": 1, "num_iterations": 1, "scale_rewards": "batch", "mask_truncated_completions": True},
        {"drop_zero_variance_groups": "drop", "reward_funcs": ["{}/my_rewards.py:often_none"], "top_k": 20},
        {"padding_free": False, "scale_rewards": "none", "num_iterations": 1, "steps_per_generation": None},
    ], 2),
)  # fmt: skip
def test_all_variants_run(tmp_path, more):
    functions = [each.format(tmp_path) for each in more.pop("reward_funcs", ["{}/my_rewards.py:short"])]
    run = train(user(tmp_path, max_steps=3, save_strategy="no", **{**more, "reward_funcs": functions}))
    log = [entry for entry in history(run) if "loss" in entry]
    assert len(log) == 3
    assert all(torch.isfinite(torch.tensor([entry["loss"], entry["grad_norm"]])).all() for entry in log)
    if "beta" in more and more.get("stage") != "rloo":
        assert log[0]["kl"] == pytest.approx(0.0, abs=1e-6)


def test_completion_does_not_depend_on_63_neighbors(tmp_path):
    model = AutoModelForCausalLM.from_pretrained(make_model(tmp_path / "model"), dtype=torch.float64).eval()
    prompts = [[3 + at % 7, 20, 30 + at // 8] for at in range(64)]
    keys = [NoiseKey(0, ROLLOUT, 1, at) for at in range(64)]
    limits = CompletionLimits(10, frozenset({2}), Sampling(seed=0))
    among = SlotSource(model, 64, 256, nullcontext).complete(prompts, keys, limits)
    for at in (0, 17, 63):
        one = slice(at, at + 1)
        (alone,) = SlotSource(model, 1, 256, nullcontext).complete(prompts[one], keys[one], limits)
        assert alone.ids == among[at].ids
    assert len({tuple(each.ids) for each in among}) > 40


def test_completions_are_saved_with_rewards_and_log_extra_columns(finished_run):
    _, run = finished_run
    lines = [json.loads(line) for line in (run / "completions.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1] * 16 + [5] * 16
    assert {line["sample"] for line in lines} == {0, 1, 2, 3}
    for line in lines:
        assert line["prompt"].endswith("assistant\n")
        assert line["rewards"].keys() == {"short"}
        assert line["extra"]["asked"]
        assert line["tokens"] <= 12
    for at in range(0, 32, 4):
        assert sum(line["advantage"] for line in lines[at : at + 4]) == pytest.approx(0, abs=1e-9)


def test_resume_with_changed_reward_is_rejected_unless_accepted(tmp_path):
    options = user(tmp_path, max_steps=2)
    train(options)
    (tmp_path / "my_rewards.py").write_text(REWARDS.replace("/ 10", "/ 5"))
    with pytest.raises(UserError, match="reward functions"):
        train({**options, "max_steps": 3})
    train({**options, "max_steps": 3, "on_changed_reward": "accept"})
    with pytest.raises(UserError, match="temperature"):
        train({**options, "max_steps": 4, "on_changed_reward": "accept", "temperature": 0.5})


FAILING = """
import time
from pathlib import Path
calls = 0


def limited(completions, **kwargs):
    global calls
    calls += 1
    if calls == 2 and (Path(__file__).parent / "fails").exists():
        {how}
    return [len(set(text)) / 10 for text in map(str, completions)]
"""


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("raise ValueError('no')", "ValueError: no"),
        pytest.param("time.sleep(60)", "has not returned for 1 s", marks=pytest.mark.slow),
    ],
)
def test_steps_before_a_failing_reward_are_saved(tmp_path, how, message):
    options = user(tmp_path, save_strategy="no", reward_funcs=[f"{tmp_path}/limited.py:limited"], reward_timeout_s=1.0)
    (tmp_path / "limited.py").write_text(FAILING.format(how=how))
    finished_run = train({**options, "output_dir": str(tmp_path / "whole")})
    (tmp_path / "fails").touch()
    with pytest.raises(UserError, match=f"{message}(.|\n)*Safe: .*checkpoint-4"):
        train(options)
    (tmp_path / "fails").unlink()
    assert same_weights(finished_run, train(options))


def test_notes_are_printed_once_with_their_values(capsys):
    options = SimpleNamespace(max_completion_length=64)
    notes, state = RolloutNotesCallback(options), TrainerState()
    log = {"loss": 0.0, "reward": 0.5, "reward_std": 0.5, "entropy": 2.0, "frac_reward_zero_std": 1, "grad_norm": 0.0}
    for step in range(12):
        more = {"completions/clipped_ratio": 0.97, "kl": 12.0, "entropy": 0.1, "reward": 0.4} if step else {}
        notes.on_log(None, state, TrainerControl(), {**log, **more})
        notes.on_log(None, state, TrainerControl(), {"loss": 0.0, "grad_norm": 1.0})  # a later step on the generation
    output = capsys.readouterr().out
    parts = [
        "near 0 by construction", "97% of the completions were truncated at max_completion_length 64", "12.0 per token",
        "fallen from 2 to 0.1", "nothing was learned. Use", "grad_norm is 0", "below its first value 0.5",
    ]  # fmt: skip
    for part in parts:
        assert output.count(part) == 1, part


def test_truncated_completions_of_ppo_name_its_option(capsys):
    notes = RolloutNotesCallback(SimpleNamespace(max_completion_length=64, max_new_tokens=64, stage="ppo"))
    notes.on_log(None, TrainerState(), TrainerControl(), {"loss": 0.0, "completions/clipped_ratio": 1.0})
    assert "truncated at max_new_tokens 64." in capsys.readouterr().out


def test_explain_reports_completions_and_their_memory(tmp_path, capsys):
    explain(plan({name: RawValue(value, "test") for name, value in user(tmp_path, rl_preset="dapo").items()}))
    output = capsys.readouterr().out
    parts = [
        "4 prompts per generation batch", "x 4 = 16 for 4 steps, each trained on 2 times", "at most 12 per completion",
        "short (my_rewards.py, line 2), weight 1", "dapo sets rl_loss_type: dapo, epsilon_high: 0.28",
        "all tokens of the completions", "KV cache for 16 concurrent completions", "one forward pass of the policy",
        "= effective batch size 8",
    ]  # fmt: skip
    for part in parts:
        assert part in output, part


def test_step_with_all_groups_dropped_changes_no_weights(tmp_path, capsys):
    (tmp_path / "same.py").write_text("def same(completions, **kwargs):\n    return [1.0] * len(completions)\n")
    more = {"drop_zero_variance_groups": "drop", "reward_funcs": [f"{tmp_path}/same.py:same"], "weight_decay": 0.1}
    run = train(user(tmp_path, max_steps=2, top_p=0.9, **more))
    assert same_weights(run / "checkpoint-1", tmp_path / "model")
    assert history(run)[0]["frac_groups_dropped"] == 1
    assert "With top_p 0.9, the sampling distribution differs from the policy" in capsys.readouterr().out


def test_completion_that_never_fits_is_rejected(tmp_path):
    with pytest.raises(UserError, match=r"The shortest prompt has \d+ tokens; with max_completion_length 250"):
        train(user(tmp_path, max_completion_length=250))


def test_invalid_data_is_rejected_before_loading_the_model(tmp_path, monkeypatch):
    monkeypatch.setattr("burnish.rollouts.rewards.builtin.find_spec", lambda name: name)
    options = user(tmp_path, reward_funcs=["accuracy_reward"])
    (tmp_path / "data.json").write_text(json.dumps([{"prompt": [{"role": "user", "content": "1 + 1?"}]}] * 8))
    with pytest.raises(ValueError, match='accuracy_reward requires the column "solution"'):
        train(options)
    answered = [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}]
    (tmp_path / "data.json").write_text(json.dumps([{"prompt": answered}] * 8))
    with pytest.raises(ValueError, match="must end with a user message"):
        train({**options, "reward_funcs": [f"{tmp_path}/my_rewards.py:often_none"]})


@pytest.mark.sample(3)
@pytest.mark.parametrize("record", [
    {"instruction": "1 + 1?", "output": ""},
    {"instruction": "1 + 1?", "output": None},
    {"prompt": "1 + 1?", "completion": " "},
    {"messages": [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": ""}]},
    {"conversations": [{"from": "human", "value": "1 + 1?"}, {"from": "gpt", "value": ""}]},
], ids=lambda record: next(iter(record)))  # fmt: skip
def test_empty_response_of_a_prompt_is_not_used(record, tmp_path, capsys):
    options = user(tmp_path, reward_funcs=[f"{tmp_path}/my_rewards.py:often_none"])
    (tmp_path / "data.json").write_text(json.dumps([record] * 8))
    explain(plan({name: RawValue(value, "test") for name, value in options.items()}))
    assert re.search(r"training set +8 examples", capsys.readouterr().out)


CALL = {"type": "function", "function": {"name": "f", "arguments": "{"}}
USER, ANSWER = {"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"prompt": [USER, USER]}, "do not alternate"),
        ({"prompt": [ANSWER, USER]}, "do not alternate"),
        ({"prompt": [USER], "tools": "[oops"}, "tools are not valid JSON"),
        ({"prompt": [USER], "tools": 3}, "tools are not a list of JSON objects"),
        ({"prompt": [USER, {"role": "assistant", "content": "", "tool_calls": [CALL]}, USER]}, "not valid JSON"),
    ],
)
def test_prompts_that_a_template_cannot_write_are_dropped_and_counted(tmp_path, record, reason):
    options = user(tmp_path, template="chatml", reward_funcs=[f"{tmp_path}/my_rewards.py:often_none"])
    (tmp_path / "data.json").write_text(json.dumps([record, {"prompt": [USER]}]))
    prepared = prepare(plan({name: RawValue(value, "test") for name, value in options.items()}))
    (dropped,) = prepared.stats.sentences()
    assert dropped.startswith("dropped: ")
    assert f"{reason}: 1 of 2 examples (" in dropped


def test_rollback_within_a_rollout_is_rejected_before_loading_the_model(tmp_path, monkeypatch):
    monkeypatch.setattr("burnish.run.build.load_model", lambda *args, **kwargs: pytest.fail("the model is loaded"))
    with pytest.raises(UserError, match=r"rollback.*not supported if several optimizer steps"):
        train(user(tmp_path, on_spike="rollback"))


def test_run_killed_before_its_first_checkpoint_starts_over(tmp_path):
    options = user(tmp_path, max_steps=2, save_strategy="no")
    journal = Path(options["output_dir"]) / "completions.jsonl"
    journal.parent.mkdir(exist_ok=True)
    journal.write_text('{"step": 1}\n', encoding="utf-8")
    train(options)
    assert '{"step": 1}' not in journal.read_text(encoding="utf-8").splitlines()


@pytest.mark.slow
def test_oft_adapter_generates_and_trains(tmp_path):
    folder = train(user(tmp_path, max_steps=2, save_strategy="no", finetuning_type="oft"))
    assert (folder / "adapter_model.safetensors").is_file()
