"""``burnish predict``: responses or scores for the held-out rows of a run, or for a named dataset."""

import json
from pathlib import Path

import pytest

import burnish
from burnish.cli import main
from burnish.serve.eval.dataset import _table

DEMO = Path(burnish.__file__).parent / "demo"
pytestmark = pytest.mark.run


def lines(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def runs_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a folder with data and two runs: a language model (``writes``) and a reward model (``scores``)."""
    runs_folder = tmp_path_factory.mktemp("predict")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(runs_folder)
        patch.setenv("BURNISH_CACHE", str(runs_folder / "cache"))
        (runs_folder / "data").symlink_to(DEMO / "data")
        defaults = [
            f"model_name_or_path={DEMO / 'model'}",
            "max_steps=1",
            "use_cpu=true",
            "do_train=true",
            "cutoff_len=64",
        ]
        argv = ["dataset=demo_train", "val_size=3", "finetuning_type=full", "output_dir=writes"]
        assert main(["train", *defaults, *argv]) == 0
        argv = ["stage=rm", "dataset=demo_pairs", "val_size=4", "output_dir=scores", "save_steps=1"]
        assert main(["train", *defaults, *argv]) == 0
    return runs_folder


@pytest.fixture(scope="module")
def all_runs(runs_folder: Path) -> Path:
    """Add a run of each other stage to ``runs_folder``, with a validation split of 4 of 12 records and its loss."""
    prompts = [{"prompt": line["instruction"], "answer": line["output"]} for line in lines(DEMO / "data/train.jsonl")]
    (runs_folder / "prompts.jsonl").write_text("".join(json.dumps(one) + "\n" for one in prompts[:12]))
    (runs_folder / "mine.py").write_text("def length(completions, **others):\n    return [1.0 for _ in completions]\n")
    defaults = [f"model_name_or_path={DEMO / 'model'}", "max_steps=2", "use_cpu=true", "do_train=true", "cutoff_len=64"]
    defaults += ["val_size=4", "max_samples=12", "finetuning_type=full", "do_eval=true", "learning_rate=1e-3"]
    defaults += ["save_strategy=no", "plot_loss=false", "bf16=false", "num_generations=2", "max_completion_length=4"]
    stage_runs = {
        "tuned": ["dataset=demo_train"],
        "dpo": ["stage=dpo", "dataset=demo_pairs", "pref_loss=ipo", "tokenized_path=tokenized"],
        "lora": ["stage=dpo", "dataset=demo_pairs", "finetuning_type=lora"],
        "kto": ["stage=kto", "dataset=demo_pairs", "val_size=12"],
        "grpo": ["stage=grpo", "dataset=prompts.jsonl", "reward_funcs=exact_match_reward"],
        "own": ["stage=rloo", "dataset=prompts.jsonl", "reward_funcs=mine.py:length"],
        "pt": ["stage=pt", "dataset=text.txt", "packing=false"],
    }
    (runs_folder / "text.txt").write_text("".join(f"line {number} of the text\n" for number in range(12)))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(runs_folder)
        patch.setenv("BURNISH_CACHE", str(runs_folder / "cache"))
        for name, own in stage_runs.items():
            own_keys = {one.partition("=")[0] for one in own}
            options = [one for one in defaults if one.partition("=")[0] not in own_keys]
            options = [one for one in options if name in ("grpo", "own") or not one.startswith(("num_gen", "max_comp"))]
            assert main(["train", *options, *own, f"output_dir={name}"]) == 0
    return runs_folder


@pytest.fixture(autouse=True)
def temporary_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BURNISH_CACHE", str(tmp_path / "cache"))


def test_run_predicts_its_held_out_records_and_keeps_its_files(runs_folder: Path) -> None:
    options = (runs_folder / "writes/run.yaml").read_text()
    assert main(["predict", str(runs_folder / "writes"), "max_new_tokens=3"]) == 0
    result = lines(runs_folder / "writes/predictions/generated_predictions.jsonl")
    assert [set(line) for line in result] == [{"prompt", "predict", "label"}] * 3
    assert "predict_exact_match" in json.loads((runs_folder / "writes/predictions/predict_results.json").read_text())
    assert (runs_folder / "writes/run.yaml").read_text() == options
    progress = json.loads((runs_folder / "writes/predictions/progress.json").read_text())
    assert (progress["done"], progress["total"]) == (3, 3)


@pytest.mark.slow
def test_temperature_0_is_greedy_decoding(runs_folder: Path) -> None:
    results = []
    for options in (["temperature=0"], ["do_sample=false"]):
        assert main(["predict", str(runs_folder / "writes"), "max_new_tokens=6", *options]) == 0
        results.append(lines(runs_folder / "writes/predictions/generated_predictions.jsonl"))
    assert results[0] == results[1]


def test_reward_model_scores_its_held_out_pairs(runs_folder: Path) -> None:
    for folder in ("scores", "scores/checkpoint-1"):
        assert main(["predict", str(runs_folder / folder)]) == 0
        result = lines(runs_folder / folder / "predictions/generated_predictions.jsonl")
        assert [line["record"] for line in result] == [1, 2, 3, 4]
        assert all(isinstance(line["chosen"], float) for line in result)


def test_named_dataset_is_predicted(runs_folder: Path, tmp_path: Path) -> None:
    rows = [{"instruction": "Say red", "output": "red"}, {"instruction": "Say blue", "output": "blue"}]
    (tmp_path / "mine.json").write_text(json.dumps(rows))
    argv = ["eval_dataset=mine.json", "max_new_tokens=2", "save_dir=out"]
    assert main(["predict", str(runs_folder / "writes"), *argv]) == 0
    assert [line["label"] for line in lines(tmp_path / "out/generated_predictions.jsonl")] == ["red", "blue"]


def test_output_dir_of_the_command_line_gets_the_results(runs_folder: Path, tmp_path: Path) -> None:
    assert main(["predict", str(runs_folder / "writes"), "max_new_tokens=2", "output_dir=there"]) == 0
    assert len(lines(tmp_path / "there/generated_predictions.jsonl")) == 3


def test_dataset_of_the_command_line_is_predicted_entirely(runs_folder: Path, tmp_path: Path) -> None:
    """The training run held out three rows of its dataset; this dataset has only three rows."""
    (tmp_path / "mine.json").write_text(json.dumps([{"instruction": "Say red", "output": "red"}] * 3))
    argv = ["dataset=mine.json", "max_new_tokens=2", "save_dir=whole"]
    assert main(["predict", str(runs_folder / "writes"), *argv]) == 0
    assert len(lines(tmp_path / "whole/generated_predictions.jsonl")) == 3


def test_training_config_selects_its_trained_model(runs_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(runs_folder)
    options = (runs_folder / "writes/run.yaml").read_text()
    (runs_folder / "run.yaml").write_text(options)
    assert main(["predict", "run.yaml", "max_new_tokens=2", "seed=5"]) == 0
    assert (runs_folder / "writes/run.yaml").read_text() == options
    assert len(lines(runs_folder / "writes/predictions/generated_predictions.jsonl")) == 3


def test_reward_model_is_detected_and_evaluated(runs_folder: Path) -> None:
    argv = [f"dataset_dir={runs_folder / 'data'}", "eval_dataset=demo_pairs", "max_samples=5", "save_dir=measured"]
    assert main(["eval", str(runs_folder / "scores"), *argv]) == 0
    assert "eval_accuracy" in json.loads(Path("measured/eval_results.json").read_text())


def test_table_of_several_models_has_all_their_metrics() -> None:
    head, *rows = _table([("a", {"eval_loss": 1.0, "eval_runtime": 3.0}), ("model", {"eval_accuracy": 0.5})])
    assert head.split() == ["eval_loss", "eval_accuracy"]
    assert [row.split() for row in rows] == [["a", "1.0000", "-"], ["model", "-", "0.5000"]]
    assert len({len(line) for line in (head, *rows)}) == 1


def test_missing_data_for_prediction_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["predict", str(DEMO / "model")]) == 2
    assert "eval_dataset is not set" in capsys.readouterr().err


def test_config_file_next_to_a_model_is_not_mistaken_for_its_run(
    runs_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.yaml").write_text((runs_folder / "writes/run.yaml").read_text())
    (tmp_path / "base").symlink_to(DEMO / "model")
    assert main(["predict", "base"]) == 2
    assert "eval_dataset is not set" in capsys.readouterr().err


def test_relative_dataset_path_of_a_run_is_found_from_another_folder(
    runs_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"instruction": "Say red", "output": "red"}, {"instruction": "Say blue", "output": "blue"}]
    (runs_folder / "mine.json").write_text(json.dumps(rows))
    monkeypatch.chdir(runs_folder)
    argv = [f"model_name_or_path={DEMO / 'model'}", "eval_dataset=mine.json", "cutoff_len=64", "output_dir=looked"]
    argv += ["dataset=demo_train", "max_samples=2", "max_steps=1", "use_cpu=true", "finetuning_type=full"]
    assert main(["train", *argv, "do_train=true"]) == 0
    monkeypatch.chdir(tmp_path)
    assert main(["predict", str(runs_folder / "looked"), "max_new_tokens=2"]) == 0
    result = lines(runs_folder / "looked/predictions/generated_predictions.jsonl")
    assert [line["label"] for line in result] == ["red", "blue"]


# --- runs of other stages ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "num_prompts"),
    [
        ("lora", 4),
        ("kto", 9),
        *(pytest.param(name, 4, marks=pytest.mark.slow) for name in ("dpo", "grpo", "own")),
    ],
)
def test_run_of_each_stage_answers_the_prompts_that_it_held_out(all_runs: Path, name: str, num_prompts: int) -> None:
    assert main(["predict", str(all_runs / name), "max_new_tokens=3", "bf16=false"]) == 0
    result = lines(all_runs / name / "predictions/generated_predictions.jsonl")
    chosen = {line["chosen"] for line in lines(DEMO / "data/pairs.jsonl")[:12]}
    rejected = {line["rejected"] for line in lines(DEMO / "data/pairs.jsonl")[:12]}
    assert len(result) == len({line["prompt"] for line in result}) == num_prompts
    assert all(line["prompt"].endswith("<|im_start|>assistant\n") or name in ("grpo", "own") for line in result)
    if name in ("dpo", "lora"):
        assert {line["label"] for line in result} <= chosen
    elif name == "kto":  # only desirable responses are references
        assert {line["label"] for line in result} <= {*chosen, ""}
        assert not {line["label"] for line in result} & (rejected - chosen)
    else:
        assert [line["label"] for line in result] == [""] * num_prompts
    metrics = json.loads((all_runs / name / "predictions/predict_results.json").read_text())
    assert ("predict_exact_match" in metrics) == (name not in ("grpo", "own"))


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ["tuned", "dpo", "lora", "kto", "grpo", "pt"])
def test_eval_of_a_run_repeats_the_evaluation_of_its_own_split(all_runs: Path, name: str) -> None:
    """The saved weights are rounded to bfloat16, so losses differ slightly. Without the model before training as the
    reference, the IPO loss would be 25 and the KTO loss 0.5."""
    assert main(["eval", str(all_runs / name), "bf16=false"]) == 0
    trained, found = (
        json.loads((all_runs / name / folder / "eval_results.json").read_text()) for folder in ("", "evaluation")
    )
    same = "eval_completions/mean_length" if name == "grpo" else "eval_loss"
    assert found[same] == pytest.approx(trained[same], rel=0.01)
    assert found.keys() == trained.keys()


def test_eval_of_a_named_dataset_computes_the_loss_of_its_responses(all_runs: Path) -> None:
    argv = [f"dataset_dir={all_runs / 'data'}", "eval_dataset=demo_heldout", "max_samples=4", "save_dir=named"]
    assert main(["eval", str(all_runs / "dpo"), *argv]) == 0
    found = json.loads(Path("named/eval_results.json").read_text())
    assert "eval_loss" in found
    assert "eval_rewards/margins" not in found


def test_named_stage_evaluates_pairs_against_the_model_before_training(all_runs: Path) -> None:
    argv = [
        f"dataset_dir={all_runs / 'data'}",
        "eval_dataset=demo_pairs",
        "max_samples=4",
        "save_dir=named",
        "stage=dpo",
    ]
    assert main(["eval", str(all_runs / "dpo"), *argv]) == 0
    assert abs(json.loads(Path("named/eval_results.json").read_text())["eval_rewards/margins"]) > 1e-3


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("record", "label"),
    [
        ({"instruction": "Say red", "output": "red"}, "red"),
        ({"prompt": "Say red", "chosen": "red", "rejected": "blue"}, "red"),
        ({"prompt": "Say red", "completion": "red", "label": True}, "red"),
        ({"prompt": "Say red", "completion": "blue", "label": False}, ""),
        ({"prompt": "Say red", "solution": "red"}, ""),
        ({"prompt": [{"role": "user", "content": "Say red"}], "solution": "red"}, ""),
        ({"messages": [{"role": "user", "content": "Say red"}, {"role": "assistant", "content": "red"}]}, "red"),
    ],
)
def test_prompts_of_records_of_any_kind_are_answered(
    runs_folder: Path, tmp_path: Path, record: dict[str, object], label: str
) -> None:
    (tmp_path / "mine.jsonl").write_text(json.dumps(record) + "\n")
    assert (
        main(["predict", str(runs_folder / "writes"), "eval_dataset=mine.jsonl", "max_new_tokens=2", "save_dir=out"])
        == 0
    )
    (line,) = lines(tmp_path / "out/generated_predictions.jsonl")
    assert "Say red" in line["prompt"]
    assert line["label"] == label


def test_reward_functions_in_a_folder_are_not_run(all_runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", str(all_runs / "own")]) == 2
    assert "Pass them on the command line: reward_funcs=" in capsys.readouterr().err
    assert main(["eval", str(all_runs / "own"), f"reward_funcs={all_runs / 'mine.py'}:length"]) == 0
    assert json.loads((all_runs / "own/evaluation/eval_results.json").read_text())["eval_reward"] == 1


def test_run_on_plain_text_has_no_prompts_to_predict(all_runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["predict", str(all_runs / "pt")]) == 2
    assert "Run burnish eval to compute the loss" in capsys.readouterr().err


def test_eval_can_generate_responses_to_the_split_of_a_run(all_runs: Path) -> None:
    argv = ["predict_with_generate=true", "max_new_tokens=2", "save_dir=generated"]
    assert main(["eval", str(all_runs / "dpo"), *argv]) == 0
    assert len(lines(Path("generated/generated_predictions.jsonl"))) == 4


def test_help_lists_only_options_that_predict_reads(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["predict", "--help"]) == 0
    listed = {line.split()[0] for line in capsys.readouterr().out.splitlines() if line.strip().startswith("--")}
    assert {"--eval_dataset", "--max_new_tokens", "--samples", "--predict_metrics"} <= listed
    assert not {"--predict_with_generate", "--tokenized_path", "--streaming", "--buffer_size"} & listed


def test_options_without_effect_on_predictions_are_reported(
    runs_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["predict", str(runs_folder / "writes"), "max_new_tokens=2", "predict_with_generate=false"]) == 0
    assert '"predict_with_generate" has no effect here' in capsys.readouterr().out
    assert len(lines(runs_folder / "writes/predictions/generated_predictions.jsonl")) == 3


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["dpo", "kto"])
def test_training_config_of_each_stage_selects_its_run(
    all_runs: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(all_runs)
    config = all_runs / f"{name}.yaml"
    config.write_text((all_runs / name / "run.yaml").read_text())
    assert main(["eval", config.name, "save_dir=from-config"]) == 0
    trained, found = (
        json.loads((all_runs / folder / "eval_results.json").read_text()) for folder in (name, "from-config")
    )
    assert found["eval_loss"] == pytest.approx(trained["eval_loss"], rel=0.01)
    assert main(["predict", config.name, "max_new_tokens=2", "save_dir=from-config"]) == 0
    num_prompts = {"dpo": 4, "kto": 9}[name]
    assert len(lines(all_runs / "from-config/generated_predictions.jsonl")) == num_prompts
