"""Inputs that would never end or exhaust memory (YAML aliases, looping templates, pipes and devices, circular links)
are rejected within seconds, with a message.
"""

import faulthandler
import io
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import burnish
from bad_inputs import OPTIONS, change, files, read_output, write
from burnish import cli
from burnish.data.tokens.encoder import Encoder
from representative import representative
from template_cases import byte_tokenizer

MODEL = str(Path(burnish.__file__).parent / "demo" / "model")
RUN = "".join(f"{name}: {value}\n" for name, value in OPTIONS.items())


def run_error(capsys: pytest.CaptureFixture[str], *argv: str, command: str = "train") -> str:
    capsys.readouterr()
    assert cli.main([command, "run.yaml", *argv]) == 2
    return read_output(capsys)[1]


DEEP = "[" * 3000 + "]" * 3000
YAML_ALIASES = "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 11))
YAML_MERGES = "b0: &b0 {x: 1}\n" + "".join(
    f"b{n}: &b{n}\n  <<: [{', '.join([f'*b{n - 1}'] * 10)}]\n" for n in range(1, 11)
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param(f"{RUN}columns: {DEEP}\n", "nested too deeply", marks=pytest.mark.run),
        (RUN + YAML_ALIASES, "expands to more than 100,000 values"),
        (RUN + YAML_MERGES, "expands to more than 100,000 values"),
    ],
    ids=["deep", "aliases", "merges"],
)
def test_excessive_yaml_aliases_are_rejected(
    text: str, message: str, user_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("run.yaml").write_text(text, encoding="utf-8")
    assert message in run_error(capsys)


@pytest.mark.parametrize("name", ["run.yaml", "run.json"])
def test_file_too_large_for_options_is_rejected_without_reading_it(
    name: str, user_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Path(name).open("wb") as file:
        file.truncate(2**40)
    assert cli.main(["train", name]) == 2
    err = read_output(capsys)[1]
    assert "expected a file with options, of at most 1,048,576 bytes" in err
    assert f"dataset={name}" in err


def test_deeply_nested_json_is_rejected(user_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("run.json").write_text('{"a": ' + DEEP * 40 + "}", encoding="utf-8")
    assert cli.main(["train", "run.json"]) == 2
    assert "run.json" in read_output(capsys)[1]


@pytest.mark.parametrize(
    "text", representative(["user: " + DEEP, YAML_ALIASES], {YAML_ALIASES}), ids=["deep", "aliases"]
)
def test_template_file_with_excessive_yaml_aliases_is_rejected(
    text: str, user_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("mine.yaml").write_text(text, encoding="utf-8")
    assert "mine.yaml" in run_error(capsys, "template=mine.yaml")


LOOPS = "{% for m in messages %}{{ m['role'] + m['content'] }}{% endfor %}" + "{% for a in range(99999) %}" * 3
LOOPS += "{% endfor %}" * 3


def test_chat_template_with_nested_loops_is_stopped(
    user_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("loops.jinja").write_text(LOOPS, encoding="utf-8")
    monkeypatch.setattr("burnish.data.chat.rendering._workers.limit_s", 0.5)
    assert "the chat template took more than 0.5 s" in run_error(capsys, "template=loops.jinja")


@pytest.mark.sample(2)
@pytest.mark.parametrize("term", ["'a' * 99999999999", "2 ** 99999999", "99999999999 * 'a'", "'a' * 9999999 * 9999999"])
def test_chat_template_that_exhausts_memory_is_stopped(
    term: str, user_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("burnish.data.chat.rendering._workers.limit_s", 1)
    text = (
        "{% for m in messages %}{{ m['role'] + m['content'] }}{% endfor %}{% generation %}{% endgeneration %}{{ TERM }}"
    )
    Path("large.jinja").write_text(text.replace("TERM", term), encoding="utf-8")
    err = run_error(capsys, "template=large.jinja")
    assert "chat template" in err
    assert "per_device_train_batch_size" not in err


def test_terminal_chat_and_page_stop_looping_chat_template(
    user_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The template loops only for typed messages, so the model is loaded."""
    from burnish.serve.page.planner_process import planner

    monkeypatch.setattr("burnish.data.chat.rendering._workers.limit_s", 0.5)
    text = LOOPS.replace("{% for a", "{% if 'loop' in messages[0]['content'] %}{% for a", 1) + "{% endif %}"
    Path("loops.jinja").write_text(text, encoding="utf-8")
    assert cli.main(["chat", MODEL, "template=loops.jinja", "--once", "loop"]) == 2
    assert "the chat template took more than 0.5 s" in read_output(capsys)[1]
    Path("loops.jinja").write_text(LOOPS, encoding="utf-8")
    values = {"model_name_or_path": MODEL, "dataset": "rows", "output_dir": "out", "template": "loops.jinja"}
    requested, answered = io.StringIO(json.dumps({"id": 1, "values": values}) + "\n"), io.StringIO()
    monkeypatch.setattr("burnish.serve.page.planner_process.SERVED_RENDERING_S", 0.3)
    planner(requested, answered)
    assert "the chat template took more than 0.3 s" in answered.getvalue()


ODD: dict[str, Any] = {
    "a pipe": lambda path: os.mkfifo(path), "a device": lambda path: os.symlink("/dev/zero", path),
    "itself": lambda path: os.symlink(path.name, path), "nothing": lambda path: os.symlink("nowhere", path),
    "a folder of links": lambda path: (path.mkdir(), os.symlink("../x", path / "a.json")),
}  # fmt: skip


@pytest.mark.sample(10)
@pytest.mark.parametrize("name", ["data/odd.jsonl", "data/odd.csv", "data/odd.txt", "data/odd.parquet"])
@pytest.mark.parametrize("kind", ODD)
def test_special_data_files_are_rejected(
    kind: str, name: str, user_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ODD[kind](Path(name))
    assert "odd" in run_error(capsys, f"dataset={name}")
    change("data/dataset_info.json", odd={"file_name": Path(name).name})
    assert "odd" in run_error(capsys, "dataset=odd")


@pytest.mark.sample(8)
@pytest.mark.parametrize("kind", ["a pipe", "a device", "itself", "nothing"])
@pytest.mark.parametrize(
    ("name", "argv"),
    [("odd.yaml", None), ("data/dataset_info.json", []), ("odd.jinja", ["template=odd.jinja"]),
     ("model/config.json", []), ("model/tokenizer.json", []), ("odd.json", ["deepspeed=odd.json"]),
     ("odd.json", ["fsdp=full_shard", "fsdp_config=odd.json"]), ("odd.yaml", ["new_special_tokens_config=odd.yaml"]),
     ("out/launch.json", [])],
)  # fmt: skip
def test_special_files_are_rejected(
    kind: str, name: str, argv: list[str] | None, user_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path(name).unlink(missing_ok=True)
    Path(name).parent.mkdir(exist_ok=True)
    ODD[kind](Path(name))
    faulthandler.dump_traceback_later(60, exit=True, file=sys.__stderr__)
    try:
        status = cli.main(["explain", name if argv is None else "run.yaml", *(argv or [])])
    finally:
        faulthandler.cancel_dump_traceback_later()
    is_link_out = name == "out/launch.json" and kind in ("itself", "nothing")  # only a file may replace it
    assert status == (0 if is_link_out else 2)
    assert "Raised in" not in read_output(capsys)[1]


# --- large records ----------------------------------------------------------------------------------------------------


def endless(place: str, size: int) -> str:
    return (
        f"{place}: expected a record of at most 600 characters. Received: {size}.\n"
        "  Split it into several records, for example by chapters or paragraphs.\n"
    )


@pytest.mark.run
@pytest.mark.parametrize(
    "argv", [[], ["streaming=true"], ["preprocessing_num_workers=2"], ["template=chatml"]], ids=str
)
def test_oversized_record_is_rejected_with_file_and_record(
    argv: list[str], user_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("burnish.data.length.LONGEST_RECORD", 600)
    rows = [{"instruction": "a" * 100, "output": "b " * size} for size in (250, 251, 20, 400)]
    write("data/rows.json", rows)
    err = run_error(capsys, *argv)
    assert endless("data/rows.json, record 2", 602) in err
    assert argv == ["streaming=true"] or endless("data/rows.json, record 4", 900) in err
    assert "record 1:" not in err
    assert not Path("out").exists()
    write("data/rows.json", rows[:1] * 4)  # just within the limit
    assert cli.main(["train", "run.yaml", "max_steps=1", *argv]) == 0


@pytest.mark.parametrize(
    ("stage", "record"),
    [("pt", {"text": "x " * 301}),
     ("dpo", {"instruction": "a", "chosen": "b" * 300, "rejected": "c" * 300}),
     ("sft", {"instruction": "a", "output": "b", "history": [["c" * 300, "d" * 300]]})],
)  # fmt: skip
def test_record_size_limit_counts_all_texts(
    stage: str, record: dict[str, Any], user_folder: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr("burnish.data.length.LONGEST_RECORD", 600)
    write("data/rows.json", [record])
    columns = {"prompt": "text"} if stage == "pt" else {}
    info: dict[str, Any] = {"file_name": "rows.json", **({"columns": columns} if columns else {})}
    if stage == "dpo":
        info |= {"ranking": True, "columns": {"prompt": "instruction", "chosen": "chosen", "rejected": "rejected"}}
    elif stage == "sft":
        info["columns"] = {"prompt": "instruction", "response": "output", "history": "history"}
    change("data/dataset_info.json", rows=info)
    assert endless("data/rows.json, record 1", 602 if stage != "dpo" else 601) in run_error(capsys, f"stage={stage}")


@pytest.mark.slow
def test_record_processing_time_is_linear_in_length() -> None:
    """With a quadratic tokenizer, four times the text would take 16 times as long; the limit in between leaves room for
    a busy machine."""
    encoder = Encoder(byte_tokenizer())
    for text in ("a", "word ", "\u4e00", "\n"):
        times = []
        for size in (500_000, 2_000_000):
            started = time.process_time()
            encoder.encode([text * (size // len(text))])
            times.append(time.process_time() - started)
        assert times[1] < 9 * times[0], (text, times)


# --- links ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["nowhere", "out"])
@pytest.mark.parametrize("output", ["out", "out/deeper"])
def test_output_dir_that_is_a_dangling_link_is_rejected(
    target: str, output: str, user_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.symlink(target, "out")
    err = run_error(capsys, f"output_dir={output}")
    assert f'output_dir "{output}" cannot be created' in err
    assert "links to" in err


@pytest.mark.run
def test_linked_checkpoints_are_read_and_only_links_are_removed(user_folder: Path) -> None:
    assert cli.main(["train", "run.yaml", "max_steps=4"]) == 0
    Path("out/checkpoint-4").rename("elsewhere")
    os.symlink("../elsewhere", "out/checkpoint-4")
    os.symlink("../elsewhere", "out/.incomplete-checkpoint-6")
    os.symlink("nowhere", "out/checkpoint-6")
    before = files(Path("elsewhere"))
    assert cli.main(["train", "run.yaml", "max_steps=8", "save_total_limit=1"]) == 0
    assert sorted(path.name for path in Path("out").glob("*checkpoint-*")) == ["checkpoint-8"]
    assert cli.main(["train", "run.yaml", "max_steps=2", "overwrite_output_dir=true"]) == 0
    assert files(Path("elsewhere")) == before


# --- values and messages ----------------------------------------------------------------------------------------------


def test_nul_character_in_a_value_is_rejected(user_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("model_name_or_path", "dataset", "output_dir", "template"):
        assert f'"{name}" must be' in run_error(capsys, f"{name}=a\0b")


def test_non_text_value_is_rejected(user_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("model_name_or_path", "dataset", "output_dir", "template"):
        assert f'"{name}" must be' in run_error(capsys, f"{name}=a\udce6\udca8b")


@pytest.mark.run
def test_tilde_is_expanded_in_every_folder_option(
    user_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(user_folder / "home"))
    assert cli.main(["train", "run.yaml", "max_steps=1", "output_dir=~/out"]) == 0
    argv = ["export", "model_name_or_path=~/out", "template=chatml", "export_dir=~/whole"]
    assert cli.main(argv) == 0
    assert not Path("~").exists()
    assert Path("home/whole/model.safetensors").is_file()
    assert cli.main(["runs", "~"]) == 0


@pytest.mark.parametrize("name", ["~nobodyknown/model", "--", "x--y/z", "\u0663-"])
def test_invalid_folder_or_repository_name_is_rejected(
    name: str, user_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in (["explain", "run.yaml"], ["export", "export_dir=whole", "template=chatml"]):
        assert cli.main([*command, f"model_name_or_path={name}"]) == 2
        assert name in read_output(capsys)[1]
    for folder in (name, "x" * 300):
        assert cli.main(["runs", f"./{folder}" if name[0] == "-" else folder]) == 2
        assert "does not exist" in read_output(capsys)[1]


def test_csv_without_header_does_not_print_its_first_record(
    user_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("data/rows.csv").write_text(f"{'red ' * 400},{'green ' * 400}\nblue,stone\n", encoding="utf-8")
    err = run_error(capsys, "dataset=data/rows.csv")
    assert len(err) < 900


def test_cutoff_len_is_suggested_only_for_truncated_examples(
    user_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chat = [("human", "a"), ("gpt", "b"), ("human", "c")]
    write("data/rows.json", [{"conversations": [{"from": role, "value": text} for role, text in chat]}])
    err = run_error(capsys)
    assert "no examples are left to train on" in err
    assert "cutoff_len" not in err


def test_dataset_without_usable_records_stops_run_by_name(
    user_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = [{"instruction": f"say {n}", "output": str(n)} for n in range(4)]
    write("data/good.json", good)
    write("data/empty.json", [{**record, "output": ""} for record in good])
    options = ("dataset=data/good.json,data/empty.json", "on_empty_target=drop")
    assert "empty: no examples are usable.\n  Dropped: all responses are empty (4 of 4)." in run_error(capsys, *options)
    write("data/empty.json", [*good[:1], {**good[1], "output": ""}])
    assert cli.main(["explain", "run.yaml", *options]) == 0


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_unwritable_tokenized_path_error_does_not_mention_the_cache(
    user_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("kept").mkdir(mode=0o500)
    err = run_error(capsys, "tokenized_path=kept")
    assert "tokenized_path" in err
    assert "BURNISH_CACHE" not in err


def test_tokenized_path_inside_a_file_does_not_mention_the_cache(
    user_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    err = run_error(capsys, "tokenized_path=run.yaml/rows")
    assert "BURNISH_CACHE" not in err


@pytest.mark.slow
def test_plot_in_folder_with_chinese_name_gives_no_warning(user_folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "burnish", "train", "run.yaml", "output_dir=模型", "max_steps=2", "plot_loss=true"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0
    assert "Warning" not in done.stderr
    assert "Glyph" not in done.stderr
    assert Path("模型/training_loss.png").is_file()


@pytest.mark.run
def test_too_many_trainable_layers_are_reported(user_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["finetuning_type=freeze", "freeze_trainable_layers=100", "max_steps=1"]
    assert cli.main(["train", "run.yaml", *argv]) == 0
    assert "freeze_trainable_layers is 100, but the model has 2 layers: all are trained." in read_output(capsys)[0]
