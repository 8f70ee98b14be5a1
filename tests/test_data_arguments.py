"""LLaMA-Factory's data arguments, from the command line to what is trained on: each changes the run as it says."""

import json
from pathlib import Path

import pytest

from burnish.cli import main
from data_sets import chat, qa, write
from small_run import WORDS, as_words, make_model

TALK = [chat(("user", "red"), ("assistant", "green"), ("user", "blue"), ("assistant", "stone"))]


@pytest.fixture
def explained(tmp_path, monkeypatch, capsys):
    """What ``explain`` says of a run, as one line; and the workplace it is in."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BURNISH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "300")
    make_model(Path("model"))
    write(Path("data/a.json"), [qa(n, WORDS[n % 10]) for n in range(20)])
    write(Path("data/b.jsonl"), [qa(n, WORDS[n % 10]) for n in range(100, 110)])
    entries = {"a": {"file_name": "a.json"}, "b": {"file_name": "b.jsonl"}, "c": {"file_name": "c.json"}}
    write(Path("data/dataset_info.json"), entries)

    def explain(expected=0, **given):
        command = {
            "model_name_or_path": "model",
            "dataset": "a",
            "output_dir": "out",
            "cutoff_len": 64,
            "use_cpu": True,
        }
        words = as_words({k: v for k, v in {**command, **given}.items() if v is not None})
        assert main(["explain", *words]) == expected
        return " ".join("".join(capsys.readouterr()).split())

    return explain


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, ["training set 20 rows"]),
        ({"max_samples": 7}, ["training set 7 rows"]),
        ({"val_size": 0.25}, ["training set 15 rows", "evaluation 5 rows"]),
        ({"val_size": 3}, ["training set 17 rows", "evaluation 3 rows"]),
        ({"eval_dataset": "b"}, ["training set 20 rows", "evaluation 10 rows"]),
        ({"eval_dataset": "a,b"}, ["evaluation 30 rows"]),
        ({"eval_dataset": "a,b", "eval_on_each_dataset": True}, ["evaluation 20 rows a", "evaluation 10 rows b"]),
        ({"dataset": "a,b"}, ["training set 30 rows"]),
        ({"dataset": "a,b", "mix_strategy": "interleave_under"}, ["training set 20 rows"]),
        ({"dataset": "a,b", "mix_strategy": "interleave_over"}, ["training set 40 rows"]),
        ({"dataset": "data"}, ["data_files"]),
        ({"dataset": "a", "packing": True}, ["packs of 20 rows"]),
        ({"dataset": "a", "neat_packing": True}, ["packs of 20 rows"]),
        ({"preprocessing_num_workers": 2, "overwrite_cache": True}, ["training set 20 rows"]),
        ({"dataset": "a", "cutoff_len": 20, "on_too_long": "drop"}, ["dropped"]),
    ],
    ids=str,
)  # fmt: skip
def test_an_argument_chooses_the_rows(explained, given, said):
    if given.get("dataset") == "data":
        Path("many").mkdir()
        write(Path("many/1.json"), [qa(1)])
        write(Path("many/2.json"), [qa(2), qa(3)])
        given, said = {"dataset": "many"}, ["training set 3 rows"]
    if "on_too_long" in given:
        assert "No row is left to learn from" in explained(expected=2, **given)
        return
    text = explained(**given)
    assert [sentence for sentence in said if sentence not in text] == []


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"eval_dataset": "b", "val_size": 0.1}, "val_size and eval_dataset are both given"),
        ({"dataset": "a,b", "interleave_probs": "0.5,0.5"}, "mix_strategy is concat"),
        ({"dataset": "a,b", "mix_strategy": "interleave_under", "interleave_probs": "0.5"}, "a number for each set"),
        ({"ignore_pad_token_for_loss": False}, "with padding_free there is none"),
        ({"dataset": "z"}, '"z" is not defined in data/dataset_info.json'),
        ({"on_too_long": "raise", "cutoff_len": 20}, "tokens"),
    ],
    ids=str,
)
def test_an_argument_that_does_not_fit_is_refused(explained, given, sentence):
    assert sentence in explained(expected=2, **given)


def trained(explained, **given):
    """The words that are learned of a conversation in two rounds."""
    write(Path("data/c.json"), TALK)
    run = {"model_name_or_path": "model", "dataset": "c", "output_dir": "out", "cutoff_len": 64, "template": "chatml"}
    from burnish.app.plan import plan
    from burnish.app.prepare import prepare
    from burnish.core.options import Given

    prepared = prepare(plan({name: Given(value) for name, value in {**run, **given}.items()}))
    row = prepared.rows[0]
    learned = [token for token in row["labels"] if token != -100]
    return prepared.tokenizer.decode(learned)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, "green<|im_end|>stone<|im_end|>"),
        ({"train_on_eos": "none"}, "greenstone"),
        ({"train_on_eos": "last"}, "greenstone<|im_end|>"),
        ({"mask_history": True}, "stone<|im_end|>"),
    ],
    ids=str,
)
def test_an_argument_chooses_what_is_learned(explained, given, expected):
    assert trained(explained, **given).replace("\n", "") == expected


def test_prompts_are_learned_where_it_is_asked(explained):
    assert "red" in trained(explained, train_on_prompt=True)


def test_a_message_may_say_whether_it_is_learned(explained):
    TALK[0]["messages"][1]["train"] = False
    try:
        assert trained(explained).replace("\n", "") == "stone<|im_end|>"
    finally:
        del TALK[0]["messages"][1]["train"]


@pytest.mark.parametrize(
    ("entry", "sentence"),
    [
        ({"file_name": "a.json", "ranking": True}, "rank"),
        ({"file_name": "a.json", "columns": {"prompt": "instruction", "images": "input"}}, "text"),
        ({"file_name": "nowhere.json"}, "does not exist"),
        ({"script_url": "load.py"}, "is a Python loading script"),
        ({"file_name": "a.json", "num_sample": 3}, 'Did you mean "num_samples"'),
    ],
    ids=str,
)
def test_an_entry_that_cannot_be_trained_on_is_refused(explained, entry, sentence):
    write(Path("data/dataset_info.json"), {"a": entry})
    write(Path("data/a.json"), [{**qa(1), "input": "picture.png"}])
    assert sentence in explained(expected=2)


@pytest.mark.parametrize("entry", [{"num_samples": 30}, {"num_samples": 5}], ids=str)
def test_num_samples_draws_as_many(explained, entry):
    write(Path("data/dataset_info.json"), {"a": {"file_name": "a.json", **entry}})
    assert f"training set {entry['num_samples']} rows" in explained()


def test_a_cloud_file_is_read(explained):
    import fsspec

    with fsspec.open("memory://bucket/a.jsonl", "w") as file:
        file.write("".join(json.dumps(qa(n)) + "\n" for n in range(4)))
    write(Path("data/dataset_info.json"), {"a": {"cloud_file_name": "memory://bucket/a.jsonl"}})
    assert "training set 4 rows" in explained()


def test_a_mistake_elsewhere_is_said_with_those_of_the_data_although_few_of_its_records_are_looked_at(explained):
    write(Path("data/a.json"), [qa(n, 5 if n == 0 else "yes") for n in range(5)])
    said = explained(expected=2, learning_rat=1, val_size=4000, save_steps=-5)
    assert '"output" must be text' in said
    assert "holds out" not in said
