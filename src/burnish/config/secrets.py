"""Tokens, keys and passwords: known here once they are given, so that none is ever printed or written.

An option that holds one is declared with ``is_secret`` (``config/options.py``); its value is kept out of what is
shown by name. ``without_secrets`` is the second line of defence: every text passes it on its way to a terminal, a log
or a traceback. The values of secret options and of environment variables with a secret's name are masked in it.
"""

from __future__ import annotations

import os
import re
from typing import Any

BLOTTED = "<secret>"
SHORTEST = 6
"""A shorter value would be found in ordinary words; who has one has no secret."""
_NAMES = re.compile(r"(^|_)(TOKEN|KEY|APIKEY|ACCESSKEY|SECRET|PASSWORD|PASSWD|PASSPHRASE)$", re.IGNORECASE)
_IN_ADDRESSES = re.compile(
    r"(?<=://)(?P<name>[^/\s:@]*:)[^/\s@]+(?=@)"
    r"|(?P<parameter>[?&#](?:\w+_)?(?:token|key|apikey|secret|password)=)[^/\s@&#\"']+"
)
"""The password of an address (https://name:password@host), and a parameter that is called a secret."""
_given: set[str] = set()


def has_secret_name(name: str) -> bool:
    """Return whether ``name`` is that of a secret: ``hub_token``, ``WANDB_API_KEY``, ``swanlab_lark_secret``."""
    return bool(_NAMES.search(name))


def keep_secret(value: Any) -> None:
    """Remember ``value`` as a secret; ``without_secrets`` replaces it in every text from now on."""
    if isinstance(value, str) and len(value) >= SHORTEST:
        _given.add(value)


def without_secrets(text: str) -> str:
    """Return ``text`` with each secret in it replaced, and those that stand in addresses."""
    named = {value for name, value in os.environ.items() if has_secret_name(name) and len(value) >= SHORTEST}
    for secret in sorted(_given | named, key=len, reverse=True):
        text = text.replace(secret, BLOTTED)
    return _IN_ADDRESSES.sub(rf"\g<name>\g<parameter>{BLOTTED}", text) if "://" in text else text
