"""Optimizers: a file per family. Importing the package registers them all; a library is imported when one is made."""

from burnish.optim import (
    adafactor,
    adam_mini,
    badam,
    bnb,
    builtin,
    grokadamw,
    low_bit,
    low_rank,
    muon,
    refused,
    schedule_free,
    stable_adamw,
)

__all__ = [
    "adafactor", "adam_mini", "badam", "bnb", "builtin", "grokadamw", "low_bit", "low_rank", "muon", "refused",
    "schedule_free", "stable_adamw",
]  # fmt: skip
