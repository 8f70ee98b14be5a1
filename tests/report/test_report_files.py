"""Output files of a run: log, results, plots, model card."""

import json
import math
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
import yaml
from torch import nn

from burnish.adapters.base import parameters_without_embeddings
from burnish.config.errors import Problem, UserError
from burnish.loop.state import TrainerControl, TrainerState
from burnish.report.card import CardFacts, card_text, is_hub_name, serving_lines, write_card
from burnish.report.jsonl import JsonlCallback
from burnish.report.metadata import RunMetadata, write_failure
from burnish.report.pace import Pace
from burnish.report.plots import curves, plot_history, plot_margins, smooth
from burnish.report.results import (
    format_metrics,
    save_metrics,
    save_state,
    speed_metrics,
    write_text_atomically,
)
from burnish.run.finish import draw_plots
from burnish.run.plan.options import RunOptions

# --- trainer_log.jsonl ------------------------------------------------------------------------------------------------


def steps(folder, first, last, max_steps=10, ends=True):
    """Fire the events of steps ``first`` to ``last``: a log per step, an evaluation at every fourth."""
    clock = SimpleNamespace(now_s=0.0)
    callback = JsonlCallback(folder, Pace(lambda: clock.now_s))
    state, control = TrainerState(global_step=first, max_steps=max_steps), TrainerControl()
    state.num_input_tokens_seen = first * 50
    callback.on_train_begin(None, state, control)
    for step in range(first + 1, last + 1):
        clock.now_s += 2
        state.global_step, state.epoch = step, step / 5
        state.num_input_tokens_seen += 50
        callback.on_log(None, state, control, logs={"loss": 1 / step, "learning_rate": 0.1, "epoch": step / 5})
        if step % 4 == 0:
            callback.on_log(None, state, control, logs={"eval_loss": 2 / step, "eval_runtime": 1.0, "epoch": step / 5})
    if ends:
        callback.on_log(None, state, control, logs={"train_runtime": 1.0, "train_loss": 0.5})
        callback.on_train_end(None, state, control)
    return callback


OWN_KEYS = {"grad_norm", "step_seconds", "tokens_per_second", "memory_bytes", "time"}
"""Keys of burnish's rows alone."""


def rows(folder):
    return [json.loads(line) for line in (folder / "trainer_log.jsonl").read_text().splitlines()]


def test_log_row_has_llamafactory_keys_and_values(tmp_path):
    steps(tmp_path, 0, 4)
    first, evaluation = rows(tmp_path)[0], rows(tmp_path)[4]
    assert {name: value for name, value in first.items() if name not in OWN_KEYS} == {
        "current_steps": 1, "total_steps": 10, "loss": 1.0, "lr": 0.1, "epoch": 0.2, "percentage": 10.0,
        "elapsed_time": "0:00:02", "remaining_time": "0:00:18", "throughput": 25.0, "total_tokens": 50,
    }  # fmt: skip
    assert evaluation["eval_loss"] == 0.5
    assert "loss" not in evaluation
    assert "lr" not in evaluation


def test_speed_of_a_log_row_is_that_of_training_alone(tmp_path):
    clock = SimpleNamespace(now_s=0.0)
    callback, control = JsonlCallback(tmp_path, Pace(lambda: clock.now_s)), TrainerControl()
    state = TrainerState(max_steps=20)
    callback.on_train_begin(None, state, control)
    for step in range(1, 21):
        clock.now_s += 1  # the next batch, which GRPO generates before the step begins
        callback.on_step_begin(None, state, control)
        clock.now_s += 1
        state.global_step, state.num_input_tokens_seen = step, 100 * step
        callback.on_step_end(None, state, control)
        if step % 10 == 0:
            callback.on_log(None, state, control, logs={"loss": 1.0})
        if step % 4 == 0:  # also between two rows
            clock.now_s += 50
            callback.on_log(None, state, control, logs={"eval_loss": 1.0})
            callback.on_evaluate(None, state, control)
        if step % 5 == 0:
            clock.now_s += 30
            callback.on_save(None, state, control)
    found = [(row["step_seconds"], row["tokens_per_second"]) for row in rows(tmp_path) if "loss" in row]
    assert found == [(2.0, 50.0), (2.0, 50.0)]


