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


def two_turns(**response_fields):
    """Return a conversation with two turns. The arguments are added to its first response."""
    record = openai_record(("user", "red"), ("assistant", "green"), ("user", "blue"), ("assistant", "stone"))
    record["messages"][1] |= response_fields
    return record


@pytest.fixture
def explain(tmp_path, monkeypatch, capsys):
    """A function that runs ``burnish explain`` in a folder with data sets and returns its output as one line."""
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


@pytest.mark.sample(3)
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
def test_data_option_selects_rows(explain, options, message):
    if options.get("dataset") == "data":
        Path("many").mkdir()
        write(Path("many/1.json"), [alpaca_record(1)])
        write(Path("many/2.json"), [alpaca_record(2), alpaca_record(3)])
        options, message = {"dataset": "many"}, ["training set 3 examples"]
    text = explain(**options)
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
def test_invalid_data_option_is_rejected(explain, options, sentence):
    assert sentence in explain(expected=2, **options)


def prepare_run(**options):
    """Return a prepared run."""
    run = {"model_name_or_path": "model", "dataset": "a", "output_dir": "out", "cutoff_len": 64, "use_cpu": True}
    return prepare(plan({name: RawValue(value) for name, value in {**run, **options}.items()}))


def first_row(**options):
    """Return the text of the first row."""
    run = prepare_run(**options)
    return run.tokenizer.decode(run.rows[0]["input_ids"])


def trained_text(explain, response_fields=None, **options):
    """Return the trained text of a conversation with two turns."""
    write(Path("data/c.json"), [two_turns(**response_fields or {})])
    run = prepare_run(**{"dataset": "c", "template": "chatml", **options})
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
def test_data_option_selects_trained_tokens(explain, options, expected):
    assert trained_text(explain, **options).replace("\n", "") == expected


def test_prompts_are_trained_on_request(explain):
    assert "red" in trained_text(explain, train_on_prompt=True)


NOT_APPLIED = "c: the prompts are plain text, so the chat template is not applied."


@pytest.mark.parametrize(("options", "expected"), [({}, "green"), ({"train_on_prompt": True}, "redgreen")], ids=str)
def test_prompt_of_a_text_record_is_trained_on_request(explain, options, expected):
    write(Path("data/c.json"), [{"prompt": "red ", "completion": "green"}])
    run = prepare_run(dataset="c", template="chatml", **options)
    trained_ids = [token for token in run.rows[0]["labels"] if token != IGNORE_INDEX]
    assert run.tokenizer.decode(trained_ids[:-1]).replace(" ", "") == expected
    assert trained_ids[-1] == run.tokenizer.eos_token_id
    assert [note for note in run.notes if note.startswith(NOT_APPLIED)]


def test_messages_and_models_without_a_template_get_no_note_on_text(explain):
    write(Path("data/c.json"), [{"prompt": "red ", "completion": "green"}])
    assert NOT_APPLIED in explain(dataset="c")  # the model has a chat template
    assert NOT_APPLIED.replace("c:", "a:") not in explain()
    for path in Path("model").glob("*template*"):
        path.unlink()
    config = json.loads(Path("model/tokenizer_config.json").read_text())
    write(Path("model/tokenizer_config.json"), {k: v for k, v in config.items() if k != "chat_template"})
    assert NOT_APPLIED not in explain(dataset="c")


def test_message_can_set_whether_it_is_trained(explain):
    assert trained_text(explain, {"train": False}).replace("\n", "") == "stone<|im_end|>"


def weights_after(records, **options):
    """Train one step on these records and return the weights."""
    write(Path("data/c.json"), records)
    out = f"out {len(list(Path().glob('out *')))}"
    run = {
        "model_name_or_path": "model", "dataset": "c", "output_dir": out, "cutoff_len": 64, "template": "chatml",
        "max_steps": 1, "per_device_train_batch_size": 4, "finetuning_type": "full", "learning_rate": 1e-3,
        "optim": "sgd", "save_strategy": "no", "use_cpu": True, "plot_loss": False,
    }  # fmt: skip
    assert main(["train", *as_arguments({**run, **options})]) == 0
    return load_file(f"{out}/model.safetensors")


def max_difference(a, b):
    """Return the largest difference between two sets of weights."""
    return max((a[name] - b[name]).abs().max().item() for name in a)


def test_run_trains_messages_according_to_their_flags(explain):
    both = weights_after([two_turns()])
    last = weights_after([two_turns()], mask_history=True)
    assert max_difference(weights_after([two_turns(train=False)]), last) == 0
    assert max_difference(weights_after([two_turns(weight=0)]), last) == 0
    assert max_difference(both, last) > 1e-6


