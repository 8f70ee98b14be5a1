"""Translations of the web UI, one file per language, and the selection of the language."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from starlette.requests import Request

FOLDER = Path(__file__).parent / "words"
LANGUAGES = ("en", "zh")


@cache
def page_words(language: str) -> Mapping[str, str]:
    """All texts of the pages. Scripts load the first part on every page, those of the form, of runs and of the chat
    where they are needed, and never those of templates (``page``): a first visit is to transfer little."""
    files = [FOLDER / f"{part}{language}.json" for part in ("", "new.", "run.", "chat.", "page.")]
    return {key: text for file in files for key, text in json.loads(file.read_text(encoding="utf-8")).items()}


@cache
def option_words(language: str) -> Mapping[str, Mapping[str, Any]]:
    """Translations for the options: labels and the short help of the main fields; in a language other than English also
    help, group titles, units and reasons."""
    found: dict[str, dict[str, Any]] = json.loads((FOLDER / f"options.{language}.json").read_text(encoding="utf-8"))
    return {part: found.get(part, {}) for part in ("groups", "units", "reasons", "options", "labels", "short")}


def in_language(fields: Iterable[Mapping[str, Any]], language: str) -> list[dict[str, Any]]:
    """Fields of a form with their label and short help, and with the translated help, unit and reasons."""
    texts = option_words(language)
    parts = (("unit", texts["units"]), ("ignored", texts["reasons"]), ("risky", texts["reasons"]))
    single = (("label", texts["labels"]), ("short", texts["short"]))
    return [
        {
            **field,
            **texts["options"].get(field["name"], {}),
            **{part: known[field["name"]] for part, known in single if field["name"] in known},
            **{part: known.get(field[part], field[part]) for part, known in parts},
        }
        for field in fields
    ]


def translator(language: str) -> Callable[..., str]:
    """``t("step_of", step=3, total=10)``"""
    texts = page_words(language)

    def t(key: str, **values: object) -> str:
        filled = {f"{{{name}}}": str(value) for name, value in values.items()}
        return re.sub(r"\{\w+\}", lambda part: filled.get(part[0], part[0]), texts[key])

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


def requested_language(request: Request) -> str:
    """The language that a request's cookie or header asks for."""
    return language_of(request.cookies.get("language", ""), request.headers.get("accept-language", ""))
