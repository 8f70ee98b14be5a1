"""``burnish eval``: task files, scores compared with manual computation, outputs, resume, tables, the harness model."""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import jinja2
import pytest
import torch

from burnish.adapters.lora import LoraAdapter
from burnish.cli import main
from burnish.config.errors import UserError
from burnish.inference.loading import load_for_inference
from burnish.inference.scheduler import Scheduler
from burnish.inference.slots import SlotLimits
from burnish.models.load import load_model
from burnish.run.plan.plan import RunOptions
from burnish.serve.eval import command
from burnish.serve.eval.harness import EngineModel
from burnish.serve.eval.local_tasks import Subject, local_tasks
from burnish.serve.eval.results import ChoiceResult, SavedAnswers, accuracies, accuracy, choice_result, comparison_table
from small_run import make_model

pytestmark = pytest.mark.run

MMLU = 'What is 1 + 1?,1,2,3,4,B\n"A, or B?",a,b,c,d,A\n'


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def task_dir(tmp_path: Path) -> Path:
    root = tmp_path / "evaluation"
    files = {
        "mmlu/data/dev/maths_dev.csv": MMLU, "mmlu/data/test/maths_test.csv": MMLU * 3,
        "mmlu/data/dev/logic_dev.csv": MMLU, "mmlu/data/test/logic_test.csv": MMLU,
        "mmlu/mapping.json": json.dumps({"maths": {"name": "mathematics", "category": "STEM"}}),
        "ceval/test/law_test.csv": "id,question,A,B,C,D,answer,explanation\n0,几?,1,2,3,4,,\n",
        "cmmlu/dev/law.csv": ",Question,A,B,C,D,Answer\n0,几?,1,2,3,4,C\n",
        "cmmlu/test/law.csv": ",Question,A,B,C,D,Answer\n0,几?,1,2,3,4,D\n",
        "own/test/x.jsonl": "\n".join(
            json.dumps({"question": "Q?", "choices": ["yes", "no"], "answer": answer})
            for answer in ("B", 0, "no", None)
        ),
    }  # fmt: skip
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")
    return root


def loop_over(model: Path, slots: int = 4, **options):
    loaded = load_for_inference(RunOptions(model_name_or_path=str(model), **options))
    return loaded, Scheduler(loaded.model, SlotLimits(slots, loaded.context))


def tasks(task: str, task_dir: Path, **options):
    return local_tasks(task, task_dir, options.pop("lang", "en"), options.pop("num_shots", 5), draws=False)


def test_files_of_each_type_become_harness_tasks(task_dir: Path) -> None:
    maths = {subject.key: subject for subject in tasks("mmlu_test", task_dir)}["maths"]
    assert (maths.category, maths.config["num_fewshot"]) == ("STEM", 2)
    assert "about mathematics." in maths.config["description"]
    assert maths.config["dataset_kwargs"]["header"] is None
    (law,) = tasks("cmmlu_test", task_dir, lang="zh", num_shots=0)
    assert (law.config["dataset_kwargs"]["header"], law.config["num_fewshot"]) == (0, 0)
    assert law.config["dataset_kwargs"]["column_names"][1:] == ["question", "A", "B", "C", "D", "answer"]
    assert law.config["doc_to_text"].endswith("答案：")


def test_task_is_read_from_a_zip_file(task_dir: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "mmlu.zip", "w") as zipped:
        for path in (task_dir / "mmlu").rglob("*.*"):
            zipped.write(path, path.relative_to(task_dir / "mmlu"))
    unpacked, plain = tasks("mmlu_test", tmp_path), tasks("mmlu_test", task_dir)
    assert [(one.key, one.category, one.fingerprint) for one in unpacked] == [
        (one.key, one.category, one.fingerprint) for one in plain
    ]


