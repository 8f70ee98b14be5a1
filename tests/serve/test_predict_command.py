"""``burnish predict``: responses or scores for the held-out rows of a run, or for a named dataset."""

import json
from pathlib import Path

import pytest

import burnish
from burnish.cli import main

DEMO = Path(burnish.__file__).parent / "demo"
pytestmark = pytest.mark.run


def lines(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the data, and two runs that were started in it: answers and scores."""
    place = tmp_path_factory.mktemp("predict")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        patch.setenv("BURNISH_CACHE", str(place / "cache"))
        (place / "data").symlink_to(DEMO / "data")
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
    return place


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BURNISH_CACHE", str(tmp_path / "cache"))


def test_run_predicts_its_held_out_records_and_keeps_its_files(place: Path) -> None:
    options = (place / "writes/run.yaml").read_text()
    assert main(["predict", str(place / "writes"), "max_new_tokens=3"]) == 0
    result = lines(place / "writes/predictions/generated_predictions.jsonl")
    assert [set(line) for line in result] == [{"prompt", "predict", "label"}] * 3
    assert "predict_exact_match" in json.loads((place / "writes/predictions/predict_results.json").read_text())
    assert (place / "writes/run.yaml").read_text() == options


def test_temperature_0_is_greedy_decoding(place: Path) -> None:
    results = []
    for options in (["temperature=0"], ["do_sample=false"]):
        assert main(["predict", str(place / "writes"), "max_new_tokens=6", *options]) == 0
        results.append(lines(place / "writes/predictions/generated_predictions.jsonl"))
    assert results[0] == results[1]


def test_reward_model_scores_its_held_out_pairs(place: Path) -> None:
    for folder in ("scores", "scores/checkpoint-1"):
        assert main(["predict", str(place / folder)]) == 0
        result = lines(place / folder / "predictions/generated_predictions.jsonl")
        assert [line["record"] for line in result] == [1, 2, 3, 4]
        assert all(isinstance(line["chosen"], float) for line in result)


def test_named_dataset_is_predicted(place: Path, tmp_path: Path) -> None:
    rows = [{"instruction": "Say red", "output": "red"}, {"instruction": "Say blue", "output": "blue"}]
    (tmp_path / "mine.json").write_text(json.dumps(rows))
    argv = ["eval_dataset=mine.json", "max_new_tokens=2", "save_dir=out"]
    assert main(["predict", str(place / "writes"), *argv]) == 0
    assert [line["label"] for line in lines(tmp_path / "out/generated_predictions.jsonl")] == ["red", "blue"]


def test_output_dir_of_the_command_line_gets_the_results(place: Path, tmp_path: Path) -> None:
    assert main(["predict", str(place / "writes"), "max_new_tokens=2", "output_dir=there"]) == 0
    assert len(lines(tmp_path / "there/generated_predictions.jsonl")) == 3


def test_dataset_of_the_command_line_is_predicted_whole(place: Path, tmp_path: Path) -> None:
    """The training run held out three rows of its dataset; this dataset has no more than those."""
    (tmp_path / "mine.json").write_text(json.dumps([{"instruction": "Say red", "output": "red"}] * 3))
    argv = ["dataset=mine.json", "max_new_tokens=2", "save_dir=whole"]
    assert main(["predict", str(place / "writes"), *argv]) == 0
    assert len(lines(tmp_path / "whole/generated_predictions.jsonl")) == 3


def test_training_config_selects_its_trained_model(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    options = (place / "writes/run.yaml").read_text()
    (place / "run.yaml").write_text(options)
    assert main(["predict", "run.yaml", "max_new_tokens=2", "seed=5"]) == 0
    assert (place / "writes/run.yaml").read_text() == options
    assert len(lines(place / "writes/predictions/generated_predictions.jsonl")) == 3


def test_reward_model_is_detected_and_evaluated(place: Path) -> None:
    argv = [f"dataset_dir={place / 'data'}", "eval_dataset=demo_pairs", "max_samples=5", "save_dir=measured"]
    assert main(["eval", str(place / "scores"), *argv]) == 0
    assert "eval_accuracy" in json.loads(Path("measured/eval_results.json").read_text())


def test_missing_data_for_prediction_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["predict", str(DEMO / "model")]) == 2
    assert "eval_dataset is not set" in capsys.readouterr().err


def test_config_file_next_to_a_model_is_not_mistaken_for_its_run(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.yaml").write_text((place / "writes/run.yaml").read_text())
    (tmp_path / "base").symlink_to(DEMO / "model")
    assert main(["predict", "base"]) == 2
    assert "eval_dataset is not set" in capsys.readouterr().err


def test_relative_dataset_path_of_a_run_is_found_from_another_folder(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"instruction": "Say red", "output": "red"}, {"instruction": "Say blue", "output": "blue"}]
    (place / "mine.json").write_text(json.dumps(rows))
    monkeypatch.chdir(place)
    argv = [f"model_name_or_path={DEMO / 'model'}", "eval_dataset=mine.json", "cutoff_len=64", "output_dir=looked"]
    argv += ["dataset=demo_train", "max_samples=2", "max_steps=1", "use_cpu=true", "finetuning_type=full"]
    assert main(["train", *argv, "do_train=true"]) == 0
    monkeypatch.chdir(tmp_path)
    assert main(["predict", str(place / "looked"), "max_new_tokens=2"]) == 0
    result = lines(place / "looked/predictions/generated_predictions.jsonl")
    assert [line["label"] for line in result] == ["red", "blue"]
