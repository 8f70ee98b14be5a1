"""LLaMA-Factory's data arguments, from the command line to the rows: each has its documented effect."""

import json
import sys
import types
from pathlib import Path

import datasets
import pytest
from safetensors.torch import load_file

from burnish.cli import main
from burnish.config.options import RawValue
from burnish.loop.types import IGNORE_INDEX
from burnish.run.plan.plan import plan
from burnish.run.prepare import prepare
from dataset_helpers import alpaca_record, openai_record, write
from small_run import WORDS, as_arguments, make_model

pytestmark = pytest.mark.run


def two_rounds(**said_of_the_first_answer):
    """A conversation; what is given stands beside its first answer."""
    record = openai_record(("user", "red"), ("assistant", "green"), ("user", "blue"), ("assistant", "stone"))
    record["messages"][1] |= said_of_the_first_answer
    return record


@pytest.fixture
def explained(tmp_path, monkeypatch, capsys):
    """The words of ``explain`` on a run, as one line; and the workspace it is in."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BURNISH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "300")
    make_model(Path("model"))
    write(Path("data/a.json"), [alpaca_record(n, WORDS[n % 10]) for n in range(20)])
    write(Path("data/b.jsonl"), [alpaca_record(n, WORDS[n % 10]) for n in range(100, 110)])
    entries = {"a": {"file_name": "a.json"}, "b": {"file_name": "b.jsonl"}, "c": {"file_name": "c.json"}}
    write(Path("data/dataset_info.json"), entries)

    def explain(expected=0, **options):
        command = {
            "model_name_or_path": "model",
            "dataset": "a",
            "output_dir": "out",
            "cutoff_len": 64,
            "use_cpu": True,
        }
        argv = as_arguments({k: v for k, v in {**command, **options}.items() if v is not None})
        assert main(["explain", *argv]) == expected
        return " ".join("".join(capsys.readouterr()).split())

    return explain


@pytest.mark.sample(6)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, ["training set 20 examples"]),
        ({"max_samples": 7}, ["training set 7 examples"]),
        ({"val_size": 0.25}, ["training set 15 examples", "evaluation 5 examples"]),
        ({"val_size": 3}, ["training set 17 examples", "evaluation 3 examples"]),
        ({"eval_dataset": "b"}, ["training set 20 examples", "evaluation 10 examples"]),
        ({"eval_dataset": "a,b"}, ["evaluation 30 examples"]),
        (
            {"eval_dataset": "a,b", "eval_on_each_dataset": True},
            ["evaluation 20 examples a", "evaluation 10 examples b"],
        ),
        ({"dataset": "a,b"}, ["training set 30 examples"]),
        ({"dataset": "a,b", "mix_strategy": "interleave_under"}, ["training set 20 examples"]),
        ({"dataset": "a,b", "mix_strategy": "interleave_over"}, ["training set 40 examples"]),
        ({"dataset": "a,b", "mix_strategy": "interleave_once", "interleave_probs": "0.5,0.5"}, ["set 30 examples"]),
        ({"dataset": "data"}, ["data_files"]),
        ({"dataset": "a", "packing": True}, ["packs of 20 examples"]),
        ({"dataset": "a", "neat_packing": True}, ["packs of 20 examples"]),
        ({"preprocessing_num_workers": 2, "overwrite_cache": True}, ["training set 20 examples"]),
    ],
    ids=str,
)  # fmt: skip
def test_data_option_selects_rows(explained, options, message):
    if options.get("dataset") == "data":
        Path("many").mkdir()
        write(Path("many/1.json"), [alpaca_record(1)])
        write(Path("many/2.json"), [alpaca_record(2), alpaca_record(3)])
        options, message = {"dataset": "many"}, ["training set 3 examples"]
    text = explained(**options)
    assert [sentence for sentence in message if sentence not in text] == []


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"eval_dataset": "b", "val_size": 0.1}, "val_size and eval_dataset cannot be combined"),
        ({"dataset": "a,b", "interleave_probs": "0.5,0.5"}, "mix_strategy: concat"),
        ({"dataset": "a,b", "mix_strategy": "interleave_under", "interleave_probs": "0.5"}, "one number per dataset"),
        ({"ignore_pad_token_for_loss": False}, "padding_free batches have none"),
        ({"dataset": "z"}, '"z" is neither defined in data/dataset_info.json'),
        ({"on_too_long": "raise", "cutoff_len": 20}, "tokens"),
    ],
    ids=str,
)
def test_invalid_data_option_is_rejected(explained, options, sentence):
    assert sentence in explained(expected=2, **options)


def prepared(**options):
    """A run as it is known before its first step."""
    run = {"model_name_or_path": "model", "dataset": "a", "output_dir": "out", "cutoff_len": 64, "use_cpu": True}
    return prepare(plan({name: RawValue(value) for name, value in {**run, **options}.items()}))


def first_row(**options):
    """The text of the first row."""
    run = prepared(**options)
    return run.tokenizer.decode(run.rows[0]["input_ids"])


def trained(explained, said_of_the_first_answer=None, **options):
    """The words that are learned of a conversation in two rounds."""
    write(Path("data/c.json"), [two_rounds(**said_of_the_first_answer or {})])
    run = prepared(**{"dataset": "c", "template": "chatml", **options})
    return run.tokenizer.decode([token for token in run.rows[0]["labels"] if token != IGNORE_INDEX])


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, "green<|im_end|>stone<|im_end|>"),
        ({"train_on_eos": "none"}, "greenstone"),
        ({"train_on_eos": "last"}, "greenstone<|im_end|>"),
        ({"mask_history": True}, "stone<|im_end|>"),
    ],
    ids=str,
)
def test_data_option_selects_learned_tokens(explained, options, expected):
    assert trained(explained, **options).replace("\n", "") == expected


def test_prompts_are_learned_on_request(explained):
    assert "red" in trained(explained, train_on_prompt=True)


NOT_APPLIED = "c: the prompts are plain text, so the chat template is not applied."


@pytest.mark.parametrize(("options", "words"), [({}, "green"), ({"train_on_prompt": True}, "redgreen")], ids=str)
def test_prompt_of_a_text_record_is_learned_on_request(explained, options, words):
    write(Path("data/c.json"), [{"prompt": "red ", "completion": "green"}])
    run = prepared(dataset="c", template="chatml", **options)
    learned = [token for token in run.rows[0]["labels"] if token != IGNORE_INDEX]
    assert run.tokenizer.decode(learned[:-1]).replace(" ", "") == words
    assert learned[-1] == run.tokenizer.eos_token_id
    assert [note for note in run.notes if note.startswith(NOT_APPLIED)]


def test_messages_and_models_without_a_template_get_no_note_on_text(explained):
    write(Path("data/c.json"), [{"prompt": "red ", "completion": "green"}])
    assert NOT_APPLIED in explained(dataset="c")  # the model has a chat template
    assert NOT_APPLIED.replace("c:", "a:") not in explained()
    for place in Path("model").glob("*template*"):
        place.unlink()
    config = json.loads(Path("model/tokenizer_config.json").read_text())
    write(Path("model/tokenizer_config.json"), {k: v for k, v in config.items() if k != "chat_template"})
    assert NOT_APPLIED not in explained(dataset="c")


def test_message_can_set_whether_it_is_learned(explained):
    assert trained(explained, {"train": False}).replace("\n", "") == "stone<|im_end|>"


def weights_after(records, **options):
    """The model's weights after one step over these records."""
    write(Path("data/c.json"), records)
    out = f"out {len(list(Path().glob('out *')))}"
    run = {
        "model_name_or_path": "model", "dataset": "c", "output_dir": out, "cutoff_len": 64, "template": "chatml",
        "max_steps": 1, "per_device_train_batch_size": 4, "finetuning_type": "full", "learning_rate": 1e-3,
        "optim": "sgd", "save_strategy": "no", "use_cpu": True, "plot_loss": False,
    }  # fmt: skip
    assert main(["train", *as_arguments({**run, **options})]) == 0
    return load_file(f"{out}/model.safetensors")