def test_unpacked_task_is_removed_at_exit(tmp_path: Path) -> None:
    (tmp_path / "temporary").mkdir()
    with zipfile.ZipFile(tmp_path / "logic.zip", "w") as zipped:
        zipped.writestr("test/a.jsonl", json.dumps({"question": "?", "choices": ["a", "b"], "answer": "A"}))
    code = (
        "import os, sys; from burnish.serve.eval.local_tasks import local_tasks;"
        "print(local_tasks('logic_test', sys.argv[1], 'en', 0, draws=False)[0].key, len(os.listdir(sys.argv[2])))"
    )
    process = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path), str(tmp_path / "temporary")],
        env={**os.environ, "TMPDIR": str(tmp_path / "temporary")}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert process.stdout.split() == ["a", "1"]
    assert not os.listdir(tmp_path / "temporary")


@pytest.mark.slow
def test_saved_answers_are_those_of_one_adapter_and_precision(model: Path, tmp_path: Path) -> None:
    """Another adapter in the same folder, or another precision, counts as another model."""
    folder, found = tmp_path / "adapter", []
    for seed in (0, 1):
        torch.manual_seed(seed)
        adapter = LoraAdapter(RunOptions(model_name_or_path=str(model), lora_rank=2, lora_target=["q_proj"]))
        adapter.save(adapter.attach(load_model(RunOptions(model_name_or_path=str(model)))), str(folder))
        options = RunOptions(model_name_or_path=str(model), adapter_name_or_path=[str(folder)])
        loaded = load_for_inference(options)
        found.append(command._facts(loaded, command.EvalOptions(task="mmlu_test"), []))
    loaded = replace(loaded, options=replace(options, quantization_bit=4))
    found.append(command._facts(loaded, command.EvalOptions(task="mmlu_test"), []))
    assert found[0] != found[1]
    assert found[1] != found[2]
    assert {name for name in found[1] if found[1][name] != found[2][name]} == {"quantization"}


ESCAPE = "{{ cycler.__init__.__globals__.os.system('exit 1') }}{% set x = 1 %}{# x #}"


def test_name_of_a_subject_is_text_for_the_harness(task_dir: Path) -> None:
    """The harness renders a task's description as a Jinja template without a sandbox."""
    (task_dir / "mmlu/mapping.json").write_text(json.dumps({"maths": {"name": ESCAPE}}))
    (task_dir / "mmlu/data/test/logic_test.csv").rename(task_dir / f"mmlu/data/test/{ESCAPE}_test.csv")
    for subject in tasks("mmlu_test", task_dir):
        description = subject.config["description"]
        assert jinja2.Environment(keep_trailing_newline=True).from_string(description).render() == description


@pytest.mark.parametrize(
    "mapping", ["[1]", '{"maths": 5}', '{"maths": {"name": ["x"]}}', '{"maths": {"category": 5}}', "{"]
)
def test_malformed_mapping_is_rejected(task_dir: Path, mapping: str) -> None:
    (task_dir / "mmlu/mapping.json").write_text(mapping)
    with pytest.raises(UserError, match=r"mapping\.json"):
        tasks("mmlu_test", task_dir)


@pytest.mark.parametrize(
    ("content", "columns"),
    [
        (MMLU, ["question", "A", "B", "C", "D", "answer"]),
        ("Q?,1,2,3,4\n", ["question", "A", "B", "C", "D"]),
        ("Q?,1,2,3,4,B,why\n", ["question", "A", "B", "C", "D", "answer", "column 6"]),
    ],
)
def test_every_column_of_a_file_without_header_has_a_name(task_dir: Path, content: str, columns: list[str]) -> None:
    """pandas would take a column without a name as the index, and the others would move by one."""
    (task_dir / "cmmlu/test/law.csv").write_text(content)
    (law,) = tasks("cmmlu_test", task_dir)
    assert law.config["dataset_kwargs"]["column_names"] == columns


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("cmmlu/test/law.csv", b""), ("cmmlu/test/law.csv", b"Q?,1,2\n"), ("cmmlu/dev/law.csv", b"Q?,\xe9,2,3,4,A\n"),
        ("cmmlu/test/law.csv", b"Q" * 200_000), ("cmmlu.zip", b"PK is missing"),
    ],
)  # fmt: skip
def test_unreadable_file_of_a_task_is_named(task_dir: Path, name: str, content: bytes) -> None:
    (task_dir / name).write_bytes(content)
    with pytest.raises(UserError, match=Path(name).name):
        tasks("cmmlu_test", task_dir)


