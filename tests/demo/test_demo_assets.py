"""The bundled model, tokenizer and data of the demo load, are correct, and can be regenerated.

Answers are recomputed here from the text of each row, and the scripts run as processes.
"""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from burnish.config.errors import UserError
from burnish.demo.command import DemoQuestion, demo, demo_plan, demo_questions, preference_accuracy
from burnish.demo.command import _commands as suggested_commands
from burnish.demo.report import answered_right, report

pytestmark = pytest.mark.run

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "src" / "burnish" / "demo"
SCRIPTS = ROOT / "scripts" / "demo"


def rows(name: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in (DEMO / "data" / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]


TRAIN, HELD_OUT = rows("train"), rows("heldout")


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(DEMO / "model")


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(DEMO / "model")


# Pattern of "instruction input" -> functions that return the answer, and a key of the problem that ignores its wording.
TIMES = {"two": 2, "three": 3}
QUESTIONS = {
    r"(?:Reverse this word|Spell this word backwards)\. (\w+)": (lambda word: word[::-1], lambda word: word),
    r"Write this word in capitals\. (\w+)": (str.upper, lambda word: word),
    r"Change (\w+) to capital letters\. ": (str.upper, lambda word: word),
    r"What is the last letter of (\w+)\? ": (lambda word: word[-1], lambda word: word),
    r"Which letter does (\w+) end with\? ": (lambda word: word[-1], lambda word: word),
    r"(?:Repeat the word|Say) (\w+) (\w+) times\. ": (
        lambda word, count: " ".join([word] * TIMES[count]),
        lambda word, count: word,
    ),
    r"(?:Sort these letters|Put these letters in alphabetical order)\. ([a-z ]+)": (
        lambda letters: " ".join(sorted(letters.split())),
        lambda letters: frozenset(letters.split()),
    ),
    r"(?:What is|Add) (\d+) (?:\+|and) (\d+)[?.] ": (
        lambda left, right: str(int(left) + int(right)),
        lambda left, right: frozenset(("sum", left, right)),
    ),
    r"(?:Which is larger, |Which number is bigger: )(\d+) or (\d+)\? ": (
        lambda left, right: str(max(int(left), int(right))),
        lambda left, right: frozenset(("larger", left, right)),
    ),
}
OPPOSITE = r"(?:What is|Name) the opposite of (\w+)[?.] "


def solve(row: dict[str, str]) -> tuple[str, object]:
    """Return the correct answer of a row and a key of its problem."""
    text = f"{row['instruction']} {row['input']}"
    if result := re.fullmatch(OPPOSITE, text):  # not computable; see the tests of opposites
        return row["output"], frozenset((result[1], row["output"]))
    for pattern, (answer, problem) in QUESTIONS.items():
        if result := re.fullmatch(pattern, text):
            return answer(*result.groups()), problem(*result.groups())
    raise ValueError(f"Expected one of the demo's questions. Received: {text!r}.")


def opposites() -> list[tuple[str, str]]:
    """Return (word, answer) of each row that asks for an opposite."""
    texts = ((f"{row['instruction']} {row['input']}", row["output"]) for row in TRAIN + HELD_OUT)
    return [(result[1], answer) for text, answer in texts if (result := re.fullmatch(OPPOSITE, text))]


def test_every_answer_in_demo_data_is_correct():
    for row in TRAIN + HELD_OUT:
        assert row["output"] == solve(row)[0], row


def test_opposites_are_unique_and_symmetric():
    answers = dict(opposites())
    for word, answer in opposites():
        assert word != answer
        assert answers[word] == answer
        assert answers.get(answer, word) == word


@pytest.mark.parametrize(
    ("word", "opposite"),
    [("hot", "cold"), ("empty", "full"), ("enemy", "friend"), ("always", "never"), ("north", "south"), ("buy", "sell")],
)
def test_opposites_match_human_judgement(word, opposite):
    assert dict(opposites()).get(word, opposite) == opposite
    assert dict(opposites()).get(opposite, word) == word


def test_held_out_problems_are_not_in_training_set():
    assert not {solve(row)[1] for row in TRAIN} & {solve(row)[1] for row in HELD_OUT}


def test_held_out_words_are_not_in_training_set():
    held_out = {problem for row in HELD_OUT if isinstance(problem := solve(row)[1], str)}
    train_words = {word for row in TRAIN for word in re.findall(r"\w+", f"{row['instruction']} {row['input']}")}
    assert len(held_out) > 50
    assert not held_out & train_words


def test_chosen_answer_of_each_pair_is_correct_and_rejected_is_not():
    for name, data_rows in (("pairs", TRAIN), ("pairs_heldout", HELD_OUT)):
        correct = {(row["instruction"], row["input"]): row["output"] for row in data_rows}
        for pair in rows(name):
            assert pair["chosen"] == correct[pair["instruction"], pair["input"]] != pair["rejected"]


def test_rows_are_unique():
    questions = [(row["instruction"], row["input"]) for row in TRAIN + HELD_OUT]
    assert len(set(questions)) == len(questions)


def test_datasets_have_documented_sizes_and_columns():
    assert (len(TRAIN), len(HELD_OUT)) == (4000, 200)
    assert all(set(row) == {"instruction", "input", "output"} and row["output"] for row in TRAIN + HELD_OUT)


@pytest.mark.slow
def test_data_script_reproduces_committed_files(tmp_path):
    subprocess.run([sys.executable, SCRIPTS / "make_data.py", "--output", tmp_path, "--seed", "0"], check=True)
    for name in ("train.jsonl", "heldout.jsonl", "pairs.jsonl", "pairs_heldout.jsonl", "dataset_info.json"):
        assert (tmp_path / name).read_bytes() == (DEMO / "data" / name).read_bytes(), name


def test_tokenizer_script_reproduces_committed_files(tmp_path):
    subprocess.run([sys.executable, SCRIPTS / "make_tokenizer.py", "--output", tmp_path], check=True)
    for name in ("tokenizer.json", "chat_template.jinja"):  # tokenizer_config.json changes with transformers
        assert (tmp_path / name).read_bytes() == (DEMO / "model" / name).read_bytes(), name


def test_dataset_info_names_files_that_exist():
    info = json.loads((DEMO / "data" / "dataset_info.json").read_text(encoding="utf-8"))
    assert set(info) == {"demo_train", "demo_heldout", "demo_pairs", "demo_pairs_heldout"}
    assert all((DEMO / "data" / entry["file_name"]).is_file() for entry in info.values())


@pytest.mark.parametrize("name", ["demo", "demo_dpo", "demo_grpo"])
def test_demo_run_uses_bundled_model_and_data(name):
    run = yaml.safe_load((DEMO / f"{name}.yaml").read_text(encoding="utf-8"))
    assert name == "demo_grpo" or ROOT / run["model_name_or_path"] == DEMO / "model"
    assert ROOT / run["dataset_dir"] == DEMO / "data"
    assert isinstance(run["learning_rate"], float)


@pytest.mark.slow
def test_wrong_option_is_reported_before_responses_are_generated(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("burnish.demo.command.answers", None)
    with pytest.raises(UserError, match="the learning rate would never reach its peak"):
        demo(["max_steps=3"])


def test_preference_demo_trains_on_pairs_and_reports_the_likelier_answer():
    run = demo_plan(["max_steps=3"], "demo_dpo.yaml").options
    assert (run.stage, run.dataset, run.max_steps) == ("dpo", ["demo_pairs"], 3)
    pairs = demo_questions("pairs_heldout")[::20]
    swapped = [DemoQuestion(pair.prompt, pair.wrong, pair.answer) for pair in pairs]
    assert preference_accuracy(DEMO / "model", pairs) == 1 - preference_accuracy(DEMO / "model", swapped) > 0.5


def test_demo_suggests_a_question_that_it_has_just_answered_correctly():
    questions = demo_questions()
    correct = [question.answer for question in questions]
    suggested = answered_right(questions, correct)
    assert f"\n{suggested} " in report(questions, correct, correct)
    assert answered_right(questions, [""] * len(questions)) is None


def test_suggested_commands_quote_folders_and_questions():
    words = [shlex.split(line) for line in suggested_commands(Path("my runs/it's"), 'Say "$HOME".')]
    assert words[0] == ["chat", "my runs/it's", "--once", 'Say "$HOME".', "temperature=0"]
    assert [line[1] for line in words[1:4]] == ["my runs/it's", "my runs/it's", "my runs/it's/run.yaml"]


def test_model_is_small_and_saved_in_bfloat16(model, tokenizer):
    assert 2_000_000 <= model.num_parameters() <= 4_000_000
    assert model.config.vocab_size == len(tokenizer)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert sum(path.stat().st_size for path in DEMO.rglob("*") if path.is_file()) < 8_000_000


def test_generation_stops_at_end_of_turn(model, tokenizer):
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.eos_token_id in model.generation_config.eos_token_id
    assert tokenizer.pad_token_id not in (None, tokenizer.eos_token_id)


@pytest.mark.parametrize("text", ["lamp", "  two  spaces\n\ttab ", "façade 雪 🙂", "".join(map(chr, range(256)))])
def test_tokenizer_round_trips_any_text(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_question_words_are_tokens_and_operands_are_spelled(tokenizer):
    tokens = tokenizer.tokenize("What is the opposite of hot?")
    assert tokens == ["What", "Ġis", "Ġthe", "Ġopposite", "Ġof", "Ġ", "h", "o", "t", "?"]


def test_encoding_with_template_equals_encoding_rendered_text(tokenizer):
    conversation = [
        {"role": "system", "content": "Answer briefly."},
        {"role": "user", "content": "Reverse this word.\nlamp"},
        {"role": "assistant", "content": "pmal"},
    ]
    rendered = tokenizer.apply_chat_template(conversation, tokenize=False)
    assert rendered == (
        "<|im_start|>system\nAnswer briefly.<|im_end|>\n"
        "<|im_start|>user\nReverse this word.\nlamp<|im_end|>\n"
        "<|im_start|>assistant\npmal<|im_end|>\n"
    )
    ids = tokenizer.encode(rendered, add_special_tokens=False)
    assert ids == tokenizer.apply_chat_template(conversation, return_dict=False)
    prompt = tokenizer.apply_chat_template(conversation[:2], tokenize=False, add_generation_prompt=True)
    assert rendered == prompt + "pmal<|im_end|>\n"


def test_template_marks_answers_and_their_end_tokens(tokenizer):
    conversation = [
        {"role": "user", "content": "Say hen two times."},
        {"role": "assistant", "content": "hen hen"},
        {"role": "user", "content": "What is 2 + 3?"},
        {"role": "assistant", "content": "5"},
    ]
    encoded = tokenizer.apply_chat_template(conversation, return_dict=True, return_assistant_tokens_mask=True)
    marked = [id for id, mark in zip(encoded["input_ids"], encoded["assistant_masks"], strict=True) if mark]
    assert tokenizer.decode(marked) == "hen hen<|im_end|>5<|im_end|>"


def test_template_rejects_unknown_role(tokenizer):
    with pytest.raises(Exception, match=r"Expected the role system, user or assistant\. Received: tool"):
        tokenizer.apply_chat_template([{"role": "tool", "content": "42"}])
