"""Option values and their sources: YAML, JSON and the command line, and the messages for malformed ones."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from burnish.config.conversion import as_type
from burnish.config.errors import UserError
from burnish.config.options import RawValue
from burnish.run.plan.config_files import merge, read_arguments, read_config, split_arguments


def config(tmp_path: Path, text: str, name: str = "run.yaml") -> Path:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return path


def values(raw_values: dict[str, RawValue]) -> dict[str, object]:
    return {key: item.value for key, item in raw_values.items()}


def load_error(path: Path) -> str:
    with pytest.raises(UserError) as raised:
        read_config(path)
    message = str(raised.value)
    assert len(message.splitlines()) <= 4 * len(raised.value.problems)
    return message


def test_each_value_has_its_line_number(tmp_path: Path) -> None:
    path = config(tmp_path, "# a comment\nstage: sft\n\nlearning_rate: 1e-4  # peak\n")
    assert read_config(path) == {
        "stage": RawValue("sft", f"{path}, line 2"),
        "learning_rate": RawValue("1e-4", f"{path}, line 4"),
    }


def test_scalars_keep_their_source_text(tmp_path: Path) -> None:
    path = config(tmp_path, "eval_strategy: no\nmodel_revision: 1.10\nlearning_rate: 5e-5\nsystem: '  two spaces  '\n")
    assert values(read_config(path)) == {
        "eval_strategy": "no",
        "model_revision": "1.10",
        "learning_rate": "5e-5",
        "system": "  two spaces  ",
    }


def test_null_is_none_and_empty_text_stays_text(tmp_path: Path) -> None:
    path = config(tmp_path, 'eval_dataset:\ntokenized_path: null\ndefault_system: ""\n')
    assert values(read_config(path)) == {"eval_dataset": None, "tokenized_path": None, "default_system": ""}


def test_number_in_a_mapping_is_parsed_as_number(tmp_path: Path) -> None:
    path = config(
        tmp_path, "lr_scheduler_kwargs: {min_lr: 1e-6, cycles: 2, name: on, off: null}\nlora_target: [q, v]\n"
    )
    assert values(read_config(path)) == {
        "lr_scheduler_kwargs": {"min_lr": 1e-6, "cycles": 2, "name": "on", "off": None},
        "lora_target": ["q", "v"],
    }


ERROR = "refused"
"""Numbers in YAML: their value in LLaMA-Factory's loader (OmegaConf 2.4 on PyYAML), in an integer option, in a numeric
option, and in a list or mapping. Each value equals the loader's or is an error, unless the loader returns a string."""
NUMBERS = {
    "10": (10, 10, 10, 10), "+5": (5, 5, 5, 5), "007": (7, 7, 7, 7), "00": (0, 0, 0, 0),
    "010": (8, ERROR, ERROR, ERROR), "-010": (-8, ERROR, ERROR, ERROR),
    "0_10": (8, ERROR, ERROR, ERROR), "08": ("08", 8, 8, 8), "010.5": (10.5, ERROR, 10.5, 10.5),
    "0o10": ("0o10", ERROR, ERROR, ERROR), "0O10": ("0O10", ERROR, ERROR, "0O10"),
    "0x10": (16, ERROR, ERROR, 16), "-0x1F": (-31, ERROR, ERROR, -31), "0x_1": (1, ERROR, ERROR, ERROR),
    "0b10": (2, ERROR, ERROR, ERROR), "1_000": (1000, 1000, 1000, ERROR),
    "1_0.5": (10.5, ERROR, 10.5, ERROR), "1_0e3": (10000.0, 10000, 10000.0, ERROR),
    "1__0": (10, ERROR, ERROR, ERROR), "1_": (1, ERROR, ERROR, ERROR), "_1": ("_1", ERROR, ERROR, "_1"),
    "12:30:45": (45045, ERROR, ERROR, ERROR), "1:30": (90, ERROR, ERROR, ERROR),
    "1:60": ("1:60", ERROR, ERROR, "1:60"), "190:20:30.15": (685230.15, ERROR, ERROR, ERROR),
    "1e3": (1000.0, 1000, 1000.0, 1000.0), "1E+3": (1000.0, 1000, 1000.0, 1000.0),
    "1e-5": (1e-5, ERROR, 1e-5, 1e-5), "1.0e-4": (1e-4, ERROR, 1e-4, 1e-4), ".5": (0.5, ERROR, 0.5, 0.5),
    "5.": (5.0, 5, 5.0, 5.0), "-.inf": (-math.inf, ERROR, -math.inf, -math.inf),
    "2024-01-01": ("2024-01-01", ERROR, ERROR, "2024-01-01"), "0x_": ("0x_", ERROR, ERROR, "0x_"),
}  # fmt: skip


