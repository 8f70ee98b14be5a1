"""Check before the first step that all processes have the same configuration.

Compared are the options, the content of files, and versions. If a process differs from rank 0, the run stops with an
error that shows both values. Otherwise it would train on with mixed gradients.
"""

from __future__ import annotations

import hashlib
import json
import platform
import socket
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from burnish.config.errors import Problem, UserError
from burnish.config.options import specs
from burnish.loop.protocols import Parallel
from burnish.run.plan.options import RunOptions
from burnish.run.plan.plan import Plan

_SHOWN = 5


def raise_unless_ranks_agree(plan: Plan, fingerprints: Mapping[str, Any], num_rows: int, parallel: Parallel) -> None:
    """Compare this process with rank 0. All processes must call this.

    Raises:
        UserError: in every process, with the differences of each rank.
    """
    if parallel.world_size == 1:
        return
    own_state = {
        **_options(plan.options), **fingerprints, "rows": num_rows, "python": platform.python_version(),
        "torch": torch.__version__,
    }  # fmt: skip
    everyone: list[tuple[str, dict[str, Any]]] = parallel.gather_objects(
        (socket.gethostname(), _json_values(own_state))
    )
    problems = [
        _problem(rank, host, differences)
        for rank, (host, other) in enumerate(everyone)
        if (differences := list(_differences(everyone[0][1], other)))
    ]
    if problems:
        raise UserError(problems[:_SHOWN])


def _options(options: RunOptions) -> dict[str, Any]:
    """Return every option; secrets as hashes."""
    values = {}
    for name, spec in specs(RunOptions).items():
        value = getattr(options, name)
        values[name] = hashlib.sha256(str(value).encode()).hexdigest() if spec.is_secret and value else value
    return values


def _json_values(values: Mapping[str, Any]) -> dict[str, Any]:
    plain: dict[str, Any] = json.loads(json.dumps(dict(values), default=str))
    return plain


def _differences(first: Mapping[str, Any], other: Mapping[str, Any]) -> Sequence[str]:
    secrets = {name for name, spec in specs(RunOptions).items() if spec.is_secret}
    return [
        f"{name} differs"
        if name in secrets
        else f"{name} is {_shortened_json(other.get(name))} instead of {_shortened_json(value)}"
        for name, value in first.items()
        if other.get(name) != value
    ]


def _problem(rank: int, host: str, differences: Sequence[str]) -> Problem:
    more = f"; and {len(differences) - _SHOWN} more" if len(differences) > _SHOWN else ""
    return Problem(
        f"rank {rank} on {host} has a different configuration than rank 0: {'; '.join(differences[:_SHOWN])}{more}.",
        remedy="Use the same command, files and versions in all processes.",
    )


def _shortened_json(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
