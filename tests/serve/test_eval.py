"""``burnish eval``: files of tasks, scores by hand, what is written, going on, tables, the harness's model."""

import json
import shutil
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from burnish.cli import main
from burnish.config.errors import UserError
from burnish.inference.loading import load_for_inference
from burnish.inference.scheduler import Scheduler
from burnish.inference.slots import SlotLimits
from burnish.run.plan.plan import RunOptions
from burnish.serve.eval import command
from burnish.serve.eval.choices import Chooser, Chosen
from burnish.serve.eval.harness import EngineModel
from burnish.serve.eval.questions import ChoiceQuestion, Subject, read_task
from burnish.serve.eval.results import Answers, accuracies, accuracy, compared
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
            json.dumps({"question": "Q?", "choices": ["yes", "no"], "answer": told}) for told in ("B", 0, "no", None)
        ),
    }  # fmt: skip
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")
    return root


def loop_over(model: Path, slots: int = 4, **given):
    loaded = load_for_inference(RunOptions(model_name_or_path=str(model), **given))
    return loaded, Scheduler(loaded.model, SlotLimits(slots, loaded.context))


def test_files_of_each_kind_are_read(task_dir: Path) -> None:
    maths = {subject.key: subject for subject in read_task("mmlu_test", task_dir)}["maths"]
    assert (maths.name, maths.category, len(maths.examples), len(maths.questions)) == ("mathematics", "STEM", 2, 6)
    assert maths.questions[1] == ChoiceQuestion("A, or B?", ("a", "b", "c", "d"), "A")
    assert read_task("ceval_test", task_dir)[0].questions[0].answer is None
    assert read_task("cmmlu_test", task_dir)[0].examples[0].answer == "C"
    assert [question.answer for question in read_task("own_test", task_dir)[0].questions] == ["B", "A", "B", None]


def test_a_task_is_read_from_a_zip_file(task_dir: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "mmlu.zip", "w") as zipped:
        for path in (task_dir / "mmlu").rglob("*.*"):
            zipped.write(path, path.relative_to(task_dir / "mmlu"))
    assert read_task("mmlu_test", tmp_path) == read_task("mmlu_test", task_dir)


def test_a_task_that_is_not_there_is_refused(task_dir: Path) -> None:
    with pytest.raises(UserError, match='Did you mean "mmlu"'):
        read_task("mmul_test", task_dir)
    with pytest.raises(UserError, match='no split "val"'):
        read_task("mmlu_val", task_dir)
    with pytest.raises(UserError, match="name and a split"):
        read_task("mmlu", task_dir)


def test_prompts_are_the_benchmarks_own_lines(model: Path, task_dir: Path) -> None:
    loaded, loop = loop_over(model)
    maths = read_task("mmlu_test", task_dir)[1]
    messages = Chooser(loop, loaded.template, num_shots=1).messages(maths, maths.examples[:1], maths.questions[0])
    assert [message.role for message in messages] == ["user", "assistant", "user"]
    assert messages[0].content == (
        "The following are multiple choice questions (with answers) about mathematics.\n\n"
        "What is 1 + 1?\nA. 1\nB. 2\nC. 3\nD. 4\nAnswer:"
    )
    assert messages[2].content == "What is 1 + 1?\nA. 1\nB. 2\nC. 3\nD. 4\nAnswer:"


def test_choices_are_scored_by_the_model_alone(model: Path, task_dir: Path) -> None:
    loaded, loop = loop_over(model)
    maths = read_task("mmlu_test", task_dir)[1]
    chooser = Chooser(loop, loaded.template, num_shots=0)
    for number, (question, chosen) in enumerate(zip(maths.questions, chooser.choose(maths), strict=True)):
        prompt, answers = chooser._fitting(maths, question, number)
        with torch.no_grad():
            logits = loaded.model(torch.tensor([prompt])).logits[0, -1]
        expected = torch.stack([logits[ids[0]] for ids in answers]).softmax(0)
        assert chosen.chances == pytest.approx(expected.tolist(), abs=1e-5)
        assert chosen.letter == "ABCD"[int(expected.argmax())]


