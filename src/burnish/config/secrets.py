"""Replace tokens, keys and passwords in everything that is printed, logged or served.

``without_secrets`` replaces in any text:

- values of options declared with ``is_secret``, and of environment variables with a secret's name, once they are read;
- whatever follows a secret's name (``hub_token: ...``, ``WANDB_API_KEY=...``), before any option is read;
- texts with the shape of a known kind of token (``hf_...``, ``sk-...``, ``ghp_...``);
- passwords and keys in addresses.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

MASK = "<secret>"
MIN_SECRET_LENGTH = 6
"""Shorter values would match ordinary words."""
_SECRET_NAME = re.compile(r"(^|_)(TOKEN|KEY|APIKEY|ACCESSKEY|SECRET|PASSWORD|PASSWD|PASSPHRASE)$", re.IGNORECASE)
_IN_ADDRESSES = re.compile(
    r"(?<=://)(?P<name>[^/\s:@]*:)[^/\s@]+(?=@)"
    r"|(?<=://)[\w.~-]{16,}(?=@)"
    r"|(?P<parameter>[?&#](?:[\w%-]+(?:[_-]|%5f|%2d))?(?:token|(?:api|access)?key|secret|password|passwd|pwd|sig|signature"
    r"|credential|auth|jwt)=)[^/\s@&#\"']+"
    r"|(?P<hook>(?:hooks\.slack\.com/services|discord(?:app)?\.com/api/webhooks)/)[\w/-]+",
    re.IGNORECASE,
)
"""The password of a URL (https://name:password@host), a token in its place, parameters with a secret's name, and the
path of a webhook."""
_SHAPES: tuple[tuple[str, str], ...] = (
    ("hf_", r"(?:(?=[a-z0-9]{0,40}[A-Z])[A-Za-z0-9]{10,}|[A-Za-z0-9]{30,})"),
    ("api_org_", r"[A-Za-z0-9]{20,}"),
    ("sk-", r"(?=[\w-]{0,100}\d)[\w-]{20,}"),
    ("gh", r"[pousr]_[A-Za-z0-9]{20,}"),
    ("github_pat_", r"\w{20,}"),
    ("gl", r"(?:pat|ptt|dt|rt|cbt|ft|imt|agent|oas|soat|ffct)-[\w-]{16,}"),
    ("AKIA", r"[A-Z0-9]{16}"),
    ("ASIA", r"[A-Z0-9]{16}"),
    ("xox", r"[a-z]-[\w-]{10,}"),
    ("xapp-", r"[\w-]{10,}"),
    ("AIza", r"[\w-]{35}"),
    ("ya29.", r"[\w-]{20,}"),
    ("npm_", r"[A-Za-z0-9]{36}"),
    ("pypi-", r"[\w-]{50,}"),
    ("eyJ", r"[\w-]{10,}\.[\w-]{10,}\.[\w-]{5,}"),
    ("r8_", r"[A-Za-z0-9]{30,}"),
    ("gsk_", r"[A-Za-z0-9]{30,}"),
    ("nvapi-", r"[\w-]{30,}"),
    ("wandb_v1_", r"\w{20,}"),
    ("ms-", r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"),
    ("sk_live_", r"[A-Za-z0-9]{16,}"),
    ("rk_live_", r"[A-Za-z0-9]{16,}"),
)
"""Prefixes of tokens, and patterns for the rest. Sources: the issuers' documentation; GitHub's list of secret patterns.
"""
_BEFORE_SHAPE = (
    r"(?:(?<![A-Za-z0-9])|(?<=\\[nrt])|(?<=%[0-9A-Fa-f]{2})|(?<=\\u[0-9A-Fa-f]{4})|(?<=\\x[0-9A-Fa-f]{2})"
    r"|(?<=\[\dm)|(?<=\[\d\dm)|(?<=;\dm)|(?<=;\d\dm)|(?<=;\d{3}m))"
)
"""No letter or digit, unless it ends an escape sequence: ``\\n``, ``%20``, ``\\u001b``, a color of a terminal."""
_TOKEN = re.compile(rf"{_BEFORE_SHAPE}(?:{'|'.join(re.escape(begin) + rest for begin, rest in _SHAPES)})")
_SCHEME = re.compile(
    r"(?:\b|(?<=\\[nrt]))(Bearer +|(?:Proxy-)?Authorization[\"']?: *[\"']?(?:\w+ +)?|(?:Set-)?Cookie[\"']?: *[\"']?)"
    r"(?=\S{8})[^\n\"']+",
    re.IGNORECASE,
)
_PRIVATE_KEY = re.compile(r"(-----BEGIN [A-Z ]*PRIVATE KEY-----).*?(?=-----END |\Z)", re.DOTALL)
_SECRET_WORDS = ("token", "key", "secret", "password", "passwd", "passphrase")
_AFTER_NAME = re.compile(
    rf"""(?P<word>{"|".join(_SECRET_WORDS)})"""
    r"""
    # hub_token: ..., ["hub_token"] = ..., --hub_token ...; in JSON, quotation marks of a text follow a backslash
    (?P<between>(?:\\*["'])?\]?(?:[ \t]*[:=][ \t]*|[ ](?=\S)|,[ ]*)
        (?:[|>][+-]?[ \t]*)?(?:\r?\n[ \t]*-[ \t]+|\r?\n[ \t]+)?)  # a value on the next line
    (?P<value>"{3}[^"]*(?:"{3})?|\\+"[^"\\\n]*(?:\\+")?|"[^"\n]*"?|'[^'\n]*'?|\[[^\]\n]*\]?|\{[^}\n]*\}?|[^\s,}\]"'][^\n,}\]"']*)""",
    re.VERBOSE | re.IGNORECASE,
)
_TOKEN_PREFIXES_WITHOUT_SECRET = frozenset(
    {"pad", "eos", "bos", "unk", "sep", "cls", "mask", "image", "video", "audio", "stop", "special"}
)
"""Words before "token" that name a token of a tokenizer, such as ``pad_token``."""
_KEY_PREFIXES_WITHOUT_SECRET = frozenset(
    ["column", "dict", "foreign", "group", "json", "object", "partition", "primary", "public", "record", "row", "sort"]
)
"""Words before "key" that name a key of a table, such as ``sort_key``."""
_SECRET_NAME_PREFIXES = frozenset({"api", "access", "account", "sharedaccess", "auth", "refresh", "session"})
"""Words directly before "key" or "token" in a secret's name, such as ``apikey``."""
_RANDOM_VALUE = re.compile(r"""["']?(?=\D*\d)(?=[^a-z]*[a-z])(?=[^A-Z]*[A-Z])[A-Za-z0-9_-]{16,}["']?\s*""")
_EMPTY_VALUE = re.compile(r"""["'\[{]*\s*(?:none|null|true|false|~|<.*|\d{0,5})?\s*["'\]}]*""", re.IGNORECASE)
_known_secrets: set[str] = set()


@lru_cache(4096)
def has_secret_name(name: str) -> bool:
    """Whether ``name`` is the name of a secret: ``hub_token``, ``WANDB_API_KEY``, ``swanlab_lark_secret``."""
    *_, before, last = ("", *re.split("[_-]", name.lower()))
    return bool(_SECRET_NAME.search(name)) and not _names_no_secret(before, last)


def _names_no_secret(before: str, word: str) -> bool:
    """Whether ``before_word`` names a token of a tokenizer or a key of a table."""
    return before in {"token": _TOKEN_PREFIXES_WITHOUT_SECRET, "key": _KEY_PREFIXES_WITHOUT_SECRET}.get(word, ())


def keep_secret(value: Any) -> None:
    """Register ``value``, and each text in it, as a secret that ``without_secrets`` replaces."""
    if isinstance(value, str) and len(value) >= MIN_SECRET_LENGTH:
        _known_secrets.add(value)
    for part in value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ():
        keep_secret(part)


def without_secrets(text: str) -> str:
    """Return ``text`` with all secrets replaced."""
    return _mask_secrets(text, _secrets())


def _secrets() -> list[str]:
    """Registered secrets and those in environment variables, the longest first."""
    named = {value for name, value in os.environ.items() if has_secret_name(name) and len(value) >= MIN_SECRET_LENGTH}
    return sorted(_known_secrets | named, key=len, reverse=True)


def _mask_secrets(text: str, secrets: list[str]) -> str:
    for secret in secrets:
        text = text.replace(secret, MASK)
    if "://" in text:
        text = _IN_ADDRESSES.sub(rf"\g<name>\g<parameter>\g<hook>{MASK}", text)
    lower = text.lower()  # a substring search is fast, and most texts contain no secret
    if any(word in lower for word in _SECRET_WORDS):
        text = _AFTER_NAME.sub(_mask_match, _mask_private_keys(text))
    if any(begin in text for begin, _ in _SHAPES):
        text = _TOKEN.sub(MASK, text)
    if "-----begin " in lower:
        text = _PRIVATE_KEY.sub(rf"\g<1>{MASK}", text)
    has_header = any(word in lower for word in ("bearer", "authorization", "cookie"))
    return _SCHEME.sub(rf"\g<1>{MASK}", text) if has_header else text


_KEY = re.compile(
    r"""^(?P<indent>[ ]*)(?P<item>(?:-[ ]+)*)(?P<ask>\?[ ]+)?["']?(?P<name>[\w-]+)["']?[ \t]*
    (?(ask)$|:[ \t]*(?:[|>][+-]?\d?)?[ \t]*(?:\#.*)?$)""",
    re.VERBOSE,
)
"""A line of YAML with a key whose value is on the following lines: ``name:``, ``name: >-``, ``? name``."""
_KEY_WITH_VALUE = re.compile(
    r"""^(?P<indent> *)(?P<item>(?:- +)*)(?P<ask>\? +)?["']?(?P<name>[\w-]+)["']?[ \t]*(?:$|:)"""
)
"""A line of YAML with a key, whose value may begin on the same line and continue on the following ones."""


def mask_continued_values(text: str) -> str:
    """Return YAML in which lines that continue the value of a secret are replaced. For a single line to be shown."""
    return _mask_private_keys(text, _KEY_WITH_VALUE)


def _mask_private_keys(text: str, key: re.Pattern[str] = _KEY) -> str:
    """Return YAML with the values of secrets on the lines below their names replaced, except for the first such line,
    which ``_AFTER_NAME`` finds."""
    if "\n" not in text:
        return text
    lines, inside, is_asked = text.split("\n"), -1, False
    for number, line in enumerate(lines):
        if inside >= 0 and line.strip():
            indent = len(line) - len(line.lstrip(" "))
            is_value = indent > inside or (indent == inside and line.lstrip().startswith(":" if is_asked else "- "))
            if is_value and not line.lstrip().startswith("#"):
                lines[number] = f"{line[:indent]}{': ' if is_asked and indent == inside else ''}{MASK}"
                continue
            inside = inside if is_value else -1
        found = key.match(line.rstrip("\r"))
        if found and has_secret_name(found["name"]):
            inside, is_asked = len(found["indent"]) + len(found["item"]), bool(found["ask"])
    return "\n".join(lines)


def _mask_match(match: re.Match[str]) -> str:
    """The name, with the value after it replaced if the name is a secret's."""
    before = re.search(r"[A-Za-z0-9_-]*$", match.string[max(0, match.start() - 40) : match.start()])
    words = re.sub("(?<=[a-z0-9])(?=[A-Z])", "_", before[0].lstrip("-")) if before else ""  # wandbApiKey
    parts = re.split("[_-]", words.lower())
    is_plain = (
        match["word"].lower() in ("token", "key") and len(parts) < 2 and not _SECRET_NAME_PREFIXES.intersection(parts)
    )
    is_plain = is_plain and not (parts == [""] and _RANDOM_VALUE.fullmatch(match["value"]))
    is_plain = is_plain or (len(parts) > 1 and _names_no_secret(parts[-2], match["word"].lower()))
    if is_plain or _EMPTY_VALUE.fullmatch(match["value"]):
        return match[0]
    if not re.search("[:=]", match["between"]) and not (before and before[0].startswith("--")):
        return match[0]  # "the hub_token of ...", a list of names
    return f"{match['word']}{match['between']}{MASK}"


def mask_json(value: Any) -> Any:
    """A copy of a JSON value in which texts are masked, keys included, and values under a secret's name are replaced
    completely."""
    return _masked_value(value, _secrets())


def mask_json_without_environment(value: Any) -> Any:
    """``mask_json`` for values that are compared later, also by a process with other environment variables: only
    secrets that are recognized by their name or shape are replaced."""
    return _masked_value(value, [])


def _masked_value(value: Any, secrets: list[str]) -> Any:
    if isinstance(value, str):
        return _mask_secrets(value, secrets)
    if isinstance(value, Mapping):
        return {
            _masked_value(key, secrets): MASK if _holds_secret(key, item, secrets) else _masked_value(item, secrets)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        are_numbers = {*map(type, value)} <= {int, float, type(None)}
        return (
            value
            if are_numbers
            else [
                MASK
                if before and _is_flag_of_secret(before) and isinstance(item, str)
                else _masked_value(item, secrets)
                for before, item in zip(("", *value), value, strict=False)
            ]
        )
    return value


def _holds_secret(key: Any, value: Any, secrets: list[str]) -> bool:
    """Whether a text, or any text in a list or an object, is masked after the name ``key``."""
    if not _may_name_secret(str(key)):
        return False
    if isinstance(value, Mapping):
        return any(_holds_secret(key, item, secrets) for item in value.values())
    if isinstance(value, list | tuple):
        return any(_holds_secret(key, item, secrets) for item in value)
    if not isinstance(value, str) or value == "":
        return False
    return _mask_secrets(f"{key}: {json.dumps(value)}", secrets).endswith((MASK, f'{MASK}"'))


def _is_flag_of_secret(word: Any) -> bool:
    """Whether an item of a command line is an option whose value, the next item, is a secret."""
    return isinstance(word, str) and word.startswith("--") and has_secret_name(word[2:])


@lru_cache(4096)
def _may_name_secret(key: str) -> bool:
    """Whether a key contains a word after which a value is masked."""
    return any(word in key.lower() for word in (*_SECRET_WORDS, "bearer", "authorization", "cookie"))


class SecretFormatter(logging.Formatter):
    """Formats log records, including tracebacks, without secrets."""

    def format(self, record: logging.LogRecord) -> str:
        return without_secrets(super().format(record))