def differ(a, b):
    """By how much two sets of weights do, at most."""
    return max((a[name] - b[name]).abs().max().item() for name in a)


def test_run_learns_messages_according_to_their_flags(explained):
    plain = weights_after([two_rounds()])
    last = weights_after([two_rounds()], mask_history=True)
    assert differ(weights_after([two_rounds(train=False)]), last) == 0
    assert differ(weights_after([two_rounds(weight=0)]), last) == 0
    assert differ(plain, last) > 1e-6


def test_answer_of_weight_two_counts_twice(explained):
    first, second = (openai_record(("user", "red"), ("assistant", words)) for words in ("green", "stone river lamp"))
    twice = weights_after([first, first, second])
    first["messages"][1]["weight"] = 2
    weighted = weights_after([first, second])
    assert differ(weighted, twice) < 1e-7
    assert differ(weighted, weights_after([second])) > 1e-6


LONG = {**alpaca_record(1), "output": "stone " * 100}


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ("truncate", (0, ["training set 21 examples", "truncated", "data/a.json: 21"])),
        (
            "drop",
            (0, ["training set 20 examples", "dropped: longer than cutoff_len: 1 of 21 examples (data/a.json: 21)"]),
        ),
        ("raise", (2, ["data/a.json, record 21", "cutoff_len"])),
    ],
)
def test_long_row_is_truncated_dropped_or_rejected(explained, choice, expected):
    write(Path("data/a.json"), [*(alpaca_record(n, WORDS[n % 10]) for n in range(20)), LONG])
    code, sentences = expected
    message = explained(expected=code, on_too_long=choice)
    assert [sentence for sentence in sentences if sentence not in message] == []


