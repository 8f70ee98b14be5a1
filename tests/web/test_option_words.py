"""The form in Chinese: every option has a label and a help text, and so has each title, unit and reason."""

from __future__ import annotations

import re

import pytest

from burnish.serve.page.planner_process import form
from burnish.serve.page.words import in_language, option_words

CHINESE = re.compile(r"[\u4e00-\u9fff]")


@pytest.fixture(scope="module")
def fields() -> list[dict[str, object]]:
    return list(form()["fields"])


def test_every_option_has_a_chinese_label_and_help(fields) -> None:
    known, names = option_words("zh")["options"], {field["name"] for field in fields}
    assert names - set(known) == set(), 'add "label" and "help" to words/options.zh.json'
    assert set(known) - names == set(), "words/options.zh.json translates options that do not exist"
    assert [name for name, one in known.items() if not (one["label"] and CHINESE.search(one["help"]))] == []


def test_groups_units_and_reasons_are_translated(fields) -> None:
    words = option_words("zh")
    assert set(form()["groups"]) - set(words["groups"]) == set()
    assert {field["unit"] for field in fields} - {"", *words["units"]} == set()
    reasons = {field[part] for field in fields for part in ("ignored", "risky") if field[part]}
    assert reasons - set(words["reasons"]) == set()


def test_chinese_help_keeps_option_names_of_english_help(fields) -> None:
    """An option that the English help names, with its underscore, is named in the Chinese help as well."""
    known, names = option_words("zh")["options"], {str(field["name"]) for field in fields}
    for field in fields:
        named = {word for word in re.findall(r"[a-z0-9]+(?:_[a-z0-9]+)+", str(field["help"])) if word in names}
        assert named <= set(re.findall(r"[a-z0-9]+(?:_[a-z0-9]+)+", known[field["name"]]["help"])), field["name"]


def test_english_fields_are_unchanged(fields) -> None:
    assert in_language(fields, "en") == fields
    rank = next(one for one in in_language(fields, "zh") if one["name"] == "lora_rank")
    assert rank["help"] == "LoRA 的秩。"
