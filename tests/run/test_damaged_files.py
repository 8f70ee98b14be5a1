"""Every file that a run reads, damaged in common ways: the run succeeds or names the damaged file."""

import faulthandler
import json
import os
import random
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from bad_inputs import make_folder, read_output
from burnish import cli
from burnish.cli import main
from burnish.utils.files import remove
from representative import representative_slow
from small_run import as_arguments, make_workspace

pytestmark = pytest.mark.run

DAMAGE: dict[str, bytes | None] = {
    "empty": b"", "cut": None, "a list": b"[]", "a number": b"3", "null": b"null", "text": b'"words"',
    "no text": b"\xff\xfe\x00{", "deep": b"[" * 100_000, "an empty object": b"{}",
    "a long number": b'{"a": ' + b"9" * 5000 + b"}",
}  # fmt: skip
MODEL_FILES = (
    "model/config.json", "model/generation_config.json", "model/tokenizer.json", "model/tokenizer_config.json",
    "model/model.safetensors",
)  # fmt: skip
RUN_FILES = (
    "out/.finished.json", "out/trainer_state.json", "out/all_results.json", "out/train_results.json",
    "out/checkpoint-4/manifest.json", "out/checkpoint-4/trainer_state.json", "out/checkpoint-4/optimizer.json",
    "out/trainer_log.jsonl",
)  # fmt: skip
ADAPTER_FILES = ("adapter/adapter_config.json", "adapter/adapter_model.safetensors")


def damage(path: str, kind: str) -> None:
    raw = DAMAGE[kind]
    Path(path).write_bytes(Path(path).read_bytes()[:-40] if raw is None else raw)