def test_default_system_message_is_used_if_record_has_none(explained):
    assert "<|im_start|>system\nYou count.<|im_end|>" in first_row(template="chatml", default_system="You count.")
    write(Path("data/a.json"), [{**alpaca_record(1), "system": "You add."}])
    write(Path("data/dataset_info.json"), {"a": {"file_name": "a.json", "columns": {**ALPACA, "system": "system"}}})
    message = first_row(template="chatml", default_system="You count.")
    assert "You add." in message
    assert "You count." not in message


# --- dataset_info.json ------------------------------------------------------------------------------------------------

ALPACA = {"prompt": "instruction", "query": "input", "response": "output"}
RENAMED = {
    "columns": {"messages": "talk", "system": "rules", "tools": "can"},
    "tags": {"role_tag": "who", "content_tag": "what", "user_tag": "u", "assistant_tag": "a", "observation_tag": "o",
             "function_tag": "f", "system_tag": "s"},
}  # fmt: skip
CALL = json.dumps({"name": "add", "arguments": {"n": 1}})
TALKS = [
    {"who": "u", "what": "seven"}, {"who": "f", "what": CALL},
    {"who": "o", "what": "blue"}, {"who": "a", "what": "lamp"},
]  # fmt: skip
TOOLS = json.dumps([{"name": "add", "description": "adds", "parameters": {"type": "object", "properties": {}}}])
KEYS = {
    "columns of questions and answers": (
        {"columns": {"prompt": "q", "query": "more", "response": "r", "history": "before", "system": "rules"}},
        {"q": "red", "more": "green", "r": "blue", "before": [["seven", "nine"]], "rules": "stone"},
        ["stone", "seven", "nine", "red\ngreen", "blue"],
    ),
    "columns and tags of conversations": (
        {"formatting": "sharegpt", **RENAMED}, {"talk": TALKS, "rules": "stone", "can": TOOLS},
        ["stone", "adds", "seven", '{"n": 1}', "blue", "lamp"],
    ),
    "a system message under its tag": (
        {"formatting": "sharegpt", **RENAMED},
        {"talk": [{"who": "s", "what": "north"}, *TALKS], "rules": "stone", "can": ""},
        ["north", "seven", "lamp"],
    ),
    "openai": ({"formatting": "openai", "columns": {"messages": "messages"}}, two_rounds(), ["red", "green", "stone"]),
}  # fmt: skip


