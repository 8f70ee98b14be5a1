"""The form in Chinese: every option, title, unit and reason is translated."""

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
    """An option (a name with an underscore) in the English help is also in the Chinese help."""
    known, names = option_words("zh")["options"], {str(field["name"]) for field in fields}
    for field in fields:
        named = {word for word in re.findall(r"[a-z0-9]+(?:_[a-z0-9]+)+", str(field["help"])) if word in names}
        assert named <= set(re.findall(r"[a-z0-9]+(?:_[a-z0-9]+)+", known[field["name"]]["help"])), field["name"]


def test_english_help_is_unchanged_and_first_fields_have_labels_and_short_help(fields) -> None:
    for field, one in zip(fields, in_language(fields, "en"), strict=True):
        assert {**one, **field} == one
    by_name = {language: {one["name"]: one for one in in_language(fields, language)} for language in ("en", "zh")}
    assert set(option_words("en")["short"]) == set(option_words("zh")["short"]) <= set(option_words("en")["labels"])
    assert set(option_words("en")["labels"]) <= set(by_name["en"])
    assert (by_name["en"]["lora_rank"]["label"], by_name["zh"]["lora_rank"]["label"]) == ("LoRA rank", "LoRA 秩")
    assert by_name["zh"]["lora_rank"]["help"] == "LoRA 的秩。"
