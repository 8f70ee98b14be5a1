"""Bad models, data and folders, from the command line to the output: at most four lines per problem, no traceback, no
files written before a rejection, and no unrequested result. Bad options and bad checkpoints are in
``test_bad_options.py`` and ``test_bad_checkpoints.py``."""

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from bad_inputs import ROWS, Case, change, cut_short, files, matches_stored_message, read_output, write
from burnish import cli
from burnish.data.sets import sources

pytestmark = pytest.mark.run

CHATS = [
    {"messages": [{"role": "user", "content": row["instruction"]}, {"role": "assistant", "content": row["output"]}]}
    for row in ROWS
]


def data(content: Any, **entry: Any) -> Callable[[], None]:
    """Return a function that replaces the data set."""

    def prepare() -> None:
        file = entry.get("file_name", "rows.json")
        Path("data/rows.json").unlink()
        write(f"data/{file}", content)
        write("data/dataset_info.json", {"rows": {"file_name": file, **entry}})

    return prepare


def weights(changed: Callable[[dict[str, Any]], dict[str, Any]]) -> Callable[[], None]:
    def prepare() -> None:
        save_file(changed(load_file("model/model.safetensors")), "model/model.safetensors", {"format": "pt"})

    return prepare


def add_nan(state: dict[str, Any]) -> dict[str, Any]:
    state["model.layers.0.mlp.down_proj.weight"][0, 0] = float("nan")
    return state


def pickle_weights() -> None:
    Path("model/model.safetensors").unlink()
    Path("model/pytorch_model.bin").write_bytes(pickle.dumps("weights"))


def add_loading_script() -> None:
    data(ROWS, file_name="set")()
    Path("data/set").unlink()
    write("data/set/rows.json", ROWS)
    Path("data/set/rows.py").write_text("raise SystemExit(3)")


# --- rejected models and data -----------------------------------------------------------------------------------------