def test_log_row_names_objective_metrics_like_peers(tmp_path):
    callback, state = JsonlCallback(tmp_path), TrainerState(global_step=1, max_steps=2)
    callback.on_train_begin(None, state, TrainerControl())
    measures = {"rewards/accuracies": 0.5, "rewards/margins": 0.25, "kl": 0.1, "completions/mean_length": 31.5}
    callback.on_log(None, state, TrainerControl(), logs={"loss": 1.0, **measures, "train_runtime": 3.0})
    callback.on_log(None, state, TrainerControl(), logs={"eval_loss": 1.0, "eval_kl": 0.2, "eval_runtime": 3.0})
    row, evaluation = rows(tmp_path)
    assert {name: row[name] for name in measures} == measures
    assert row["accuracy"] == 0.5  # its name in LLaMA-Factory
    assert evaluation["eval_kl"] == 0.2
    assert not [name for name in {*row, *evaluation} if name.endswith("runtime")]


def test_resumed_run_logs_every_step_once(tmp_path):
    steps(tmp_path, 0, 7, ends=False)  # killed after step 7; the last checkpoint is of step 4
    steps(tmp_path, 4, 10)
    trained = [row["current_steps"] for row in rows(tmp_path) if "loss" in row]
    assert trained == list(range(1, 11))
    assert [row["current_steps"] for row in rows(tmp_path) if "eval_loss" in row] == [4, 8]


def test_resumed_run_drops_summary_row_of_previous_part(tmp_path):
    steps(tmp_path, 0, 4)
    steps(tmp_path, 4, 10)
    assert [row["current_steps"] for row in rows(tmp_path)] == [1, 2, 3, 4, 4, 5, 6, 7, 8, 8, 9, 10, 10]


def test_truncated_log_row_does_not_prevent_resume(tmp_path):
    steps(tmp_path, 0, 4, ends=False)
    with (tmp_path / "trainer_log.jsonl").open("a") as file:
        file.write('{"current_steps": 5, "lo')
    steps(tmp_path, 4, 6)
    assert [row["current_steps"] for row in rows(tmp_path) if "loss" in row] == [1, 2, 3, 4, 5, 6]


def test_new_run_starts_a_new_log(tmp_path):
    steps(tmp_path, 0, 8)
    steps(tmp_path, 0, 2)
    assert len([row for row in rows(tmp_path) if "loss" in row]) == 2


def test_evaluation_after_training_is_not_logged_as_training(tmp_path):
    callback = steps(tmp_path, 0, 4)
    before = rows(tmp_path)
    callback.on_log(None, TrainerState(global_step=4, max_steps=4), TrainerControl(), logs={"eval_loss": 1.0})
    assert rows(tmp_path) == before


def test_only_main_process_writes_the_log(tmp_path):
    callback = JsonlCallback(tmp_path)
    state = TrainerState(max_steps=2, is_world_process_zero=False)
    callback.on_train_begin(None, state, TrainerControl())
    callback.on_log(None, state, TrainerControl(), logs={"loss": 1.0})
    assert list(tmp_path.iterdir()) == []


def test_named_eval_datasets_have_separate_log_rows(tmp_path):
    callback = steps(tmp_path, 0, 1, ends=False)
    callback.on_log(None, TrainerState(global_step=1, max_steps=4), TrainerControl(), logs={"eval_news_loss": 1.5})
    assert rows(tmp_path)[-1]["eval_news_loss"] == 1.5


# --- results ----------------------------------------------------------------------------------------------------------


def test_metrics_are_saved_per_split_and_combined(tmp_path):
    save_metrics("train", {"train_loss": 1.5, "epoch": 3.0}, tmp_path)
    save_metrics("eval", {"eval_loss": 1.2, "epoch": 3.0}, tmp_path)
    assert json.loads((tmp_path / "train_results.json").read_text()) == {"epoch": 3.0, "train_loss": 1.5}
    assert json.loads((tmp_path / "eval_results.json").read_text()) == {"epoch": 3.0, "eval_loss": 1.2}
    everything = (tmp_path / "all_results.json").read_text()
    assert json.loads(everything) == {"train_loss": 1.5, "eval_loss": 1.2, "epoch": 3.0}
    assert everything.index("epoch") < everything.index("eval_loss") < everything.index("train_loss")


