"""``burnish score``: the scores of a reward model for the records of a dataset."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_scores import serving

from bad_inputs import read_output
from burnish import RewardModel
from burnish.cli import main
from burnish.config.errors import UserError
from burnish.inference.scoring import ScoreEngine
from pair_runs import make_pair_workspace, pairs, train_on_pairs
from serve.client import post

pytestmark = pytest.mark.run

TALK = [{"role": "user", "content": "Repeat: red"}, {"role": "assistant", "content": "red red"}]
LONG_TALK = [*TALK, {"role": "user", "content": "Repeat: blue"}, {"role": "assistant", "content": "blue " * 20}]
CONVERSATIONS = [LONG_TALK, TALK, [*TALK[:1], {"role": "assistant", "content": ""}]]
SHAPES = {"classifier": {"reward_head": "score"}, "adapter": {"finetuning_type": "lora"}}


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_pair_workspace(tmp_path_factory.mktemp("score"))
    with pytest.MonkeyPatch.context() as patch:
        for name, more in SHAPES.items():
            train_on_pairs(folder, patch, stage="rm", output_dir=str(folder / name), **more)
    return folder


@pytest.fixture(autouse=True)
def temporary_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BURNISH_CACHE", str(tmp_path / "cache"))


def write_lines(name: str, records: list) -> None:
    Path(name).write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


def lines(path: str) -> list[dict]:
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("name", SHAPES)
def test_scores_are_those_of_python_and_of_the_server(name: str, workspace: Path) -> None:
    texts = ["red", "<|im_start|>user\nred<|im_end|>\n"]
    write_lines("talks.jsonl", [{"id": n, "messages": talk} for n, talk in enumerate(CONVERSATIONS)])
    write_lines("texts.jsonl", [{"text": text} for text in texts])
    assert main(["score", str(workspace / name), "dataset=talks.jsonl,texts.jsonl", "save_dir=out"]) == 0
    found = [*lines("out/scores_talks.jsonl"), *lines("out/scores_texts.jsonl")]
    assert [(line["id"], line["messages"]) for line in found[:3]] == list(enumerate(CONVERSATIONS))
    scores = [line["score"] for line in found]
    expected = RewardModel.from_pretrained(workspace / name).score([*CONVERSATIONS, *texts])
    assert scores == pytest.approx(expected, abs=1e-5)
    assert len({*scores}) == len(scores)
    running, end = serving(workspace / name)
    try:
        body = {"model": "judge", "messages": [*CONVERSATIONS, *texts]}
        assert post(running, "/v1/score/evaluation", body)[1]["scores"] == pytest.approx(scores, abs=1e-5)
    finally:
        end()


def test_scores_of_pairs_are_those_of_predictions(workspace: Path) -> None:
    write_lines("pairs.jsonl", pairs(5))
    folder = str(workspace / "adapter")
    assert main(["score", folder, "dataset=pairs.jsonl", "save_dir=out", "score_name=judged"]) == 0
    assert main(["predict", folder, "eval_dataset=pairs.jsonl", "save_dir=predicted"]) == 0
    predicted = lines("predicted/generated_predictions.jsonl")
    for line, pair, other in zip(lines("out/scores_pairs.jsonl"), pairs(5), predicted, strict=True):
        own = {f"judged_{side}": pytest.approx(other[side], abs=1e-5) for side in ("chosen", "rejected")}
        assert line == {**pair, **own}


def test_score_does_not_depend_on_the_other_records(workspace: Path) -> None:
    records = [{"instruction": f"Repeat: {n}", "output": "red " * (n % 7), "n": n} for n in range(30)]
    scores = []
    for name, order, size in (("forward", records, 8), ("backward", records[::-1], 3), ("single", records, 1)):
        write_lines(f"{name}.jsonl", order)
        options = [f"dataset={name}.jsonl", "save_dir=out", f"batch_size={size}"]
        assert main(["score", str(workspace / "classifier"), *options]) == 0
        scores.append({line["n"]: line["score"] for line in lines(f"out/scores_{name}.jsonl")})
    assert scores[0] == pytest.approx(scores[1], abs=1e-5)
    assert scores[0] == pytest.approx(scores[2], abs=1e-5)


def test_records_that_cannot_be_scored_are_named_or_dropped(workspace: Path, capsys: pytest.CaptureFixture) -> None:
    whole = [{"messages": TALK, "id": 1}]
    for name, record, reason in (
        ("question", {"messages": TALK[:1], "id": 2}, "the record does not end with a response."),
        ("long", {"messages": [TALK[0], {"role": "assistant", "content": "red " * 300}]},
         "the record is longer than the context: 321 of at most 256 tokens."),
        ("turns", {"messages": TALK[1:]}, "responses (assistant, function) do not alternate."),
    ):  # fmt: skip
        write_lines(f"{name}.jsonl", [*whole, record, record])
        argv = ["score", str(workspace / "adapter"), f"dataset={name}.jsonl", "save_dir=out"]
        assert main(argv) == 2
        error = read_output(capsys)[1]
        assert f"{name}.jsonl, record 2 (line 2): " in error
        assert reason in error
        assert "Same problem in record 3." in error
        assert not Path("out").exists()
        assert main([*argv, "on_bad_record=drop"]) == 0
        assert f"2 of 3 examples ({name}.jsonl: 2, 3)" in read_output(capsys)[0]
        assert [{**line, "score": 0} for line in lines(f"out/scores_{name}.jsonl")] == [{**whole[0], "score": 0}]
        Path(f"out/scores_{name}.jsonl").unlink()
        Path("out").rmdir()


def test_records_are_checked_before_weights_are_loaded(
    workspace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    loaded = []
    monkeypatch.setattr("burnish.inference.loading.merged_model", lambda *args: loaded.append(args))
    write_lines("talks.jsonl", [{"messages": TALK}, {"messages": TALK[:1]}])
    assert main(["score", str(workspace / "adapter"), "dataset=talks.jsonl", "save_dir=out"]) == 2
    assert "talks.jsonl, record 2 (line 2): " in read_output(capsys)[1]
    assert not loaded


def test_nothing_is_overwritten(workspace: Path, capsys: pytest.CaptureFixture) -> None:
    write_lines("talks.jsonl", [{"messages": TALK}])
    argv = ["score", str(workspace / "adapter"), "dataset=talks.jsonl", "save_dir=out"]
    assert main(argv) == 0
    before = lines("out/scores_talks.jsonl")
    assert main(argv) == 2
    assert "out/scores_talks.jsonl already exists." in read_output(capsys)[1]
    assert main([*argv, "overwrite_output_dir=true"]) == 0
    again = ["score", str(workspace / "classifier"), "dataset=out/scores_talks.jsonl", "save_dir=out"]
    assert main(again) == 2
    assert 'record 1: it already has the field "score".' in read_output(capsys)[1]
    assert main([*again, "score_name=second"]) == 0
    assert [{**line, "second": 0} for line in lines("out/scores_scores_talks.jsonl")] == [{**before[0], "second": 0}]


def test_sets_with_similar_names_have_separate_files(workspace: Path) -> None:
    write_lines("talks.jsonl", [{"messages": TALK}])
    info = {name: {"file_name": "talks.jsonl", "formatting": "openai"} for name in ("a/b", "a_b")}
    Path("dataset_info.json").write_text(json.dumps(info))
    argv = ["score", str(workspace / "adapter"), "dataset_dir=.", "dataset=a/b,a_b", "save_dir=out"]
    assert main(argv) == 0
    assert sorted(path.name for path in Path("out").iterdir()) == ["scores_a%2Fb.jsonl", "scores_a_b.jsonl"]


def interrupt_after(count: int | None, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Interrupt the command after ``count`` forward passes. Returns a list of the numbers of texts of each."""
    passes, scores = [], ScoreEngine.scores

    def counted(self: ScoreEngine, texts: list, *args: object) -> list[float]:
        if len(passes) == count:
            raise KeyboardInterrupt
        passes.append(len(texts))
        return scores(self, texts, *args)

    monkeypatch.setattr(ScoreEngine, "scores", counted)
    return passes


