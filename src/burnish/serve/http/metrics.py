"""Metrics of the server in Prometheus format.

Format: https://prometheus.io/docs/instrumenting/exposition_formats/#text-based-format
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from burnish.inference.types import EngineFacts

FIRST_TOKEN = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
PER_TOKEN = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1)
REQUEST = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class Histogram:
    """A histogram of durations in seconds, with given upper bounds of the buckets."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds, self.counts, self.sum_s = bounds, [0] * (len(bounds) + 1), 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(self.bounds, seconds)] += 1
        self.sum_s += seconds

    def lines(self, name: str) -> Iterable[str]:
        total = 0
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            total += count
            yield f'{name}_bucket{{le="{"+Inf" if bound == float("inf") else f"{bound:g}"}"}} {total}'
        yield f"{name}_sum {self.sum_s:.6f}"
        yield f"{name}_count {total}"


class ServerMetrics:
    """Metrics of a server since its start."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, int]] = Counter()
        self.first_token, self.per_token, self.request = map(Histogram, (FIRST_TOKEN, PER_TOKEN, REQUEST))

    def text(self, facts: EngineFacts | None, is_ready: bool) -> str:
        """Return all metrics as text."""
        lines = ["# TYPE burnish_requests_total counter"]
        for (route, status), count in sorted(self.requests.items()):
            lines.append(f'burnish_requests_total{{route="{route}",status="{status}"}} {count}')
        for name, histogram in (
            ("first_token", self.first_token), ("token", self.per_token), ("request", self.request),
        ):  # fmt: skip
            lines.append(f"# TYPE burnish_{name}_seconds histogram")
            lines += histogram.lines(f"burnish_{name}_seconds")
        lines += ["# TYPE burnish_ready gauge", f"burnish_ready {int(is_ready)}"]
        if facts is not None:
            lines += _engine_lines(facts)
        return "\n".join(lines) + "\n"


def _engine_lines(facts: EngineFacts) -> list[str]:
    counters: Mapping[str, int] = {
        "prompt_tokens_total": facts.prompt_tokens,
        "cached_prompt_tokens_total": facts.cached_prompt_tokens,
        "completion_tokens_total": facts.new_tokens,
    }
    gauges: Mapping[str, int] = {"asks_running": facts.running, "asks_waiting": facts.waiting}
    lines = []
    for kind, values in (("counter", counters), ("gauge", gauges)):
        for name, value in values.items():
            lines += [f"# TYPE burnish_{name} {kind}", f"burnish_{name} {value}"]
    lines.append("# TYPE burnish_memory_bytes gauge")
    return [*lines, *(f'burnish_memory_bytes{{kind="{kind}"}} {size}' for kind, size in facts.memory_bytes.items())]