def test_missing_task_is_rejected(task_dir: Path) -> None:
    with pytest.raises(UserError, match='Did you mean "mmlu"'):
        tasks("mmul_test", task_dir)
    with pytest.raises(UserError, match='no split "val"'):
        tasks("mmlu_val", task_dir)
    with pytest.raises(UserError, match="name and a split"):
        tasks("mmlu", task_dir)


def test_benchmark_prompt_and_choice_scoring_match_template(model: Path) -> None:
    loaded, loop = loop_over(model)
    of_harness = EngineModel(loop, loaded.template, loaded.form, "m", is_benchmark=True)
    turns = [{"role": "system", "content": "About maths.\n\n"}, {"role": "user", "content": "Q?\nAnswer:"}]
    text = of_harness.apply_chat_template(turns)
    assert text == "<|im_start|>user\nAbout maths.\n\nQ?\nAnswer:<|im_end|>\n<|im_start|>assistant\n"
    ids, letters = of_harness._ids(text), [of_harness._ids(letter) for letter in "ABCD"]
    result = of_harness.loglikelihood([request(text, letter) for letter in "ABCD"])
    with torch.no_grad():
        logps = loaded.model(torch.tensor([ids])).logits[0, -1].log_softmax(-1)
    assert [score for score, _ in result] == pytest.approx([float(logps[ids[0]]) for ids in letters], abs=1e-4)


