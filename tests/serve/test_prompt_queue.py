"""Prompts with slow renderings and large images wait for those of other requests, not the other way round."""

from __future__ import annotations

import threading
from concurrent.futures import CancelledError

import pytest

from burnish.config.bounds import FIRST_RENDERING_S
from burnish.data.chat import rendering
from burnish.serve.api.prompt_queue import DecodingQueue, PromptQueue, SlowRendering
from burnish.serve.http.errors import APIError


@pytest.fixture
def queue():
    created = PromptQueue()
    yield created
    created.shutdown(wait=False, cancel_futures=True)


class Prompts:
    """Prompts whose rendering takes as long as the server allows, and the order in which they are tried."""

    def __init__(self) -> None:
        self.tried: list[str] = []
        self.limits_s: list[float] = []

    def slow(self, name: str) -> str:
        self.tried.append(name)
        self.limits_s.append(rendering._workers.limit_s)
        if rendering._workers.limit_s <= FIRST_RENDERING_S:
            raise SlowRendering(400, "invalid_value", "slow")
        return name

    def quick(self, name: str) -> str:
        self.tried.append(name)
        return name


def test_slow_prompts_are_repeated_after_all_others(queue: PromptQueue) -> None:
    prompts, gate = Prompts(), threading.Event()
    queue.submit(10, gate.wait)
    slow = [queue.submit(10, prompts.slow, name) for name in "abc"]
    quick = queue.submit(10, prompts.quick, "quick")
    gate.set()
    assert quick.result(10) == "quick"
    assert [one.result(10) for one in slow] == ["a", "b", "c"]
    assert prompts.tried == ["a", "b", "c", "quick", "a", "b", "c"]
    first = prompts.limits_s[:3]
    assert first == [FIRST_RENDERING_S, FIRST_RENDERING_S / 2, FIRST_RENDERING_S / 3]  # the others wait less each time
    assert set(prompts.limits_s[3:]) == {rendering._workers.limit_s}


def test_prompt_that_is_too_slow_gets_its_error(queue: PromptQueue) -> None:
    def loop() -> None:
        raise SlowRendering(400, "invalid_value", "slow")

    with pytest.raises(SlowRendering):
        queue.submit(10, loop).result(10)


def test_prompt_that_waits_too_long_is_rejected(queue: PromptQueue) -> None:
    gate = threading.Event()
    queue.submit(10, gate.wait)
    late = queue.submit(0, str)
    gate.set()
    with pytest.raises(APIError) as refused:
        late.result(10)
    assert refused.value.status == 429


def test_images_with_few_pixels_are_decoded_first() -> None:
    images, gate, decoded = DecodingQueue(), threading.Event(), []
    images.submit(10, 5, gate.wait)
    waiting = [images.submit(10, pixels, decoded.append, pixels) for pixels in (300, 2, 300, 1)]
    late = images.submit(0, 400, str)
    gate.set()
    for each in waiting:
        each.result(10)
    assert decoded == [1, 2, 300, 300]
    with pytest.raises(APIError, match="Too many queued"):
        late.result(10)


def test_images_of_a_cancelled_request_are_not_decoded() -> None:
    images, gate, decoded = DecodingQueue(), threading.Event(), []
    images.submit(10, 1, gate.wait)
    cancelled = images.submit(10, 2, decoded.append, "cancelled")
    last = images.submit(10, 3, decoded.append, "last")
    assert cancelled.cancel()
    gate.set()
    last.result(10)
    assert decoded == ["last"]


def test_images_that_wait_at_shutdown_are_cancelled() -> None:
    images, gate, begun = DecodingQueue(), threading.Event(), threading.Event()
    running = images.submit(10, 1, lambda: begun.set() or gate.wait(10))
    waiting = images.submit(10, 1, str)
    begun.wait(10)
    images.shutdown(wait=False, cancel_futures=True)
    gate.set()
    assert running.result(10)
    with pytest.raises(CancelledError):
        waiting.result(10)


def test_prompts_that_wait_at_shutdown_are_cancelled(queue: PromptQueue) -> None:
    prompts, gate, begun = Prompts(), threading.Event(), threading.Event()

    def stopped() -> None:
        begun.set()
        gate.wait()
        raise SlowRendering(400, "invalid_value", "stopped")

    interrupted = queue.submit(10, stopped)
    waiting = queue.submit(10, prompts.quick, "quick")
    begun.wait(10)
    queue.shutdown(wait=False, cancel_futures=True)
    gate.set()
    for each in (interrupted, waiting):
        with pytest.raises(CancelledError):
            each.result(10)
    assert prompts.tried == []