def test_choices_that_begin_alike_are_scored_whole(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded, loop = loop_over(model)
    subject = Subject("x", "x", "", (), (ChoiceQuestion("Q?", ("a", "b"), "A"),), "")
    chooser = Chooser(loop, loaded.template, num_shots=0)
    apart = chooser.choose(subject)[0]
    prompt, answers = chooser._fitting(subject, subject.questions[0], 0)
    shared = 9
    monkeypatch.setattr(chooser, "_fitting", lambda *_: (prompt, [[shared, *ids] for ids in answers]))
    whole = chooser.choose(subject)[0]
    with torch.no_grad():
        logits = loaded.model(torch.tensor([[*prompt, shared]])).logits[0, -1]
    assert whole.chances == pytest.approx(torch.stack([logits[i[0]] for i in answers]).softmax(0).tolist(), abs=1e-5)
    assert whole.chances != pytest.approx(apart.chances, abs=1e-6)


def test_shots_are_the_first_or_drawn_by_seed_subject_and_number(model: Path) -> None:
    loaded, loop = loop_over(model)
    examples = tuple(ChoiceQuestion(f"Q{n}?", ("a", "b"), "A") for n in range(9))
    subject = Subject("x", "x", "", examples, (), "")
    assert Chooser(loop, loaded.template, num_shots=3).shots(subject, 4) == examples[:3]
    drawn = [Chooser(loop, loaded.template, num_shots=3, draws=True).shots(subject, n) for n in (0, 1, 0)]
    assert drawn[0] == drawn[2] != drawn[1]


def test_shots_that_do_not_fit_are_left_out_and_counted(model: Path) -> None:
    loaded, loop = loop_over(model)  # 256 tokens of context
    examples = tuple(ChoiceQuestion("word " * 30, ("a", "b"), "A") for _ in range(5))
    chooser = Chooser(loop, loaded.template)
    chooser.choose(Subject("x", "x", "", examples, (ChoiceQuestion("Q?", ("a", "b"), "A"),), ""))
    assert chooser.shortened == 1


def test_the_command_writes_its_files_and_goes_on(
    model: Path, task_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["eval", str(model), "task=mmlu_test", f"task_dir={task_dir}", "n_shot=1", f"save_dir={tmp_path / 'out'}"]
    assert main(words) == 0
    out = tmp_path / "out"
    letters = json.loads((out / "results.json").read_text())
    found = json.loads((out / "eval_results.json").read_text())
    assert {key: len(each) for key, each in letters.items()} == {"logic": 2, "maths": 6}
    assert found["num_questions"] == 8
    assert found["of"]["template"]
    assert "Average:" in (out / "results.log").read_text()
    lines = (out / "answers.jsonl").read_text().splitlines()
    (out / "answers.jsonl").write_text("\n".join(lines[:-1]) + '\n{"subject": "ma')  # cut while it was written
    asked = []
    choose = Chooser.choose
    monkeypatch.setattr(Chooser, "choose", lambda self, subject: asked.append(subject.key) or choose(self, subject))
    assert main(words) == 0
    assert asked == ["maths"]
    assert json.loads((out / "results.json").read_text()) == letters
    assert main([*words, "n_shot=0"]) == 0
    assert asked == ["maths", "logic", "maths"]  # other shots, other answers
    capsys.readouterr()


def test_several_models_stand_in_one_table(
    model: Path, task_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = make_model(tmp_path / "other", seed=3)
    assert main(["eval", str(model), str(other), "task=mmlu_test", f"task_dir={task_dir}", "n_shot=0"]) == 0
    printed = capsys.readouterr().out
    assert "difference" in printed
    assert "±" in printed


def test_without_told_answers_no_accuracy_is_claimed(task_dir: Path) -> None:
    subjects = read_task("ceval_test", task_dir)
    found = accuracies(subjects, {"law": [Chosen("A", (1.0,), None)]})
    assert found == {"num_questions": 1, "num_answered": 0}


def test_averages_are_over_questions_and_categories() -> None:
    subjects = [Subject(k, k, c, (), (ChoiceQuestion("?", ("a", "b"), "A"),) * n, "") for k, c, n in
                (("x", "STEM", 3), ("y", "", 1))]  # fmt: skip
    done = {"x": [Chosen("A", (), True)] * 3, "y": [Chosen("B", (), False)]}
    found = accuracies(subjects, done)
    assert (found["accuracy"], found["macro_accuracy"]) == (75.0, 50.0)
    assert found["accuracy_stderr"] == pytest.approx(100 * (0.75 * 0.25 / 3) ** 0.5, abs=1e-3)
    assert {key: each["accuracy"] for key, each in found["categories"].items()} == {"STEM": 100.0, "Other": 0.0}
    assert accuracy([True] * 4)["accuracy_stderr"] == 0.0


def test_the_paired_error_counts_the_questions_that_differ() -> None:
    subjects = [Subject("x", "x", "", (), (ChoiceQuestion("?", ("a", "b"), "A"),) * 4, "")]
    of = [{"x": [Chosen("A", (), right) for right in rights]} for rights in ((1, 1, 0, 0), (1, 1, 1, 0))]
    assert compared(["one", "two"], subjects, of)[2].split() == ["two", "75.00", "+25.00", "±", "21.65"]


def test_answers_of_another_model_are_begun_anew(tmp_path: Path) -> None:
    subject = Subject("x", "x", "", (), (ChoiceQuestion("?", ("a", "b"), "A"),), "")
    Answers(tmp_path, {"model": 1}).add(subject, [Chosen("A", (0.5, 0.5), True)])
    assert Answers(tmp_path, {"model": 1}).whole(subject) == [Chosen("A", (0.5, 0.5), True)]
    assert Answers(tmp_path, {"model": 2}).whole(subject) is None


def test_a_data_set_is_measured_as_by_a_run(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BURNISH_CACHE", str(tmp_path / "cache"))
    (tmp_path / "held.json").write_text(json.dumps([{"instruction": "Say red", "input": "", "output": "red"}] * 3))
    words = [str(model), f"eval_dataset={tmp_path / 'held.json'}", "template=qwen", "use_cpu=true"]
    assert main(["eval", *words, f"save_dir={tmp_path / 'a'}"]) == 0
    assert "eval_loss" in json.loads((tmp_path / "a" / "eval_results.json").read_text())
    more = ["predict_with_generate=true", "predict_metrics=exact_match", "max_new_tokens=4"]
    assert main(["eval", *words, *more, f"save_dir={tmp_path / 'b'}"]) == 0
    assert len((tmp_path / "b" / "generated_predictions.jsonl").read_text().splitlines()) == 3


@pytest.mark.parametrize("command", ["eval", "predict"])
def test_a_whole_model_is_measured_without_an_adapter(
    command: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from burnish.adapters.lora import LoraAdapter

    def attach(*given: object) -> None:
        raise AssertionError("an adapter is attached to a whole model")

    monkeypatch.setenv("BURNISH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(LoraAdapter, "attach", attach)
    (tmp_path / "held.json").write_text(json.dumps([{"instruction": "Say red", "input": "", "output": "red"}] * 3))
    words = [str(model), f"eval_dataset={tmp_path / 'held.json'}", "template=qwen", "use_cpu=true", "max_new_tokens=4"]
    assert main([command, *words, f"save_dir={tmp_path / 'a'}"]) == 0
    written = (tmp_path / "a" / "run.yaml").read_text()
    assert written.startswith(f"# The options of this run, written by burnish {command}. ")


def test_nothing_to_measure_is_said(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", str(model)]) == 2
    assert "nothing to measure" in capsys.readouterr().err


def request(*args):
    return SimpleNamespace(args=args)


def test_the_harness_gets_the_log_probabilities_of_the_model(model: Path) -> None:
    loaded, loop = loop_over(model)
    of_harness = EngineModel(loop, loaded.template, loaded.form, "m")
    (found, greedy), (other, _) = of_harness.loglikelihood([request("red green ", "blue"), request("", "red")])
    ids, before = of_harness._ids("red green blue"), of_harness._ids("red green")
    with torch.no_grad():
        logps = loaded.model(torch.tensor([ids])).logits[0].log_softmax(-1)
    places = range(len(before) - 1, len(ids) - 1)
    assert found == pytest.approx(sum(float(logps[at, ids[at + 1]]) for at in places), abs=1e-4)
    assert greedy == all(int(logps[at].argmax()) == ids[at + 1] for at in places)
    assert other == pytest.approx(of_harness.loglikelihood_rolling([request("red")])[0], abs=1e-4)


def test_the_harness_gets_text_up_to_its_stops_and_the_trained_template(model: Path) -> None:
    loaded, loop = loop_over(model)
    of_harness = EngineModel(loop, loaded.template, loaded.form, "m")
    settings = {"until": [], "max_gen_toks": 12, "do_sample": False}
    (whole,) = of_harness.generate_until([request("red", settings)])
    stop = whole[3:5]
    (cut,) = of_harness.generate_until([request("red", {**settings, "until": [stop]})])
    assert cut == whole.split(stop)[0]
    text = of_harness.apply_chat_template([{"role": "user", "content": "Hi"}])
    assert text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def test_a_task_of_the_harness_runs(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("lm_eval")
    (tmp_path / "tasks").mkdir()
    (tmp_path / "data.jsonl").write_text(json.dumps({"q": "red", "choices": ["green", "blue"], "gold": 0}) + "\n")
    (tmp_path / "tasks" / "own.yaml").write_text(
        f"task: own\ndataset_path: json\ndataset_kwargs:\n  data_files: {tmp_path / 'data.jsonl'}\n"
        "test_split: train\noutput_type: multiple_choice\ndoc_to_text: '{{q}}'\ndoc_to_target: gold\n"
        "doc_to_choice: '{{choices}}'\nmetric_list:\n  - metric: acc\n"
    )
    words = ["eval", str(model), "task=lm_eval:own", f"task_dir={tmp_path / 'tasks'}", f"save_dir={tmp_path / 'out'}"]
    assert main(words) == 0
    assert "acc" in json.dumps(json.loads((tmp_path / "out" / "eval_results.json").read_text())["results"]["own"])
    capsys.readouterr()


def test_models_of_one_name_write_into_folders_of_their_own(model: Path, tmp_path: Path) -> None:
    from burnish.serve.command_line import servings_of

    for place in ("a/checkpoint-4", "b/checkpoint-4", "Qwen2.5-0.5B"):
        shutil.copytree(model, tmp_path / place)
    paths = [str(tmp_path / name) for name in ("a/checkpoint-4", "Qwen2.5-0.5B", "b/checkpoint-4")]
    assert [one.name for one in servings_of(paths)] == ["a-checkpoint-4", "Qwen2.5-0.5B", "b-checkpoint-4"]
    with pytest.raises(UserError, match="is named twice"):
        servings_of([paths[0], paths[0]])
    asked: list[Path | None] = []
    for serving in servings_of(paths):
        asked.append(command._folder_of(serving, command.EvalOptions(save_dir="out"), True))
    assert len({*asked}) == 3


def test_every_option_of_eval_is_used() -> None:
    assert set(command.OWN) == {"task", "task_dir", "lang", "n_shot", "shots", "batch_size", "save_dir", "limit"}
