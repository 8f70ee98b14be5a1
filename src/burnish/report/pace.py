"""Speed of a run and the time that is left. Both count from the step at which this process started or resumed."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta


class Pace:
    """Tokens per second and time left. Args: clock: a function that returns seconds; another one in tests."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.start(step=0, tokens=0)

    def start(self, step: int, tokens: int) -> None:
        """Count from here: ``step`` steps and ``tokens`` tokens were done before."""
        self._started_s, self._first_step, self._first_tokens = self._clock(), step, tokens
        self._stretch_s, self._stretch_tokens, self._step_s = self._started_s, tokens, self._started_s

    @property
    def elapsed_s(self) -> float:
        return self._clock() - self._started_s

    def remaining_s(self, step: int, max_steps: int) -> float | None:
        """Seconds left, at the mean time of the steps so far, evaluations and saves included; None before the first."""
        done = step - self._first_step
        return None if done <= 0 else (max_steps - step) * self.elapsed_s / done

    def tokens_per_second(self, tokens: int) -> float:
        """Mean rate since ``start``, evaluations and saves included. Args: tokens: seen so far in the run."""
        return (tokens - self._first_tokens) / max(self.elapsed_s, 1e-9)

    # A stretch goes from a first step to the next log. The evaluations and saves in it are left out, so that its rate
    # is that of training.

    def begin_stretch(self, tokens: int) -> None:
        self._stretch_s = self._step_s = self._clock()
        self._stretch_tokens = tokens

    def end_step(self) -> None:
        self._step_s = self._clock()

    def leave_out(self) -> None:
        """Leave the time since the last step, or since the last such call, out: it was not spent on training."""
        now_s = self._clock()
        self._stretch_s += now_s - self._step_s
        self._step_s = now_s

    def stretch_rate(self, tokens: int) -> float:
        """Tokens per second since the stretch began, that is since the last log."""
        return (tokens - self._stretch_tokens) / max(self._clock() - self._stretch_s, 1e-9)


def clock_time(seconds: float) -> str:
    """``0:01:23``, as LLaMA-Factory writes a duration into ``trainer_log.jsonl``."""
    return str(timedelta(seconds=int(seconds)))


def short_time(seconds: float) -> str:
    """``1:23`` or ``2:01:23`` or ``3 d 4 h``: as long as it has to be."""
    whole = max(0, int(seconds))
    days, hours, minutes = whole // 86400, whole // 3600, whole // 60
    if days:
        return f"{days} d {hours % 24} h"
    return f"{hours}:{minutes % 60:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"


def counted(number: float, noun: str, nouns: str = "") -> str:
    """``1 step``, ``1,200 steps``, ``0.5 epochs``; ``nouns`` is the plural where it is not made with an s."""
    words = noun if number == 1 else nouns or f"{noun}s"
    return f"{number:,} {words}" if isinstance(number, int) else f"{number:g} {words}"


def short_number(value: float) -> str:
    """``873``, ``12.3k``, ``4.56M``: three digits, for what changes while it is read."""
    for limit, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= 0.9995 * limit:
            scaled = value / limit
            return f"{scaled:.{2 if scaled < 9.995 else 1 if scaled < 99.95 else 0}f}{unit}"
    return f"{value:.0f}" if value >= 10 or value == int(value) else f"{value:.1f}"


def short_loss(value: float) -> str:
    """``1.2346``, and ``1.23e-05`` where that would show nothing."""
    return f"{value:.4f}" if abs(value) >= 0.001 or value == 0 else f"{value:.2e}"