LATIN_1 = json.dumps([*ROWS, {**ROWS[0], "output": "café"}], ensure_ascii=False).encode("latin-1")
NULL_ANSWER = {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": None}]}
REJECTED = [
    Case("M44", lambda: write("model/config.json", b'{"model_type": "llama",,'), ["model/config.json, line 1, column"]),
    Case("M45", lambda: cut_short("model/model.safetensors", 70_000), ["model/model.safetensors", "70,000", "bytes"]),
    Case("M47", weights(lambda state: {k: v for k, v in state.items() if "layers.1.mlp" not in k}),
         ["model.layers.1.mlp.down_proj.weight", "random"]),
    Case("M47b", lambda: change("model/config.json", num_hidden_layers=4), ["model.layers.2."]),
    Case("M51", pickle_weights, ["pytorch_model.bin", "run arbitrary code", "safetensors"]),
    Case("M52", lambda: change("model/config.json", model_type="own", auto_map={"AutoConfig": "own.Config"}),
         ["own.py", "trust_remote_code"]),
    Case("B02", lambda: Path("data/rows.json").unlink(), ["data/rows.json", "does not exist"]),
    Case("B03", data([]), ["data/rows.json", "contains no records"]),
    Case("B05", data([{"prompt_text": "q", "answer_text": "a"}]), ["Found: prompt_text, answer_text", '"columns"']),
    Case("B05b", data(ROWS, columns={"prompt": "question"}), ['no column "question"', "Found: instruction"]),
    Case("B07", data(LATIN_1), ["data/rows.json, line 1", "byte 0xe9 at offset", "iconv -f latin1"]),
    Case("B09b", data([NULL_ANSWER], formatting="sharegpt"), ["record 1", '"conversations[1].value" must be a string']),
    Case("B10", data([{**row, "output": ""} for row in ROWS]), ["record 1", "empty"]),
    Case("B11b", data([*ROWS, {**ROWS[0], "output": 5}]), ["record 25", '"output" must be a string', "Received: 5"]),
    Case("B15", data([*ROWS, {"instruction": "q", "input": ""}]), ["record 25", 'the column "output" is missing']),
    Case("B22", data(ROWS, file_name="../secret.json"), ['must be inside "data"']),
    Case("B24b", data([{**ROWS[0], "images": ["a.png"]}]),
         ["record 1", 'contains images ("images")', "supports text only"]),
    Case("B24b, named", data([{**ROWS[0], "images": ["a.png"]}],
                             columns={"prompt": "instruction", "response": "output", "images": "images"}),
         ["record 1", 'contains images ("images")', "supports text only"]),
    Case("B25", data("\n".join(map(json.dumps, ROWS)).encode()[:-20], file_name="rows.jsonl"),
         ["data/rows.jsonl, line 24"]),
    Case("B27", data({"data": ROWS}), ['24 records under the key "data"']),
    Case("B30", lambda: write("data/dataset_info.json", b'{"rows": {"file_name": "rows.json",}'),
         ["data/dataset_info.json, line 1, column"]),
    Case("B31", data(b"PK", file_name="rows.xlsx"), ['".xlsx"', ".jsonl, .csv, .parquet"]),
    Case("B33", add_loading_script, ["rows.py", "does not run code"]),
    Case("A30", data([{**ROWS[0], "output": "red " * 1000}]), ["1,0", "context length is 256", "cutoff_len"],
         ["cutoff_len=100000"]),
    Case("C01", lambda: write("out/thesis.tex", b"words"),
         ["run.yaml, line 6", "other files: thesis.tex", "overwrite_output_dir"]),
    Case("C01, a finished run without checkpoints", lambda: write("out/trainer_state.json", b"{}"), ["an earlier run"]),
    Case("C02", lambda: write("out", b""), ["run.yaml, line 6", '"out" is a file']),
    Case("C02, on the way", lambda: None, ["run.yaml", "is a file"], ["output_dir=run.yaml/out"]),
    Case("C02, a name that no disk takes", lambda: None, ["output_dir", "255 bytes"], [f"output_dir={'x' * 300}"]),
    Case("C02, the model itself", lambda: None, ["is also model_name_or_path", "would be overwritten"],
         ["output_dir=./model", "overwrite_output_dir=true"]),
    Case("A13, without an end", lambda: None, ["num_train_epochs", "greater than 0 and finite"],
         ["num_train_epochs=inf", "max_steps=-1"]),
    Case("A24b", lambda: None, ["the command line", "never reach its peak", "warmup_steps"], ["warmup_steps=1000"]),
]  # fmt: skip


@pytest.mark.parametrize("command", ["train", "explain"])
@pytest.mark.parametrize("case", REJECTED, ids=str)
def test_bad_input_is_rejected_before_anything_is_written(
    case: Case, command: str, user_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    case.prepare()
    before = files(user_folder)
    assert cli.main([command, "run.yaml", *case.argv]) == 2
    out, err = read_output(capsys)
    assert out == ""
    for message in case.expected:
        assert message in err
    assert matches_stored_message(f"input {case}", err, user_folder)
    assert files(user_folder) == before


def test_hub_is_not_queried_for_data_if_model_cannot_be_loaded(
    user_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unreachable hub would delay the error by a minute."""
    monkeypatch.setitem(sources._REMOTE, "hf_hub", lambda *args: pytest.fail("the hub was asked"))
    write("model/config.json", b"{")
    assert cli.main(["train", "run.yaml", "dataset=someone/set", "dataset_dir=ONLINE"]) == 2
    assert "model/config.json, line 1" in read_output(capsys)[1]


def test_non_numeric_weights_are_rejected_without_creating_a_folder(
    user_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """M53."""
    weights(add_nan)()
    assert cli.main(["train", "run.yaml"]) == 2
    assert "model.layers.0.mlp.down_proj.weight" in read_output(capsys)[1]
    assert not Path("out").exists()


# --- successful runs with messages ------------------------------------------------------------------------------------


def remove_chat_template() -> None:
    Path("model/chat_template.jinja").unlink()


def chat(*turns: tuple[str, str]) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


WARNED = [
    Case("M49", lambda: change("model/tokenizer_config.json", eos_token=None, pad_token=None),
         ["defines no EOS token", "has no padding token"]),
    Case("M49b", lambda: change("model/tokenizer_config.json", pad_token=None), ["has no padding token"]),
    Case("M54", remove_chat_template, ["has no chat template"]),
    Case("B08", data(b"\xef\xbb\xbf" + json.dumps(ROWS).encode()), ["24 examples"]),
    Case("B12", data([*CHATS, chat(("user", "a"))]),
         ["the last message is not a response", "1 of 25 examples (data/rows.json: 25)"]),
    Case("B13", data([*CHATS, chat(("assistant", "b"), ("user", "c"), ("assistant", "d"))]),
         ["the first message is a response", "1 of 25 examples (data/rows.json: 25)"]),
    Case("B13b", data([chat(("user", "a"), ("user", "c"), ("assistant", "x"))] * 4),
         ["consecutive user messages", "4 of 4 examples (data/rows.json: 1, 2, 3, 4)"]),
    Case("B14b", data([chat(("human", "a"), ("gpt", "b"))] * 4),
         ['"human" is treated as user', '"gpt" is treated as assistant']),
    Case("B16b", data([{**row, "output": row["output"] * (index % 2)} for index, row in enumerate(ROWS)]),
         ["responses are empty: 12 of 24 examples (data/rows.json: 1, 3, 5, 7, 9, ...)"]),
    Case("B23", data([{"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]},
                                    {"role": "assistant", "content": "x"}]}]), ["hi<|im_end|>"]),
    Case("B28", data(ROWS[:1]), ["each epoch is one step"], ["per_device_train_batch_size=8"]),
    Case("B34", lambda: None, ["is listed 2 times"], ["dataset=rows,rows"]),
    Case("an unused image", data([{**ROWS[0], "images": ["a.png"]}],
                                 columns={"prompt": "instruction", "response": "output"}), ['"images" is ignored']),
]  # fmt: skip


@pytest.mark.parametrize("case", WARNED, ids=str)
def test_run_succeeds_with_a_warning(case: Case, user_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    case.prepare()
    assert cli.main(["explain", "run.yaml", *case.argv]) == 0
    out, _ = read_output(capsys)
    text = " ".join(out.split())
    for message in case.expected:
        assert message in text
    assert not Path("out").exists()