@pytest.mark.parametrize("name", KEYS)
def test_dataset_info_key_selects_its_column(explained, name):
    entry, record, words = KEYS[name]
    write(Path("data/a.json"), [record])
    write(Path("data/dataset_info.json"), {"a": {"file_name": "a.json", **entry}})
    message = first_row(template="qwen", cutoff_len=2048, rope_scaling="linear")
    places = [message.find(word) for word in words]
    assert -1 not in places, [word for word, place in zip(words, places, strict=True) if place < 0]
    assert places == sorted(places)


@pytest.mark.parametrize(
    ("column", "sentence"),
    [
        ("images", 'contains images ("extra"), but llama supports text only'),
        ("chosen", "contains preference pairs (chosen)"),
        ("rejected", "contains preference pairs (rejected)"), ("kto_tag", "contains KTO labels (kto_tag)"),
    ],
)  # fmt: skip
def test_column_for_another_stage_is_rejected(explained, column, sentence):
    write(Path("data/a.json"), [{**alpaca_record(1), "extra": "something"}])
    entry = {"file_name": "a.json", "columns": {**ALPACA, column: "extra"}}
    write(Path("data/dataset_info.json"), {"a": entry})
    assert sentence in explained(expected=2)


@pytest.fixture
def hubs(monkeypatch):
    """Requests to the clients of the hubs; every data set there holds eight records."""
    requests = []
    rows = datasets.Dataset.from_list([alpaca_record(n, WORDS[n]) for n in range(8)])

    def load_dataset(path, name, data_dir, split, cache_dir, token):
        requests.append(("hf", path, name, data_dir, split, token))
        return rows

    class MsDataset:
        @staticmethod
        def load(path, subset_name, data_dir, split, cache_dir, token):
            requests.append(("ms", path, subset_name, data_dir, split, token))
            return rows

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setitem(sys.modules, "modelscope", types.SimpleNamespace(MsDataset=MsDataset))
    return requests


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        ({"hf_hub_url": "x/y"}, ("hf", "x/y", None, None, "train", None)),
        ({"ms_hub_url": "x/y"}, ("ms", "x/y", None, None, "train", None)),
        ({"hf_hub_url": "x/y", "subset": "en"}, ("hf", "x/y", "en", None, "train", None)),
        ({"hf_hub_url": "x/y", "split": "test"}, ("hf", "x/y", None, None, "test", None)),
        ({"hf_hub_url": "x/y", "folder": "v2"}, ("hf", "x/y", None, "v2", "train", None)),
    ],
    ids=str,
)  # fmt: skip
def test_dataset_info_keys_are_passed_to_the_hub(explained, hubs, entry, expected):
    write(Path("data/dataset_info.json"), {"a": {**entry, "num_samples": 5}})
    assert "training set 5 examples" in explained()
    assert hubs == [expected]


def test_online_names_are_hub_ids(explained, hubs, monkeypatch):
    options = {"dataset": "x/y", "dataset_dir": "ONLINE", "hf_hub_token": "h", "ms_hub_token": "m"}
    assert "training set 8 examples" in explained(**options)
    monkeypatch.setenv("USE_MODELSCOPE_HUB", "1")
    assert "training set 8 examples" in explained(**options)
    assert hubs == [("hf", "x/y", None, None, "train", "h"), ("ms", "x/y", None, None, "train", "m")]


def test_hub_repository_with_dataset_info_is_read_with_token(explained, hubs, monkeypatch):
    import huggingface_hub

    path = write(Path("fetched/dataset_info.json"), {"far": {"hf_hub_url": "x/y", "num_samples": 3}})
    requests = []
    monkeypatch.setattr(
        huggingface_hub,
        "hf_hub_download",
        lambda repo, name, **more: requests.append((repo, more["token"])) or str(path),
    )
    assert "training set 3 examples" in explained(dataset="far", dataset_dir="REMOTE:x/info", hf_hub_token="h")
    assert requests == [("x/info", "h")]


def test_python_can_pass_dataset_descriptions(explained):
    assert (
        len(
            prepared(
                dataset="d", dataset_dir={"d": {"records": [alpaca_record(n) for n in range(4)], "num_samples": 3}}
            ).rows
        )
        == 3
    )
