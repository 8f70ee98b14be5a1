"""Speed and remaining time of a run, measured from the step at which this process started or resumed."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta


class Pace:
    """Measures tokens per second and remaining time.

    Args:
        clock: returns the time in seconds; replaced in tests.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.start(step=0, tokens=0)

    def start(self, step: int, tokens: int) -> None:
        """Start measuring, after ``step`` steps and ``tokens`` tokens."""
        self._started_s, self._first_step, self._first_tokens = self._clock(), step, tokens
        self._interval_s, self._interval_tokens, self._step_s = self._started_s, tokens, self._started_s

    @property
    def elapsed_s(self) -> float:
        return self._clock() - self._started_s

    def remaining_s(self, step: int, max_steps: int) -> float | None:
        """Return the remaining seconds at the mean step time so far, including evaluations and saves, or None."""
        done = step - self._first_step
        return None if done <= 0 else (max_steps - step) * self.elapsed_s / done

    def tokens_per_second(self, tokens: int) -> float:
        """Return the mean rate since ``start``, including evaluations and saves. ``tokens`` is the total so far."""
        return (tokens - self._first_tokens) / max(self.elapsed_s, 1e-9)

    # An interval lies between two logs. Evaluations and saves are excluded, so that its rate is that of training;
    # loading batches and generating completions are included.

    def begin_interval(self, tokens: int) -> None:
        self._interval_s = self._step_s = self._clock()
        self._interval_tokens = tokens

    def end_step(self) -> None:
        self._step_s = self._clock()

    def leave_out(self) -> None:
        """Exclude the time since the last step, or since the last call of this method, from the interval."""
        now_s = self._clock()
        self._interval_s += now_s - self._step_s
        self._step_s = now_s

    @property
    def interval_s(self) -> float:
        """Seconds since the interval began, without those left out."""
        return self._clock() - self._interval_s

    def interval_rate(self, tokens: int) -> float:
        """Return the tokens per second since the interval began."""
        return (tokens - self._interval_tokens) / max(self.interval_s, 1e-9)


def clock_time(seconds: float) -> str:
    """Format a duration as ``0:01:23``, as LLaMA-Factory does in ``trainer_log.jsonl``."""
    return str(timedelta(seconds=int(seconds)))


def short_time(seconds: float) -> str:
    """Format a duration as ``1:23``, ``2:01:23`` or ``3 d 4 h``, as short as possible."""
    whole = max(0, int(seconds))
    days, hours, minutes = whole // 86400, whole // 3600, whole // 60
    if days:
        return f"{days} d {hours % 24} h"
    return f"{hours}:{minutes % 60:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"


def format_count(number: float, noun: str, nouns: str = "") -> str:
    """Format a count: ``1 step``, ``1,200 steps``, ``0.5 epochs``. ``nouns`` is an irregular plural."""
    label = noun if number == 1 else nouns or f"{noun}s"
    return f"{number:,} {label}" if isinstance(number, int) else f"{number:g} {label}"


def short_number(value: float) -> str:
    """Format a number with three digits: ``873``, ``12.3k``, ``4.56M``."""
    for limit, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= 0.9995 * limit:
            scaled = value / limit
            return f"{scaled:.{2 if scaled < 9.995 else 1 if scaled < 99.95 else 0}f}{unit}"
    return f"{value:.0f}" if value >= 10 or value == int(value) else f"{value:.1f}"


ROUNDING = 1e-7
"""Smaller losses are rounding errors: the loss of GRPO is a sum of advantages that cancel each other."""


def short_loss(value: float) -> str:
    """Format a loss as ``1.2346``, or as ``1.23e-05`` if it is very small. Rounding errors of 0 are ``0.0000``."""
    if abs(value) < ROUNDING:
        return f"{0:.4f}"
    return f"{value:.4f}" if abs(value) >= 0.001 else f"{value:.2e}"