def test_answer_of_weight_two_counts_twice(explain):
    first, second = (openai_record(("user", "red"), ("assistant", text)) for text in ("green", "stone river lamp"))
    twice = weights_after([first, first, second])
    first["messages"][1]["weight"] = 2
    weighted = weights_after([first, second])
    assert max_difference(weighted, twice) < 1e-7
    assert max_difference(weighted, weights_after([second])) > 1e-6


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
def test_long_row_is_truncated_dropped_or_rejected(explain, choice, expected):
    write(Path("data/a.json"), [*(alpaca_record(n, WORDS[n % 10]) for n in range(20)), LONG])
    code, sentences = expected
    message = explain(expected=code, on_too_long=choice)
    assert [sentence for sentence in sentences if sentence not in message] == []


def test_default_system_message_is_used_if_record_has_none(explain):
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
    "openai": ({"formatting": "openai", "columns": {"messages": "messages"}}, two_turns(), ["red", "green", "stone"]),
}  # fmt: skip


@pytest.mark.parametrize("name", KEYS)
def test_dataset_info_key_selects_its_column(explain, name):
    entry, record, texts = KEYS[name]
    write(Path("data/a.json"), [record])
    write(Path("data/dataset_info.json"), {"a": {"file_name": "a.json", **entry}})
    message = first_row(template="qwen", cutoff_len=2048, rope_scaling="linear")
    positions = [message.find(text) for text in texts]
    assert -1 not in positions, [text for text, position in zip(texts, positions, strict=True) if position < 0]
    assert positions == sorted(positions)


@pytest.mark.parametrize(
    ("column", "sentence"),
    [
        ("images", 'contains images ("extra"), but llama supports text only'),
        ("chosen", "contains preference pairs (chosen)"),
        ("rejected", "contains preference pairs (rejected)"), ("margin", "contains preference pairs (margin)"),
        ("kto_tag", "contains KTO labels (kto_tag)"),
    ],
)  # fmt: skip
def test_column_for_another_stage_is_rejected(explain, column, sentence):
    write(Path("data/a.json"), [{**alpaca_record(1), "extra": "something"}])
    entry = {"file_name": "a.json", "columns": {**ALPACA, column: "extra"}}
    write(Path("data/dataset_info.json"), {"a": entry})
    assert sentence in explain(expected=2)


@pytest.mark.parametrize(
    ("record", "kind"),
    [
        ({**{f"column_{n}": n for n in range(12)}, "chosen": "a", "rejected": "b"}, "preference pairs"),
        ({"prompt": "p", "completion": "c", "label": True, "chosen_by": "a"}, "KTO labels"),
    ],
)
def test_kind_of_preferences_depends_on_the_names_of_all_columns(explain, record, kind):
    write(Path("data/pairs.json"), [record])
    assert f"contains {kind}" in explain(expected=2, dataset="data/pairs.json")


@pytest.fixture
def hubs(monkeypatch):
    """The recorded requests to the clients of the hubs. Each data set there has eight records."""
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
def test_dataset_info_keys_are_passed_to_the_hub(explain, hubs, entry, expected):
    write(Path("data/dataset_info.json"), {"a": {**entry, "num_samples": 5}})
    assert "training set 5 examples" in explain()
    assert hubs == [expected]


def test_online_names_are_hub_ids(explain, hubs, monkeypatch):
    options = {"dataset": "x/y", "dataset_dir": "ONLINE", "hf_hub_token": "h", "ms_hub_token": "m"}
    assert "training set 8 examples" in explain(**options)
    monkeypatch.setenv("USE_MODELSCOPE_HUB", "1")
    assert "training set 8 examples" in explain(**options)
    assert hubs == [("hf", "x/y", None, None, "train", "h"), ("ms", "x/y", None, None, "train", "m")]


def test_hub_repository_with_dataset_info_is_read_with_token(explain, hubs, monkeypatch):
    import huggingface_hub

    path = write(Path("fetched/dataset_info.json"), {"far": {"hf_hub_url": "x/y", "num_samples": 3}})
    requests = []
    monkeypatch.setattr(
        huggingface_hub,
        "hf_hub_download",
        lambda repo, name, **more: requests.append((repo, more["token"])) or str(path),
    )
    assert "training set 3 examples" in explain(dataset="far", dataset_dir="REMOTE:x/info", hf_hub_token="h")
    assert requests == [("x/info", "h")]


def test_python_can_pass_dataset_descriptions(explain):
    assert (
        len(
            prepare_run(
                dataset="d", dataset_dir={"d": {"records": [alpaca_record(n) for n in range(4)], "num_samples": 3}}
            ).rows
        )
        == 3
    )