@pytest.fixture(scope="module")
def finished(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a run of four steps with its checkpoints, and an adapter."""
    folder = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("BURNISH_CACHE", str(folder / "cache"))
        make_folder(small_model)
        assert cli.main(["train", "run.yaml", "max_steps=4"]) == 0
        assert cli.main(["train", "run.yaml", "max_steps=2", "finetuning_type=lora", "output_dir=adapter"]) == 0
        shutil.rmtree("adapter/checkpoint-2")
    return folder


@pytest.fixture
def here(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BURNISH_CACHE", str(tmp_path / "cache"))
    return tmp_path


def run_or_report_error(argv: list[str], capsys: pytest.CaptureFixture[str], name: str) -> int:
    capsys.readouterr()
    status = cli.main(argv)
    out, err = read_output(capsys)
    assert status in (0, 2), err
    assert status == 0 or Path(name).name in err or str(Path(name).parent) in err, err
    assert "Raised in" not in out + err
    return status


@pytest.mark.parametrize("kind", ["empty", "cut", "a list", "deep", "an empty object"])
@pytest.mark.parametrize("name", MODEL_FILES)
def test_damaged_model_file_is_rejected_or_harmless(
    name: str, kind: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(name, kind)
    status = run_or_report_error(["explain", "run.yaml", "max_steps=1", "output_dir=new"], capsys, name)
    assert status == 2 or kind in ("an empty object", "a long number")


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", representative_slow(["deep", "a list", "empty"], 1))
@pytest.mark.parametrize("name", RUN_FILES)
def test_damaged_file_of_earlier_run_does_not_prevent_resume(
    name: str, kind: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A finished run is recognized as finished, or resumed from an intact checkpoint, also with more steps."""
    damage(name, kind)
    assert run_or_report_error(["train", "run.yaml", "max_steps=4"], capsys, name) == 0
    assert run_or_report_error(["train", "run.yaml", "max_steps=5"], capsys, name) == 0
    json.loads(Path("out/all_results.json").read_text(encoding="utf-8"))


@pytest.mark.sample(10)
@pytest.mark.parametrize("kind", DAMAGE)
@pytest.mark.parametrize("name", ADAPTER_FILES)
def test_damaged_adapter_file_is_rejected_or_harmless(
    name: str, kind: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(name, kind)
    argv = ["train", "run.yaml", "max_steps=1", "output_dir=new", "finetuning_type=lora"]
    assert run_or_report_error([*argv, "adapter_name_or_path=adapter"], capsys, name) == 2


@pytest.mark.parametrize("command", ["explain", "chat"])
def test_unknown_tokenizer_component_is_rejected(command: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The library raises a plain ``Exception``."""
    file = Path("model/tokenizer.json")
    file.write_text(file.read_text(encoding="utf-8").replace('"ByteLevel"', '"BytLevel"'), encoding="utf-8")
    argv = {"explain": ["run.yaml", "output_dir=new"], "chat": ["model", "template=chatml", "--once", "Hello"]}
    assert run_or_report_error([command, *argv[command]], capsys, "model") == 2


WRONG_VALUES: dict[str, list[dict[str, Any]]] = {
    "adapter/adapter_config.json": [
        {"lora_alpha": "16"}, {"r": 2.5}, {"r": 0}, {"r": -1}, {"target_modules": 3}, {"lora_dropout": "a"},
        {"lora_dropout": 1}, {"lora_alpha": float("nan")}, {"rank_pattern": []}, {"rank_pattern": 0},
        {"alpha_pattern": {"*.q_proj": 4}}, {"init_lora_weights": [1]}, {"alpha_pattern": {"q_proj": "x"}},
        {"modules_to_save": {"a": 1}}, {"peft_type": ["LORA"]}, {"use_rslora": "yes"}, {"base_model_name_or_path": 3},
    ],
    "model/config.json": [
        {"hidden_act": "sulu"}, {"hidden_act": 3}, {"dtype": "float99"}, {"dtype": 16},
        {"layer_types": ["full_attention"]}, {"layer_types": 3}, {"hidden_size": "x"}, {"num_hidden_layers": -1},
        {"num_attention_heads": 0}, {"vocab_size": 1.5}, {"rope_parameters": 7}, {"rms_norm_eps": "small"},
        {"model_type": 5}, {"model_type": None}, {"architectures": 3}, {"auto_map": 3}, {"quantization_config": 3},
        {"quantization_config": {"quant_method": "alchemy"}}, {"eos_token_id": "x"}, {"max_position_embeddings": "x"},
        {"pad_token_id": 10**9}, {"tie_word_embeddings": "maybe"}, {"attention_dropout": 3.0},
    ],
    "model/generation_config.json": [{"eos_token_id": "x"}, {"do_sample": 3}, {"temperature": "hot"}],
    "model/tokenizer_config.json": [
        {"tokenizer_class": "NoSuchTokenizer"}, {"eos_token": 3}, {"chat_template": 3}, {"model_max_length": "x"},
        {"added_tokens_decoder": {"x": {}}}, {"tokenizer_class": 3}, {"chat_template": "{% for %}"},
    ],
}  # fmt: skip


@pytest.mark.sample(20)
@pytest.mark.parametrize(
    ("name", "values"), [(name, values) for name, cases in WRONG_VALUES.items() for values in cases], ids=str
)
def test_value_of_another_type_is_rejected_or_harmless(
    name: str, values: dict[str, Any], here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    raw = json.loads(Path(name).read_text(encoding="utf-8"))
    Path(name).write_text(json.dumps({**raw, **values}), encoding="utf-8")
    argv = ["explain", "run.yaml", "max_steps=1", "output_dir=new", "finetuning_type=lora"]
    is_adapter = name.startswith("adapter")
    run_or_report_error([*argv, *(["adapter_name_or_path=adapter"] if is_adapter else [])], capsys, name)


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_truncated_or_corrupted_table_is_rejected_or_read(
    suffix: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.table({"instruction": ["Say red."] * 40, "output": ["red"] * 40})
    path = Path("data", f"rows.{suffix}")
    if suffix == "parquet":
        pyarrow.parquet.write_table(table, path)
    else:
        with pyarrow.ipc.new_stream(path, table.schema) as writer:
            writer.write_table(table)
    whole = path.read_bytes()
    draws = random.Random(0)
    argv = ["explain", "run.yaml", f"dataset={path}", "output_dir=new"]
    for _ in range(12):
        content = bytearray(whole[: draws.randrange(len(whole))] if draws.random() < 0.3 else whole)
        for _ in range(3):
            if content:
                content[draws.randrange(len(content))] ^= 1 << draws.randrange(8)
        path.write_bytes(content)
        assert cli.main(argv) in (0, 2)
        read_output(capsys)
    path.write_bytes(whole[: len(whole) // 2])
    assert run_or_report_error(argv, capsys, str(path)) == 2


def test_adapter_with_nan_is_rejected_before_training(tmp_path, capsys):
    options = make_workspace(tmp_path, max_steps=1, save_strategy="no", finetuning_type="lora")
    assert main(["train", *as_arguments(options)]) == 0
    file = tmp_path / "out" / "adapter_model.safetensors"
    weights = load_file(file)
    name = next(iter(weights))
    weights[name][0, 0] = float("nan")
    save_file(weights, file, metadata={"format": "pt"})
    more = {"adapter_name_or_path": str(tmp_path / "out"), "output_dir": str(tmp_path / "two")}
    assert main(["train", *as_arguments({**options, **more})]) == 2
    output = " ".join(capsys.readouterr().err.split())
    assert f"{tmp_path / 'out'}: 1 of the adapter's weights contain NaN or infinity: " in output
    assert not list((tmp_path / "two").glob("*.safetensors"))


OBSTACLES: dict[str, Any] = {
    "a link to itself": lambda path: os.symlink(path.name, path), "a folder": Path.mkdir, "a pipe": os.mkfifo,
}  # fmt: skip


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", OBSTACLES)
@pytest.mark.parametrize(
    "name",
    ["out/trainer_state.json", "out/all_results.json", "out/model.safetensors", "out/tokenizer.json", "out/.lock",
     "rows", "out/checkpoint-4/optimizer.safetensors"],
)  # fmt: skip
def test_obstacle_in_place_of_a_run_file_is_reported(
    name: str, kind: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = next((here / "cache" / "rows").glob("*/rows.arrow")) if name == "rows" else here / name
    result.unlink(missing_ok=True)
    OBSTACLES[kind](result)
    faulthandler.dump_traceback_later(60, exit=True, file=sys.__stderr__)
    try:
        status = cli.main(["train", "run.yaml", "max_steps=6"])
    finally:
        faulthandler.cancel_dump_traceback_later()
    _, err = read_output(capsys)
    assert "Raised in" not in err
    if status:
        is_odd = "instead of a file: " in err and "Writing to it would block forever." in err
        assert is_odd or ("cannot be written or read: " in err and "move it, then run the same command" in err)
        remove(result)
        assert cli.main(["train", "run.yaml", "max_steps=6"]) == 0
    else:
        assert "error: " not in err


def test_circular_link_among_run_files_is_handled_on_overwrite(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("out/train_results.json").unlink()
    os.symlink("train_results.json", "out/train_results.json")
    assert cli.main(["train", "run.yaml", "max_steps=2", "overwrite_output_dir=true"]) == 0
    assert Path("out/train_results.json").is_file()


@pytest.mark.parametrize(
    ("name", "raw"),
    [("model/value_head.bin", b"words"), ("model/value_head.bin", b""), ("model/value_head.safetensors", b"\x10"),
     ("model/model.safetensors", None), ("model/model.safetensors.index.json", b"[]"),
     ("model/model.safetensors.index.json", b'{"weight_map": 3}'), ("model/tokenizer_config.json", b'["a"]')],
)  # fmt: skip
def test_damaged_head_or_model_is_reported_on_export(
    name: str, raw: bytes | None, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path(name).write_bytes(Path(name).read_bytes()[:-40] if raw is None else raw)
    assert cli.main(["export", "model_name_or_path=model", "export_dir=whole", "template=chatml"]) == 2
    assert name in read_output(capsys)[1]