@pytest.mark.parametrize("task", ["mmlu_test", "lm_eval:arc_easy"])
def test_missing_harness_names_its_extra_before_the_model_is_loaded(
    task: str, model: Path, task_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.setattr("burnish.serve.eval.command.load_for_inference", None)
    results = task_dir / "results"
    assert main(["eval", str(model), f"task={task}", f"task_dir={task_dir}", f"save_dir={results}"]) == 2
    assert 'pip install "burnish[eval]"' in capsys.readouterr().err
    assert not results.exists()


def test_eval_command_writes_its_files_and_continues(
    model: Path, task_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("lm_eval")
    argv = ["eval", str(model), "task=mmlu_test", f"task_dir={task_dir}", "n_shot=1", f"save_dir={tmp_path / 'out'}"]
    assert main(argv) == 0
    out = tmp_path / "out"
    letters = json.loads((out / "results.json").read_text())
    result = json.loads((out / "eval_results.json").read_text())
    assert {key: len(each) for key, each in letters.items()} == {"logic": 2, "maths": 6}
    assert result["num_questions"] == 8
    assert result["of"]["template"]
    assert "Average:" in (out / "results.log").read_text()
    lines = (out / "answers.jsonl").read_text().splitlines()
    (out / "answers.jsonl").write_text("\n".join(lines[:-1]) + '\n{"subject": "ma')  # truncated while it was written
    requested, run = [], command.run_tasks

    def recorded(of, tasks, *rest):
        requested.extend(task["task"] for task in tasks)
        return run(of, tasks, *rest)

    monkeypatch.setattr(command, "run_tasks", recorded)
    assert main(argv) == 0
    assert requested == ["mmlu_maths"]
    assert json.loads((out / "results.json").read_text()) == letters
    assert main([*argv, "n_shot=0"]) == 0
    assert requested == ["mmlu_maths", "mmlu_logic", "mmlu_maths"]  # different examples give different answers
    capsys.readouterr()


def test_several_models_share_one_table(
    model: Path, task_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("lm_eval")
    other = make_model(tmp_path / "other", seed=3)
    assert main(["eval", str(model), str(other), "task=mmlu_test", f"task_dir={task_dir}", "n_shot=0"]) == 0
    printed = capsys.readouterr().out
    assert "difference" in printed
    assert "±" in printed


def subject(key: str, category: str = "") -> Subject:
    return Subject(key, category, {}, "")


def test_no_accuracy_without_reference_answers() -> None:
    unknown = choice_result({"filtered_resps": [(-1.0, False), (-0.5, True)], "target": ""})
    assert (unknown.letter, unknown.is_right) == ("B", None)
    assert accuracies([subject("law")], {"law": [unknown]}) == {"num_questions": 1, "num_answered": 0}
    right = choice_result({"filtered_resps": [(-1.0, False), (-0.5, True)], "target": "B"})
    assert right.is_right
    assert sum(right.chances) == pytest.approx(1)


def test_averages_are_over_questions_and_categories() -> None:
    results = {"x": [ChoiceResult("A", (), True)] * 3, "y": [ChoiceResult("B", (), False)]}
    result = accuracies([subject("x", "STEM"), subject("y")], results)
    assert (result["accuracy"], result["macro_accuracy"]) == (75.0, 50.0)
    assert result["accuracy_stderr"] == pytest.approx(100 * (0.75 * 0.25 / 3) ** 0.5, abs=1e-3)
    assert {key: each["accuracy"] for key, each in result["categories"].items()} == {"STEM": 100.0, "Other": 0.0}
    assert accuracy([True] * 4)["accuracy_stderr"] == 0.0


def test_paired_error_counts_differing_questions() -> None:
    of = [{"x": [ChoiceResult("A", (), right) for right in rights]} for rights in ((1, 1, 0, 0), (1, 1, 1, 0))]
    assert comparison_table(["one", "two"], [subject("x")], of)[2].split() == ["two", "75.00", "+25.00", "±", "21.65"]


def test_responses_of_another_model_are_discarded(tmp_path: Path) -> None:
    SavedAnswers(tmp_path, {"model": 1}).add(subject("x"), [ChoiceResult("A", (0.5, 0.5), True)])
    assert SavedAnswers(tmp_path, {"model": 1}).done == {"x": [ChoiceResult("A", (0.5, 0.5), True)]}
    assert SavedAnswers(tmp_path, {"model": 2}).done == {}


def test_restarted_evaluation_does_not_lose_finished_subjects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    SavedAnswers(tmp_path, {"model": 1}).add(subject("x"), [ChoiceResult("A", (0.5, 0.5), True)])
    with monkeypatch.context() as patched:
        patched.setattr("burnish.report.results.os.replace", full)
        with pytest.raises(OSError, match="No space"):
            SavedAnswers(tmp_path, {"model": 1})
    assert SavedAnswers(tmp_path, {"model": 1}).done == {"x": [ChoiceResult("A", (0.5, 0.5), True)]}


def test_dataset_is_evaluated_as_in_a_run(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BURNISH_CACHE", str(tmp_path / "cache"))
    (tmp_path / "held.json").write_text(json.dumps([{"instruction": "Say red", "input": "", "output": "red"}] * 3))
    argv = [str(model), f"eval_dataset={tmp_path / 'held.json'}", "template=qwen", "use_cpu=true"]
    assert main(["eval", *argv, f"save_dir={tmp_path / 'a'}"]) == 0
    assert "eval_loss" in json.loads((tmp_path / "a" / "eval_results.json").read_text())
    more = ["predict_with_generate=true", "predict_metrics=exact_match", "max_new_tokens=4"]
    assert main(["eval", *argv, *more, f"save_dir={tmp_path / 'b'}"]) == 0
    assert len((tmp_path / "b" / "generated_predictions.jsonl").read_text().splitlines()) == 3


@pytest.mark.parametrize("command", ["eval", "predict"])
def test_full_model_is_evaluated_without_adapter(
    command: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from burnish.adapters.lora import LoraAdapter

    def attach(*args: object) -> None:
        raise AssertionError("an adapter is attached to a whole model")

    monkeypatch.setenv("BURNISH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(LoraAdapter, "attach", attach)
    (tmp_path / "held.json").write_text(json.dumps([{"instruction": "Say red", "input": "", "output": "red"}] * 3))
    argv = [str(model), f"eval_dataset={tmp_path / 'held.json'}", "template=qwen", "use_cpu=true", "max_new_tokens=4"]
    assert main([command, *argv, f"save_dir={tmp_path / 'a'}"]) == 0
    written = (tmp_path / "a" / "run.yaml").read_text()
    assert written.startswith(f"# The options of this run, written by burnish {command}. ")


def test_missing_data_for_evaluation_is_reported(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", str(model)]) == 2
    assert "nothing to evaluate" in capsys.readouterr().err


def request(*args):
    return SimpleNamespace(args=args)


def test_harness_receives_model_log_probabilities(model: Path) -> None:
    loaded, loop = loop_over(model)
    of_harness = EngineModel(loop, loaded.template, loaded.form, "m")
    (result, greedy), (other, _) = of_harness.loglikelihood([request("red green ", "blue"), request("", "red")])
    ids, before = of_harness._ids("red green blue"), of_harness._ids("red green")
    with torch.no_grad():
        logps = loaded.model(torch.tensor([ids])).logits[0].log_softmax(-1)
    positions = range(len(before) - 1, len(ids) - 1)
    assert result == pytest.approx(sum(float(logps[position, ids[position + 1]]) for position in positions), abs=1e-4)
    assert greedy == all(int(logps[position].argmax()) == ids[position + 1] for position in positions)
    assert other == pytest.approx(of_harness.loglikelihood_rolling([request("red")])[0], abs=1e-4)


def test_harness_receives_text_up_to_stops_with_trained_template(model: Path) -> None:
    loaded, loop = loop_over(model)
    of_harness = EngineModel(loop, loaded.template, loaded.form, "m")
    settings = {"until": [], "max_gen_toks": 12, "do_sample": False}
    (whole,) = of_harness.generate_until([request("red", settings)])
    stop = whole[3:5]
    (cut,) = of_harness.generate_until([request("red", {**settings, "until": [stop]})])
    assert cut == whole.split(stop)[0]
    text = of_harness.apply_chat_template([{"role": "user", "content": "Hi"}])
    assert text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def test_harness_task_runs(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("lm_eval")
    (tmp_path / "tasks").mkdir()
    (tmp_path / "data.jsonl").write_text(json.dumps({"q": "red", "choices": ["green", "blue"], "gold": 0}) + "\n")
    (tmp_path / "tasks" / "own.yaml").write_text(
        f"task: own\ndataset_path: json\ndataset_kwargs:\n  data_files: {tmp_path / 'data.jsonl'}\n"
        "test_split: train\noutput_type: multiple_choice\ndoc_to_text: '{{q}}'\ndoc_to_target: gold\n"
        "doc_to_choice: '{{choices}}'\nmetric_list:\n  - metric: acc\n"
    )
    argv = ["eval", str(model), "task=lm_eval:own", f"task_dir={tmp_path / 'tasks'}", f"save_dir={tmp_path / 'out'}"]
    assert main(argv) == 0
    assert "acc" in json.dumps(json.loads((tmp_path / "out" / "eval_results.json").read_text())["results"]["own"])
    capsys.readouterr()


@pytest.mark.slow
def test_models_of_same_name_write_into_separate_folders(model: Path, tmp_path: Path) -> None:
    from burnish.serve.command_line import servings_of

    for place in ("a/checkpoint-4", "b/checkpoint-4", "Qwen2.5-0.5B"):
        shutil.copytree(model, tmp_path / place)
    paths = [str(tmp_path / name) for name in ("a/checkpoint-4", "Qwen2.5-0.5B", "b/checkpoint-4")]
    assert [one.name for one in servings_of(paths)] == ["a-checkpoint-4", "Qwen2.5-0.5B", "b-checkpoint-4"]
    with pytest.raises(UserError, match="is passed twice"):
        servings_of([paths[0], paths[0]])
    requests: list[Path | None] = []
    for serving in servings_of(paths):
        requests.append(command._folder_of(serving, command.EvalOptions(save_dir="out"), True))
    assert len({*requests}) == 3


def test_every_option_of_eval_is_used() -> None:
    assert set(command.OWN) == {"task", "task_dir", "lang", "n_shot", "shots", "batch_size", "save_dir", "limit"}