def test_full_disk_keeps_previous_results(tmp_path, monkeypatch):
    save_metrics("train", {"train_loss": 1.5}, tmp_path)
    full = OSError(28, "No space left on device")

    def write_text(self, text, **_):
        raise full

    monkeypatch.setattr("pathlib.Path.write_text", write_text)
    with pytest.raises(OSError, match="No space"):
        save_metrics("train", {"train_loss": 9.0}, tmp_path)
    monkeypatch.undo()
    assert json.loads((tmp_path / "train_results.json").read_text()) == {"train_loss": 1.5}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["all_results.json", "train_results.json"]


def test_file_written_by_two_threads_has_the_text_of_one(tmp_path):
    path, texts = tmp_path / "results.json", ["a" * 100_000, "b" * 100_000]
    write_text_atomically(path, texts[0])

    def write(text):
        for _ in range(100):
            write_text_atomically(path, text)
            assert path.read_text() in texts

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(write, texts))
    assert list(tmp_path.iterdir()) == [path]


def test_saved_trainer_state_is_read_by_transformers(tmp_path):
    save_state(TrainerState(global_step=3, log_history=[{"loss": 1.0, "step": 3}]), tmp_path)
    text = (tmp_path / "trainer_state.json").read_text()
    assert text.endswith("}\n")
    from transformers import TrainerState as Theirs

    assert Theirs.load_from_json(str(tmp_path / "trainer_state.json")).log_history == [{"loss": 1.0, "step": 3}]


def test_speed_metrics_match_transformers(monkeypatch):
    from transformers.trainer_utils import speed_metrics as theirs

    monkeypatch.setattr("time.time", lambda: 110.0)
    options = {"num_samples": 30, "num_steps": 7, "num_tokens": 12345}
    assert speed_metrics("train", 100.0, **options) == theirs("train", 100.0, **options)
    assert speed_metrics("eval", 110.0, **options) == {"eval_runtime": 0.0}


def test_metrics_are_printed_in_aligned_lines():
    shown = format_metrics("train", {"train_runtime": 83.2, "train_loss": 1.5, "total_flos": 2e12})
    assert shown.splitlines() == [
        "***** train metrics *****",
        "  total_flos    = 2,000 GF",
        "  train_loss    =      1.5",
        "  train_runtime =  0:01:23",
    ]


@pytest.mark.parametrize("tied", [True, False])
def test_floating_point_operations_match_transformers(tied):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, tie_word_embeddings=tied,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    assert parameters_without_embeddings(model) == model.num_parameters(exclude_embeddings=True)


def test_module_without_embeddings_counts_all_parameters():
    assert parameters_without_embeddings(nn.Linear(3, 4)) == 16


# --- plots ------------------------------------------------------------------------------------------------------------

HISTORY = [
    *({"loss": 3 * math.exp(-s / 50), "step": s} for s in range(1, 101)),
    *({"eval_loss": 3.0 - s / 100, "eval_accuracy": s / 100, "step": s} for s in (50, 100)),
    {"train_loss": 1.0, "step": 100},
]


def test_only_logged_metrics_are_plotted(tmp_path):
    from matplotlib.image import imread

    drawn = plot_history(HISTORY, tmp_path)
    assert [path.name for path in drawn] == [
        "training_loss.png", "training_eval_loss.png", "training_eval_accuracy.png",
    ]  # fmt: skip
    plot = imread(drawn[0])
    assert plot.shape[0] > 400
    assert plot.shape[1] > 800
    assert plot[..., :3].std() > 0.02  # the image is not empty
    assert plot_history([{"train_loss": 1.0, "step": 1}], tmp_path / "none") == []


def test_moving_average_matches_llamafactory():
    """Exponential average with w = 1.8 (1 / (1 + e^(-n / 20)) - 1/2), computed by hand for n = 4."""
    weight = 1.8 * (1 / (1 + math.exp(-0.2)) - 0.5)
    expected = [4.0, 4.0 * weight + 2.0 * (1 - weight)]
    expected.append(expected[-1] * weight + 3.0 * (1 - weight))
    expected.append(expected[-1] * weight + 1.0 * (1 - weight))
    assert smooth([4.0, 2.0, 3.0, 1.0]) == pytest.approx(expected, rel=1e-12)
    assert smooth([]) == []