def test_interrupted_command_continues(
    workspace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    write_lines("pairs.jsonl", pairs(9))
    argv = ["score", str(workspace / "adapter"), "dataset=pairs.jsonl", "batch_size=4"]
    assert main([*argv, "save_dir=whole"]) == 0
    with monkeypatch.context() as patch:
        interrupt_after(2, patch)
        assert main([*argv, "save_dir=out"]) == 130
    (partial,) = Path("out").iterdir()
    assert f"The results so far are in {partial}; run the same command again" in read_output(capsys)[1]
    with partial.open("a") as file:
        file.write('{"index": 3, "sco')  # incomplete: the process was killed while it was written
    with monkeypatch.context() as patch:
        passes = interrupt_after(None, patch)
        assert main([*argv, "save_dir=out"]) == 0
    assert passes == [4, 4, 2]
    assert [path.name for path in Path("out").iterdir()] == ["scores_pairs.jsonl"]
    assert lines("out/scores_pairs.jsonl") == lines("whole/scores_pairs.jsonl")


@pytest.mark.parametrize("change", ["model", "data", "batch_size"])
def test_scores_of_another_model_or_dataset_are_not_continued(
    change: str, workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_lines("pairs.jsonl", pairs(4))
    with monkeypatch.context() as patch:
        interrupt_after(1, patch)
        assert main(["score", str(workspace / "adapter"), "dataset=pairs.jsonl", "save_dir=out", "batch_size=4"]) == 130
    if change == "data":
        write_lines("pairs.jsonl", pairs(5)[1:])
    passes = interrupt_after(None, monkeypatch)
    model, size = "classifier" if change == "model" else "adapter", 5 if change == "batch_size" else 4
    argv = ["score", str(workspace / model), "dataset=pairs.jsonl", "save_dir=out", f"batch_size={size}"]
    assert main(argv) == 0
    assert sum(passes) == 8


def test_configuration_of_four_lines(workspace: Path) -> None:
    write_lines("talks.jsonl", [{"messages": TALK}])
    config = f"model_name_or_path: {workspace / 'model'}\nadapter_name_or_path: {workspace / 'adapter'}\n"
    Path("score.yaml").write_text(f"{config}dataset: talks.jsonl\noutput_dir: out\n")
    assert main(["score", "score.yaml"]) == 0
    assert len(lines("out/scores_talks.jsonl")) == 1


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["model", "dataset=talks.jsonl"], 'has no value_head.safetensors and no "score" weights: it is not a reward'),
        (["adapter"], "nothing to score: dataset is not set."),
        (["adapter", "talks.jsonl"], "Pass the records as an option: dataset=talks.jsonl"),
        (["adapter", "dataset=none.jsonl"], '"dataset": the file'),
        (["adapter", "dataset=talks.jsonl", "infer_backend=vllm"], "scores are computed in this process"),
    ],
)  # fmt: skip
def test_unusable_arguments_are_refused(
    argv: list[str], message: str, workspace: Path, capsys: pytest.CaptureFixture
) -> None:
    write_lines("talks.jsonl", [{"messages": TALK}])
    assert main(["score", str(workspace / argv[0]), *argv[1:], "save_dir=out"]) == 2
    assert message in read_output(capsys)[1]
    assert not Path("out").exists()


