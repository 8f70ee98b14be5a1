"""The engine's thread: requests from any thread, one delivery per scheduler step, and a shutdown that ends all
requests.
"""

import threading
from collections.abc import Iterator

import pytest
from generation_runs import ResponseCollector, generate_alone, model_of, prompts

from burnish.inference.engine import LocalEngine
from burnish.inference.slots import SlotLimits
from burnish.inference.types import Closed, GenerationRequest

pytestmark = pytest.mark.run


class AwaitableCollector(ResponseCollector):
    """A collector with an event that is set when the request ends."""

    def __init__(self) -> None:
        super().__init__()
        self.ended = threading.Event()

    def __call__(self, output) -> None:
        super().__call__(output)
        if output.reason:
            self.ended.set()


@pytest.fixture(scope="module")
def model():
    return model_of("llama")


@pytest.fixture
def engine(model) -> Iterator[LocalEngine]:
    engine = LocalEngine(model, SlotLimits(4, 64))
    yield engine
    engine.close()


def test_requests_of_several_threads_get_their_own_responses(engine: LocalEngine, model) -> None:
    requested = prompts(8)
    result = [AwaitableCollector() for _ in requested]
    threads = [
        threading.Thread(target=engine.submit, args=(GenerationRequest(ids, 9), answer))
        for ids, answer in zip(requested, result, strict=True)
    ]
    for thread in threads:
        thread.start()
    assert all(answer.ended.wait(20) for answer in result)
    assert [answer.ids for answer in result] == [generate_alone(model, ids, 9) for ids in requested]


def test_tokens_of_one_step_are_delivered_together(model) -> None:
    sizes, reasons, ended = [], [], threading.Event()

    def deliver(outputs) -> None:
        sizes.append(len(outputs))
        for callback, output in outputs:
            callback(output)
        reasons.extend(output.reason for _, output in outputs if output.reason is not None)
        if len(reasons) == 3:
            ended.set()

    engine = LocalEngine(model, SlotLimits(4, 64), deliver=deliver)
    result = [AwaitableCollector() for _ in range(3)]
    for answer in result:
        engine.submit(GenerationRequest([5, 6], 30), answer)
    assert ended.wait(20)
    engine.close()
    assert len(sizes) < sum(len(answer.ids) for answer in result) / 2


def test_closed_engine_cancels_running_requests_and_accepts_no_more(model) -> None:
    engine = LocalEngine(model, SlotLimits(1, 64))
    result = [AwaitableCollector(), AwaitableCollector()]
    for answer in result:
        engine.submit(GenerationRequest([5], 60), answer)
    engine.close()
    assert {answer.reason for answer in result} <= {"cancelled", "length"}
    assert all(answer.reason for answer in result)
    assert not engine.facts().is_alive
    with pytest.raises(Closed):
        engine.submit(GenerationRequest([5], 3), AwaitableCollector())


def test_request_that_is_submitted_while_the_engine_closes_gets_an_end(model, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, answer = LocalEngine(model, SlotLimits(1, 64)), AwaitableCollector()
    closing, submit = threading.Thread(target=engine.close), engine.loop.submit

    def submit_late(*arguments):
        closing.start()
        closing.join(0.5)
        return submit(*arguments)

    monkeypatch.setattr(engine.loop, "submit", submit_late)
    engine.submit(GenerationRequest([5], 20), answer)
    assert answer.ended.wait(10)
    closing.join(10)
    assert not engine.facts().is_alive


def test_drained_engine_finishes_running_requests(model) -> None:
    engine = LocalEngine(model, SlotLimits(2, 64))
    result = [AwaitableCollector(), AwaitableCollector(), AwaitableCollector()]
    for answer in result:
        engine.submit(GenerationRequest([5], 20), answer)
    engine.close(drain_s=20)
    assert [answer.reason for answer in result] == ["length"] * 3


@pytest.mark.parametrize(("error", "named"), [(AssertionError("broken"), "broken"), (KeyError(), "KeyError")])
def test_engine_error_ends_the_thread_and_all_requests(
    engine: LocalEngine, monkeypatch: pytest.MonkeyPatch, error: Exception, named: str
) -> None:
    def broken() -> bool:
        raise error

    result = AwaitableCollector()
    monkeypatch.setattr(engine.loop, "turn", broken)
    try:
        engine.submit(GenerationRequest([5], 20), result)
    except Closed:
        pass
    else:
        assert result.ended.wait(5)
        assert result.reason == "failed"
    engine._thread.join(5)
    assert not engine.facts().is_alive
    with pytest.raises(Closed, match=named):
        engine.submit(GenerationRequest([5], 20), AwaitableCollector())


def test_error_of_the_device_ends_all_requests(engine: LocalEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """After such an error every operation on the device fails, also those that free a slot."""

    def broken(*arguments) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    for name in ("run", "copy_row", "swap_rows"):
        monkeypatch.setattr(engine.loop.backend, name, broken)
    result = [AwaitableCollector() for _ in range(3)]
    for answer in result:
        try:
            engine.submit(GenerationRequest([5], 20), answer)
        except Closed:
            answer.ended.set()
    assert all(answer.ended.wait(5) for answer in result)