def test_non_finite_loss_leaves_a_gap_and_average_continues():
    history = [{"loss": 1.0, "step": 1}, {"loss": math.inf, "step": 2}, {"loss": 1.0, "step": 3}]
    (curve,) = curves(history, {"loss": ""})
    assert math.isnan(curve.values[1])
    averages = smooth(curve.values)
    assert math.isnan(averages[1])
    assert averages[2] == 1.0


def test_plotting_changes_no_backend_and_keeps_no_figure(tmp_path):
    import matplotlib

    before = matplotlib.rcParams._get_backend_or_none()
    plot_history(HISTORY, tmp_path)
    assert matplotlib.rcParams._get_backend_or_none() == before


def test_dollar_signs_in_names_are_not_mathematics(tmp_path):
    history = [{"step": step, "eval_a$^$b_loss": 1.0, "eval_c_loss": 2.0, "loss": 1.0} for step in (1, 2)]
    assert plot_history(history, tmp_path, "run$^$1", ["a$^$b", "c"])


def test_rewards_of_completions_are_plotted(tmp_path, request):
    rewards = {"reward": 1.0, "rewards/accuracy/mean": 0.5, "rewards/accuracy/std": 0.1}
    assert [path.name for path in plot_history([{"step": 1, **rewards}], tmp_path)] == ["training_rewards.png"]
    legends = request.getfixturevalue("legends")
    history = [{"step": step, **rewards, "rewards/format/mean": 0.5} for step in (1, 2)]
    plot_history([*history, {"step": 2, "eval_reward": 0.9, "eval_rewards/format/mean": 0.4}], tmp_path)
    assert legends == [["reward", "accuracy", "format", "evaluation"]]


@pytest.fixture
def legends(monkeypatch):
    """The texts of each legend that is drawn."""
    from matplotlib.axes import Axes

    found, legend = [], Axes.legend

    def recorded(axes, *args, **kwargs):
        drawn = legend(axes, *args, **kwargs)
        found.append([text.get_text().strip() for text in drawn.get_texts()])
        return drawn

    monkeypatch.setattr(Axes, "legend", recorded)
    return found


def test_plots_name_every_evaluation_set(tmp_path, legends):
    names = ["_news", "a/b", "c"]
    history = [{"step": step, **{f"eval_{name}_loss": 1.0 for name in names}} for step in (1, 2)]
    plot_history(history, tmp_path, "", names)
    plot_margins({"_news": [1.0, -1.0], "c": [1.0]}, tmp_path)
    assert legends[0] == names
    assert [text.partition(":")[0] for text in legends[1]] == ["_news", "c"]


def test_other_losses_of_an_evaluation_are_not_plotted_as_evaluation_sets(tmp_path, legends):
    row = {"eval_loss": 1.0, "eval_aux_loss": 2.0, "eval_nll_loss": 3.0, "eval_accuracy": 0.5}
    (loss, accuracy) = plot_history([{**row, "step": 1}], tmp_path)
    assert (loss.name, accuracy.name) == ("training_eval_loss.png", "training_eval_accuracy.png")
    assert legends == []


def test_plot_of_an_evaluation_is_not_called_training_loss(tmp_path):
    state = TrainerState(log_history=[{"eval_loss": 1.0, "step": 1}])
    run = SimpleNamespace(state=state, eval_sets={"": None})
    assert draw_plots(run, RunOptions(output_dir=str(tmp_path)), {}) == {}
    assert (tmp_path / "training_eval_loss.png").is_file()


def test_values_that_were_not_logged_are_left_out_of_plots():
    (curve,) = curves([{"loss": None, "step": 1}, {"loss": 1.0, "step": 2}], {"loss": "", "eval_loss": ""})
    assert (curve.steps, curve.values) == ((2,), (1.0,))


# --- model card -------------------------------------------------------------------------------------------------------


def facts(**changes):
    known = {
        "name": "first", "base_model": "Qwen/Qwen2-0.5B", "datasets": ["tatsu-lab/alpaca", "data/mine.json"],
        "stage": "sft", "stage_title": "supervised fine-tuning", "method": "lora",
        "trainable_parameters": 1000, "all_parameters": 100_000, "is_adapter": True, "folder": "saves/first",
        "options": {"learning_rate": 1e-4, "output_dir": "/home/me/out", "hub_token": "secret",
                    "model_name_or_path": "/home/me/models/Qwen2-0.5B", "note": "a: b"},
        "results": {"eval_loss": 1.25}, "stats": ["dropped: no answer: 2 of 10 examples (mine.json: 3, 4)"],
    }  # fmt: skip
    return CardFacts(**{**known, **changes})