def test_predictions_for_single_responses_name_the_command(workspace: Path, capsys: pytest.CaptureFixture) -> None:
    write_lines("talks.jsonl", [{"messages": TALK}])
    assert main(["predict", str(workspace / "adapter"), "eval_dataset=talks.jsonl"]) == 2
    assert "run burnish score PATH dataset=FILE." in read_output(capsys)[1]


@pytest.mark.parametrize("head", ["value_head", "score"])
def test_reasoning_template_of_training_is_used_in_python(
    head: str, workspace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """The rows of pairs have no reasoning before the last response, and no empty reasoning block there."""
    folder = workspace / f"thinking with {head}"
    options = {"template": "qwen3", "missing_control_tokens": "split", "reward_head": head, "output_dir": str(folder)}
    train_on_pairs(workspace, monkeypatch, stage="rm", **options)
    thought = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nred red"}
    talks = [[TALK[0], thought, *TALK], [*TALK, *TALK], [TALK[0], thought]]
    write_lines("talks.jsonl", [{"messages": talk} for talk in talks])
    capsys.readouterr()
    assert main(["score", str(folder), "dataset=talks.jsonl", "save_dir=out"]) == 0
    output = "".join(read_output(capsys))
    assert not any(text in output for text in ("differ from", "score.weight")), output
    scores = [line["score"] for line in lines("out/scores_talks.jsonl")]
    assert scores == pytest.approx(RewardModel.from_pretrained(folder).score(talks), abs=1e-5)
    assert scores[0] == pytest.approx(scores[1], abs=1e-5)
    assert main(["export", str(folder), "export_dir=whole", "missing_control_tokens=split"]) == 0
    assert scores == pytest.approx(RewardModel.from_pretrained("whole").score(talks), abs=1e-5)


@pytest.mark.parametrize(
    ("file", "weights", "message"),
    [
        ("value_head.safetensors", {"v_head.summary.weight": (1, 16), "v_head.summary.bias": (1,)},
         "the reward head takes hidden states of size 16, but the model's have size 32."),
        ("model.safetensors", {"score.weight": (3, 32)}, "a head with one label. This one has 3."),
    ],
)  # fmt: skip
def test_head_that_does_not_fit_is_named(
    file: str, weights: dict, message: str, workspace: Path, capsys: pytest.CaptureFixture
) -> None:
    shutil.copytree(workspace / "model", "wrong")
    place = Path("wrong") / file
    tensors = load_file(place) if place.is_file() else {}
    save_file(tensors | {name: torch.ones(shape) for name, shape in weights.items()}, place, {"format": "pt"})
    write_lines("pairs.jsonl", pairs(2))
    for argv in (
        ["score", "wrong", "dataset=pairs.jsonl", "save_dir=out"], ["export", "wrong", "export_dir=out"],
        ["predict", "wrong", "eval_dataset=pairs.jsonl", "save_dir=out"], ["chat", "wrong", "--once", "red"],
    ):  # fmt: skip
        assert main([*argv, "template=chatml"]) == 2
        error = read_output(capsys)[1]
        assert message in error
        assert f"wrong/{file}: " in error
    with pytest.raises(UserError, match=re.escape(message)):
        RewardModel.from_pretrained("wrong")
