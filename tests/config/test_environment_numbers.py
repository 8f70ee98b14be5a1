"""Parse environment variables as numbers."""

import os

import pytest

from burnish.utils.environment import count_in, launcher_number, number_in, remove_empty_variables


@pytest.mark.parametrize(("text", "count"), [("4", 4), (" 12 ", 12), ("", 7), ("-1", 7), ("two", 7), ("²", 7)])
def test_integer_is_parsed_or_default_is_used(text, count):
    assert count_in(text, 7) == count


@pytest.mark.parametrize(("text", "number"), [("1e3", 1000.0), ("90", 90.0), ("soon", None), ("", None)])
def test_number_is_parsed_or_none_is_returned(text, number):
    assert number_in(text) == number


def test_empty_variable_of_a_launcher_is_not_set(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", " ")
    monkeypatch.setenv("RANK", "3")
    assert launcher_number("WORLD_SIZE", 1) == 1
    assert launcher_number("RANK", 0) == 3
    remove_empty_variables()
    assert "WORLD_SIZE" not in os.environ
    assert "RANK" in os.environ
    monkeypatch.setenv("LOCAL_RANK", "first")
    with pytest.raises(ValueError, match=r'LOCAL_RANK must be a non-negative integer\. Received: "first"'):
        launcher_number("LOCAL_RANK", 0)


@pytest.mark.parametrize("name", ["WORLD_SIZE", "RANK", "LOCAL_RANK"])
def test_script_and_command_run_with_an_empty_variable(name, monkeypatch, tmp_path, capsys):
    from burnish import TrainingArguments
    from burnish.cli import main

    monkeypatch.setenv(name, "")
    args = TrainingArguments(str(tmp_path))
    assert (args.world_size, args.process_index, args.local_process_index) == (1, 0, 0)
    assert main(["explain", "model_name_or_path=/nowhere", f"output_dir={tmp_path}", "dataset=none"]) == 2
    assert "invalid literal" not in capsys.readouterr().err