@pytest.mark.parametrize(
    ("folder", "name"),
    [("/saves/first", "first"), ("/saves/first/checkpoint-2", "first/checkpoint-2"),
     ("/cache/hub/models--an-owner--a-name/snapshots/0123abcd", "an-owner/a-name")],
)  # fmt: skip
def test_card_names_a_merged_adapter(folder, name):
    text = card_text(facts(is_adapter=True, merged_adapters=[folder]))
    assert f'PeftModel.from_pretrained(base, "{name}").merge_and_unload()' in text


def test_evaluations_are_shown_without_results():
    table = "| step | eval_loss |\n|---|---|\n| 10 | 1.5 |"
    assert f"## Results\n\n{table}\n" in card_text(facts(results={}, evaluations=table))


def test_commands_quote_a_folder_with_spaces():
    lines = serving_lines("my model", gguf="model.gguf")
    assert lines[:2] == ["burnish chat 'my model'", "burnish api 'my model'"]
    assert lines[-2:] == ["ollama create 'my model' -f 'my model/Modelfile'", "llama-server -m 'my model/model.gguf'"]


def header(text):
    return yaml.safe_load(text.split("---\n")[1])


def test_model_card_header_is_read_by_the_hub(tmp_path):
    from huggingface_hub import ModelCard

    path = write_card(tmp_path, facts())
    data = ModelCard.load(path).data
    assert data.base_model == "Qwen/Qwen2-0.5B"
    assert data.library_name == "peft"
    assert data.datasets == ["tatsu-lab/alpaca"]
    assert data.tags == ["burnish", "sft", "lora"]
    assert data.license is None


def test_license_is_named_only_if_known():
    assert "license" not in header(card_text(facts()))
    assert header(card_text(facts(license="apache-2.0")))["license"] == "apache-2.0"


def test_local_names_are_not_published_to_the_hub(tmp_path, monkeypatch):
    (tmp_path / "models" / "mine").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert is_hub_name("owner/mine")
    assert not is_hub_name("models/mine")
    read = header(card_text(facts(base_model="models/mine", datasets=["a.json"])))
    assert "base_model" not in read
    assert "datasets" not in read


def test_options_in_a_card_name_no_local_folder(tmp_path, monkeypatch):
    (tmp_path / "models" / "mine").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    local = {"a": "models/mine", "b": ["../ann/model"], "c": {"d": "~ann/model"}, "e": "/home/ann/model"}
    text = card_text(facts(options={**local, "f": "owner/model", "g": "rewards.py:exact"}))
    options = yaml.safe_load(text.split("```yaml\n")[1].split("```")[0])
    assert options == {
        "a": "mine", "b": ["model"], "c": {"d": "model"}, "e": "model", "f": "owner/model", "g": "rewards.py:exact",
    }  # fmt: skip


def test_base_of_local_model_is_read_from_its_card(tmp_path):
    write_card(tmp_path / "sft", facts())
    result = header(card_text(facts(base_model=str(tmp_path / "sft"))))
    assert (result["base_model"], result["base_model_relation"]) == ("Qwen/Qwen2-0.5B", "adapter")
    (tmp_path / "sft" / "README.md").write_text("---\nbase_model: [\n---\n")
    assert "base_model" not in header(card_text(facts(base_model=str(tmp_path / "sft"))))


def test_card_contains_no_secrets_or_paths():
    text = card_text(facts())
    assert "burnish chat saves/first\n" in text
    assert "/home/me" not in text
    assert "secret" not in text
    assert "hub_token" not in text
    assert "model_name_or_path: Qwen2-0.5B" in text


def test_card_describes_method_results_options_and_row_counts():
    text = card_text(facts())
    assert (
        "A LoRA adapter for `Qwen/Qwen2-0.5B`, created by supervised fine-tuning on `tatsu-lab/alpaca` and `mine.json`"
        in text
    )
    assert "1,000 of 100,000 parameters were trained (1%)" in text
    assert "| eval_loss | 1.25 |" in text
    assert "dropped: no answer: 2 of 10 examples" in text
    block = text.split("```yaml\n")[1].split("```")[0]
    assert yaml.safe_load(block)["note"] == "a: b"


