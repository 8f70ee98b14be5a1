"""Data that would be misinterpreted is rejected or reported."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from bad_inputs import change, read_output, write
from burnish import cli

TRAIN = ["train", "run.yaml", "max_steps=1", "save_strategy=no"]


def weights() -> dict[str, torch.Tensor]:
    return load_file("model/model.safetensors")


def save(tensors: dict[str, torch.Tensor]) -> None:
    save_file(tensors, "model/model.safetensors", {"format": "pt"})


def run_error(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    capsys.readouterr()
    assert cli.main([*TRAIN, *argv]) == 2
    assert not Path("out").exists()
    return read_output(capsys)[1]


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    capsys.readouterr()
    assert cli.main([*TRAIN, *argv]) == 0
    return "".join(read_output(capsys))


@pytest.mark.parametrize("named", [{"AutoTokenizer": ["own.OwnTokenizer", None]}, ["own.OwnTokenizer", None]], ids=str)
def test_tokenizer_with_custom_code_is_rejected(
    named: Any, user_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change("model/tokenizer_config.json", auto_map=named)
    err = run_error(capsys)
    assert "its tokenizer requires running its own Python code (own.OwnTokenizer)" in err
    assert "trust_remote_code: true" in err


def test_custom_tokenizer_named_in_config_json_is_rejected(
    user_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change("model/config.json", auto_map={"AutoTokenizer": ["own.OwnTokenizer", None]})
    assert "model/config.json: its tokenizer requires running its own Python code (own.OwnTokenizer)" in run_error(
        capsys
    )


@pytest.mark.run
@pytest.mark.parametrize("placeholder", ["<image>", "<video>", "<audio>"])
def test_image_placeholders_in_text_are_reported(
    placeholder: str, user_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"instruction": f"{placeholder} What is it?", "output": "A stone."}, {"instruction": "a", "output": "b"}]
    write("data/rows.json", rows * 2)
    assert f"{placeholder} is tokenized as plain text" in (out := run(capsys))
    assert "2 of 4 examples (data/rows.json: 1, 3)" in out


@pytest.mark.run
@pytest.mark.parametrize(
    ("record", "entry"),
    [
        ({"instruction": "a", "output": "b", "system": "<image> and <audio>"},
         {"columns": {"prompt": "instruction", "response": "output", "system": "system"}}),
        ({"prompt": "<image> a", "completion": "b <audio>"}, {"formatting": "prompt_completion"}),
    ],
    ids=["system", "prompt"],
)  # fmt: skip
def test_every_placeholder_in_every_column_is_reported(
    record: dict[str, str], entry: Any, user_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write("data/rows.json", [record] * 4)
    write("data/dataset_info.json", {"rows": {"file_name": "rows.json", **entry}})
    output = run(capsys)
    for placeholder in ("<image>", "<audio>"):
        assert f"{placeholder} is tokenized as plain text" in output


@pytest.mark.sample(3)
@pytest.mark.run
@pytest.mark.parametrize(
    "content", ['{"text": "red"}\n{"text": "green"}\n', '[\n  {"text": "red"}\n]\n', '[{"text": "red"}]',
                '\ufeff\n{"text": "red"}\n\n{"text": "green"}\n',
                '{\n  "version": 1,\n  "rows": [\n    {"text": "red"}\n]}',
                '# rows\n{"text": "red"}\n{"text": "green"}\n', '["red", "green"]\n["blue", "red"]\n'], ids=str
)  # fmt: skip
def test_json_in_a_text_file_is_rejected(content: str, user_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("data/rows.txt").write_text(content, encoding="utf-8")
    argv = ["stage=pt", "dataset=data/rows.txt", "cutoff_len=32"]
    err = run_error(capsys, *argv)
    assert "data/rows.txt: this .txt file contains JSON" in err
    is_json = (content[0] == "[" and "{" in content) or content[:2] == "{\n"
    assert f"Rename it to rows.{'json' if is_json else 'jsonl'} to read" in err
    Path("data/rows.txt").write_text("red [green] {blue}\n{not json}\n", encoding="utf-8")
    assert "its lines are JSON" not in run(capsys, *argv, "output_dir=other")


def call(name: Any, arguments: Any) -> list[dict[str, Any]]:
    message = [("human", "Add."), ("function_call", json.dumps({"name": name, "arguments": arguments})),
               ("observation", "4"), ("gpt", "Four.")]  # fmt: skip
    return [{"conversations": [{"from": role, "value": text} for role, text in message],
             "tools": json.dumps([{"name": "add", "description": "", "parameters": {}}])}]  # fmt: skip


@pytest.mark.run
@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (call(7, {"a": 1}), "the name of a tool call is not a string"),
        (call("", {"a": 1}), "the name of a tool call is not a string"),
        (call("add", "no json"), "the arguments of a tool call are not valid JSON"),
        ([{**call("add", {})[0], "tools": '[{"name": 7}]'}], "a tool name is not a string: 7"),
        ([{**call("add", {})[0], "tools": '[{"type": "function", "function": 3}]'}], "not a list of JSON objects"),
    ],
)
def test_invalid_tool_calls_are_reported(
    rows: list[Any], message: str, user_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}], "tools": ""}
    write("data/rows.json", [good, *rows])
    write("data/dataset_info.json", {"rows": {"file_name": "rows.json", "formatting": "sharegpt",
                                              "columns": {"messages": "conversations", "tools": "tools"}}})  # fmt: skip
    assert message in run(capsys)


@pytest.mark.parametrize("kind", [torch.int8, torch.uint8, torch.float8_e4m3fn], ids=str)
def test_weights_without_required_scales_are_rejected(
    kind: torch.dtype, user_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save({n: (t * 100).to(kind) if t.ndim > 1 else t for n, t in weights().items()})
    assert "its config.json has no quantization_config" in run_error(capsys)


@pytest.mark.run
def test_all_zero_weights_are_rejected(user_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    original = weights()
    save({n: torch.zeros_like(t) for n, t in original.items()})
    capsys.readouterr()
    assert cli.main(TRAIN) == 2
    assert "matrices contain only zeros" in read_output(capsys)[1]
    save({n: torch.zeros_like(t) if n.endswith("0.mlp.down_proj.weight") else t for n, t in original.items()})
    assert "1 of 16 matrices contain only zeros: model.layers.0.mlp.down_proj.weight." in run(capsys)


@pytest.mark.parametrize("command", ["train", "explain"])
def test_config_with_fewer_layers_than_weights_is_rejected(
    command: str, user_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change("model/config.json", num_hidden_layers=1, layer_types=None)
    assert cli.main([command, "run.yaml"]) == 2
    assert "the weights have layer 1 beyond the number of layers in config.json." in read_output(capsys)[1]
    assert not Path("out").exists()


@pytest.mark.run
def test_unused_tensor_is_counted(user_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save({**weights(), "vision.patches.weight": torch.ones(2, 2)})
    assert "1 tensor in the files is not part of LlamaForCausalLM: vision.patches.weight." in run(capsys)


def test_conversations_for_pretraining_are_rejected_with_the_remedy(
    user_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write("records.json", [{"instruction": f"say {n}", "output": f"{n} stones"} for n in range(4)])
    err = run_error(capsys, "stage=pt", "dataset=records.json")
    assert "4 of 4 examples dropped: a conversation instead of plain text" in err
    assert "Set columns: {prompt: <column with the text>}, or use stage: sft." in err
    assert run(capsys, "stage=pt", "dataset=records.json", 'columns={"prompt": "output"}')