def value_or_error(read: Callable[[], Any]) -> Any:
    try:
        return read()
    except ValueError:  # the base class of UserError
        return ERROR


@pytest.mark.parametrize("spelling", NUMBERS)
def test_number_has_the_value_of_llamafactory_or_is_refused(spelling: str, tmp_path: Path) -> None:
    loaded, integer, number, nested = NUMBERS[spelling]
    text = read_config(config(tmp_path, f"seed: {spelling}\n"))["seed"].value
    assert value_or_error(lambda: as_type(int, text)) == integer
    assert value_or_error(lambda: as_type(float | None, text)) == number
    assert value_or_error(lambda: as_type(list[int], text)) == (integer if integer == ERROR else [integer])
    for container, expected in (("[{}]", [nested]), ("{{x: {}}}", {"x": nested}), ("{{x: [{}]}}", {"x": [nested]})):
        path = config(tmp_path, f"lr_scheduler_kwargs: {container.format(spelling)}\n")
        result = value_or_error(lambda path=path: read_config(path)["lr_scheduler_kwargs"].value)
        assert result == (ERROR if nested == ERROR else expected)
    assert all(value in (ERROR, loaded) or isinstance(loaded, str) for value in (integer, number, nested))


def test_ambiguous_number_is_reported_with_its_readings(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"must be a number without leading zeros. Received: '010' \(YAML 1.1 reads"):
        as_type(int | None, "010")
    path = config(tmp_path, "lr_scheduler_kwargs:\n  a: 010\n  b: [12:30]\n  c: '010'\n")
    message = load_error(path)
    assert (
        "line 2: expected a decimal number, or text in quotes. Received: 010, which can be read as 8 or 10." in message
    )
    assert 'Write 8 or 10, or "010" for text.' in message
    assert "line 3: " in message
    assert "line 4" not in message


def test_numbers_of_a_json_file_are_json(tmp_path: Path) -> None:
    path = config(tmp_path, '{"lr_scheduler_kwargs": {"a": "010", "b": 1e3}}', "run.json")
    assert values(read_config(path)) == {"lr_scheduler_kwargs": {"a": "010", "b": 1000.0}}


def test_explicit_keys_override_merged_base(tmp_path: Path) -> None:
    path = config(tmp_path, "x: &base {seed: 1, stage: pt}\n<<: *base\nseed: 2\n")
    assert values(read_config(path))["seed"] == "2"
    assert values(read_config(path))["stage"] == "pt"


def test_json_file_is_read_with_line_numbers(tmp_path: Path) -> None:
    path = config(tmp_path, '{\n\t"stage": "sft",\n\t"packing": true,\n\t"s": "\\ud83d\\ude00"\n}\n', "run.json")
    assert read_config(path) == {
        "stage": RawValue("sft", f"{path}, line 2"),
        "packing": RawValue(True, f"{path}, line 3"),
        "s": RawValue("\U0001f600", f"{path}, line 4"),
    }