@pytest.mark.parametrize(
    ("changes", "loaded"),
    [
        ({"method": "lora"}, 'AutoModelForCausalLM.from_pretrained("Qwen/Qwen2-0.5B")\n'),
        (
            {"method": "lora", "base_model": "/models/mine"},
            "PeftConfig.from_pretrained(folder).base_model_name_or_path",
        ),
        ({"method": "lora"}, "PeftModel.from_pretrained(base, folder)"),
        ({"method": "full", "is_adapter": False}, "AutoModelForCausalLM.from_pretrained(folder)"),
    ],
)
def test_code_on_the_card_loads_the_model(changes, loaded):
    code = card_text(facts(**changes)).split("```python\n")[1].split("```")[0]
    compile(code, "card", "exec")
    assert loaded in code


def test_third_party_adapter_is_not_claimed_to_load_in_peft():
    text = card_text(facts(method="gains", is_adapter=True, loads_in_peft=False))
    assert "peft" not in text.lower()
    assert "finetuning_type gains" in text


@pytest.mark.parametrize("stage", ["sft", "pt"])
def test_code_on_the_card_runs(tmp_path, monkeypatch, capsys, stage):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = ["Hello", "Once", "upon", "a", "time", "<unk>"]
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>", pad_token="<unk>")
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=6, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
        num_key_value_heads=1, max_position_embeddings=256, eos_token_id=None,
    )  # fmt: skip
    folder = tmp_path / "first"
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    write_card(folder, facts(method="full", is_adapter=False, stage=stage))
    code = (folder / "README.md").read_text().split("```python\n")[1].split("```")[0]
    monkeypatch.chdir(folder)
    exec(compile(code, "card", "exec"), {})
    output = capsys.readouterr().out.split()
    assert len(output) > 10
    assert set(output) <= set(words)


# --- invalid text -----------------------------------------------------------------------------------------------------


def test_lone_surrogate_in_a_message_is_escaped(tmp_path):
    """Exceptions of user code may contain one, which UTF-8 cannot encode."""
    metadata = RunMetadata(tmp_path, lambda error: Problem(str(error)))
    metadata.begin("# \ud800", ["cpu"])
    metadata.event("stage", "\ud800")
    write_failure(tmp_path, Problem("\ud800"), ValueError("\ud800"))
    assert json.loads((tmp_path / "events.jsonl").read_text().splitlines()[-1])["text"] == "\ud800"
    assert json.loads((tmp_path / "outcome.json").read_text())["sentence"] == "\ud800"


@pytest.mark.parametrize(("error", "code"), [(UserError("a.json: no such file."), 2), (OSError("disk"), 1)])
def test_outcome_of_a_failure_has_the_exit_status_of_the_command(tmp_path, error, code):
    wrapped = RuntimeError("in a library")
    wrapped.__cause__ = error
    write_failure(tmp_path, Problem(str(error)), wrapped)
    assert json.loads((tmp_path / "outcome.json").read_text())["exit_code"] == code


# --- progress ---------------------------------------------------------------------------------------------------------


def test_progress_of_a_prediction_is_written_at_most_once_per_second_and_at_its_end(tmp_path, monkeypatch):
    metadata, now_s = RunMetadata(tmp_path, lambda error: Problem(str(error))), [100.0]
    monkeypatch.setattr("burnish.report.metadata.time.time", lambda: now_s[0])
    metadata.begin("", ["cpu"])
    seen = []
    for done in range(1, 9):
        metadata.on_prediction_step(None, None, None, done=done, total=8)
        seen.append(json.loads((tmp_path / "progress.json").read_text()))
        now_s[0] += 0.25
    assert [row["done"] for row in seen] == [1, 1, 1, 1, 5, 5, 5, 8]
    assert [row["left_s"] for row in seen[::4]] == [None, 0.75]
    assert "evaluating" in (tmp_path / "events.jsonl").read_text()
    metadata.begin("", ["cpu"])
    assert not (tmp_path / "progress.json").exists()


def test_evaluation_during_training_writes_no_progress(tmp_path):
    metadata = RunMetadata(tmp_path, lambda error: Problem(str(error)))
    metadata.begin("", ["cpu"])
    metadata.on_train_begin(None, TrainerState(), None)
    metadata.on_prediction_step(None, None, None, done=1, total=8)
    assert not (tmp_path / "progress.json").exists()
