"""Translations of the web UI, one file per language, and the selection of the language."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path

FOLDER = Path(__file__).parent / "words"
LANGUAGES = ("en", "zh")


@cache
def page_words(language: str) -> Mapping[str, str]:
    found: dict[str, str] = json.loads((FOLDER / f"{language}.json").read_text(encoding="utf-8"))
    return found


def translator(language: str) -> Callable[..., str]:
    """``t("step_of", step=3, total=10)``"""
    words = page_words(language)

    def t(key: str, **values: object) -> str:
        text = words[key]
        for name, value in values.items():
            text = text.replace("{" + name + "}", str(value))
        return text

    return t


def language_of(cookie: str, accepted: str) -> str:
    """The language of the cookie, else the first supported one in the Accept-Language header."""
    if cookie in LANGUAGES:
        return cookie
    for part in accepted.lower().split(","):
        name = part.split(";")[0].strip()[:2]
        if name in LANGUAGES:
            return name
    return LANGUAGES[0]