def test_byte_order_mark_is_accepted(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_bytes(b"\xef\xbb\xbfstage: sft\n")
    assert values(read_config(path)) == {"stage": "sft"}


def test_missing_file_suggests_nearest_name(tmp_path: Path) -> None:
    config(tmp_path, "stage: sft", "first_run.yaml")
    message = load_error(tmp_path / "frist_run.yaml")
    assert 'Did you mean "first_run.yaml"?' in message
    assert len(message.splitlines()) == 1


def test_missing_file_without_similar_name_lists_existing_files(tmp_path: Path) -> None:
    config(tmp_path, "stage: sft", "other.yaml")
    assert "contains other.yaml" in load_error(tmp_path / "zzzzzzzzzz.json")
    assert "does not exist either" in load_error(tmp_path / "nowhere" / "run.yaml")
    assert "is a folder" in load_error(tmp_path)


def test_tab_is_reported_with_a_caret(tmp_path: Path) -> None:
    lines = load_error(config(tmp_path, "stage: sft\n\tdo_train: true\n")).splitlines()
    assert lines[0].startswith(f"{tmp_path}/run.yaml:2:1: ")
    assert "tab" in lines[0]
    assert lines[1].index("→") == lines[2].index("^")


def test_syntax_error_is_reported_with_a_caret(tmp_path: Path) -> None:
    lines = load_error(config(tmp_path, "stage: sft\nsystem: a: b\n")).splitlines()
    assert lines[0].startswith(f"{tmp_path}/run.yaml:2:10: ")
    assert lines[1][lines[2].index("^")] == ":"


@pytest.mark.parametrize(
    ("line", "place", "expected"),
    [
        ("learning_rate 1e-4", "2:1", 'expected ": " between the key and its value'),
        ("learning_rate:1e-4", "2:1", 'expected ": " between the key and its value'),
        ('optim: "adamw', "2:8", "this quotation mark is never closed"),
        ("lora_target: [q_proj", "2:1", "expected ',' or ']'"),
    ],
)
def test_yaml_error_is_reported_at_its_cause(tmp_path: Path, line: str, place: str, expected: str) -> None:
    message = load_error(config(tmp_path, f"seed: 1\n{line}\n"))
    assert f"run.yaml:{place}: " in message
    assert expected in message
    assert line in message


def test_invalid_json_is_reported_with_a_caret(tmp_path: Path) -> None:
    lines = load_error(config(tmp_path, '{"stage": "sft",\n "seed": 1,}\n', "run.json")).splitlines()
    assert ":2:" in lines[0]
    assert lines[2].strip() == "^"


@pytest.mark.parametrize("text", ["", "# nothing but a comment\n", "---\n"])
def test_empty_file_is_rejected(tmp_path: Path, text: str) -> None:
    assert "empty" in load_error(config(tmp_path, text))


def test_list_is_not_a_configuration(tmp_path: Path) -> None:
    assert "a list" in load_error(config(tmp_path, "- stage\n- sft\n"))


def test_duplicate_key_is_rejected_with_both_lines(tmp_path: Path) -> None:
    message = load_error(config(tmp_path, "seed: 1\nstage: sft\nseed: 2\nstage: pt\n"))
    assert 'line 3: duplicate key "seed". It is already set in' in message
    assert "line 1" in message
    assert 'duplicate key "stage"' in message


@pytest.mark.parametrize("name", ["run.yaml", "run.json"])
def test_duplicate_key_in_a_nested_value_is_rejected(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text('{"seed": 1,\n "lr_scheduler_kwargs": {"num_cycles": 1,\n "num_cycles": 2}}')
    assert 'line 3: duplicate key "num_cycles". It is already set in' in load_error(path)


@pytest.mark.parametrize(
    ("first", "second"), [("0x1", "1"), ("1", '"1"'), ("+1", "1"), ("1.50", "1.5"), ("true", "True"), ("~", "null")]
)
def test_keys_with_equal_values_are_duplicates(first: str, second: str, tmp_path: Path) -> None:
    message = load_error(config(tmp_path, f"model_init_kwargs:\n  {first}: a\n  {second}: b\n"))
    assert f'line 3: duplicate key "{second.strip(chr(34))}"' in message


def test_keys_that_are_not_text_are_written_as_in_json(tmp_path: Path) -> None:
    text = "lr_scheduler_kwargs: {0x10: a, '0x11': b, True: c, 1.50: d, no: e, 1e-5: f}\n"
    found = read_config(config(tmp_path, text))["lr_scheduler_kwargs"].value
    assert found == {"16": "a", "0x11": "b", "true": "c", "1.5": "d", "no": "e", "1e-05": "f"}


@pytest.mark.parametrize("key", ["010", "1_000", "0o10", "12:30"])
def test_numbers_with_several_readings_are_no_keys(key: str, tmp_path: Path) -> None:
    message = load_error(config(tmp_path, f"lr_scheduler_kwargs: {{{key}: a}}\n"))
    assert f"expected a decimal number, or text in quotes. Received: {key}, which can be read as" in message


@pytest.mark.parametrize(
    ("name", "text"),
    [("run.yaml", "{}"), ("run.yaml", "{}.0"), ("run.yaml", "0x{}"), ("run.json", "{}")],
)
def test_numbers_with_thousands_of_digits_are_rejected(name: str, text: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text('{"lr_scheduler_kwargs": {"num_cycles": ' + text.format("1" * 5000) + "}}")
    assert "of at most 1,000 digits" in load_error(path)


def test_first_base_with_a_key_takes_precedence(tmp_path: Path) -> None:
    text = "a: &a {seed: 3, stage: pt}\nb: &b {seed: 4, template: qwen}\nstage: sft\n<<: [*a, *b]\n"
    options = read_config(config(tmp_path, text))
    assert {name: options[name].value for name in ("seed", "stage", "template")} == {
        "seed": "3", "stage": "sft", "template": "qwen",
    }  # fmt: skip


def test_merge_keys_are_resolved_in_nested_values_and_bases(tmp_path: Path) -> None:
    text = "a: &a {min_lr: 1e-5, power: 2}\nb: &b {<<: *a, power: 3}\nlr_scheduler_kwargs:\n  <<: *b\n  lr_end: 0\n"
    options = read_config(config(tmp_path, f"{text}<<: {{<<: {{seed: 4}}, stage: pt}}\n"))
    assert options["lr_scheduler_kwargs"].value == {"lr_end": 0, "power": 3, "min_lr": 1e-5}
    assert options["seed"].value == "4"
    assert "<<" not in options


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x: &a\n  y: *a\n", "line 1: an alias (*) refers to"),
        ("? [a, b]\n: 3\n", "line 1: expected a key to be a string"),
        ("stage: sft\n<<: 3\n", "line 2: expected an alias"),
    ],
)
def test_yaml_that_is_not_a_configuration_is_rejected(text: str, message: str, tmp_path: Path) -> None:
    assert message in load_error(config(tmp_path, text))


def test_latin_1_bytes_are_reported_by_position(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_bytes(b"system: caf\xe9\n")
    assert "byte 11 (0xe9) is not UTF-8" in load_error(path)


def test_every_flag_syntax_is_parsed() -> None:
    argv = "run.yaml seed=1 --learning_rate 1e-4 --packing --stage=sft --lora-rank 8 --max_steps -1"
    path, flags = split_arguments(argv.split())
    assert path == Path("run.yaml")
    assert values(flags) == {
        "seed": "1",
        "learning_rate": "1e-4",
        "packing": "true",
        "stage": "sft",
        "lora_rank": "8",
        "max_steps": "-1",
    }
    assert {item.where for item in flags.values()} == {"the command line"}


def test_values_keep_spaces_and_equal_signs() -> None:
    _, flags = split_arguments(["--system", "You are  a = b.", "note= x=y "])
    assert values(flags) == {"system": "You are  a = b.", "note": " x=y "}


def test_several_values_of_one_flag_become_a_list() -> None:
    path, flags = split_arguments(["--report_to", "wandb", "tensorboard", "seed=3", "run.yaml"])
    assert values(flags) == {"report_to": ["wandb", "tensorboard"], "seed": "3"}
    assert path == Path("run.yaml")


def test_value_without_preceding_option_is_rejected() -> None:
    with pytest.raises(UserError, match='Unexpected arguments on the command line: "sft"'):
        split_arguments(["run.yaml", "sft"])
    with pytest.raises(UserError, match="one configuration file"):
        split_arguments(["a.yaml", "b.yaml"])


def test_command_line_overrides_file_under_any_alias(tmp_path: Path) -> None:
    path = config(tmp_path, "evaluation_strategy: steps\nseed: 1\n")
    file, flags = read_arguments([str(path), "--eval_strategy", "no"])
    assert merge(file, flags, {"evaluation_strategy": "eval_strategy"}) == {
        "seed": RawValue("1", f"{path}, line 2"),
        "eval_strategy": RawValue("no", f"the command line, overriding {path}, line 1"),
    }


@pytest.mark.parametrize("annotation", [float, float | None, list[float]])
def test_an_integer_beyond_the_range_of_floats_is_a_value_error(annotation: Any) -> None:
    with pytest.raises(ValueError, match="number"):
        as_type(annotation, 10**400)


@pytest.mark.parametrize(("annotation", "opening"), [(list[str], "["), (dict[str, Any], '{"a":')])
def test_json_with_too_deep_a_nesting_is_a_value_error(annotation: Any, opening: str) -> None:
    with pytest.raises(ValueError, match="nests lists and mappings too deeply"):
        as_type(annotation, opening * 100_000)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[rewards.py:exact, think_format_reward, other.py:f]",
         ["conf/rewards.py:exact", "think_format_reward", "other.py:f"]),
        ("rewards.py:exact, here.py:f", "conf/rewards.py:exact, here.py:f"),
        ("[{rewards.py:exact: {power: 2}}]", [{"conf/rewards.py:exact": {"power": 2}}]),
    ],
)  # fmt: skip
def test_files_of_functions_are_looked_up_beside_the_configuration_too(tmp_path, monkeypatch, text, expected):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "conf").mkdir()
    for name in ("conf/rewards.py", "conf/here.py", "here.py"):
        (tmp_path / name).touch()
    config(tmp_path / "conf", f"reward_funcs: {text}\n")
    file, _ = read_arguments(["conf/run.yaml"])
    assert values(file) == {"reward_funcs": expected}
