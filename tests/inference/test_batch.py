"""Batched generation returns responses in the order of the prompts."""

import pytest
from generation_runs import generate_alone, make_scheduler, model_of, prompts

from burnish.inference.batch import generate_all
from burnish.inference.types import GenerationRequest


def test_responses_are_in_the_order_of_the_requests() -> None:
    model, requested, done = model_of("llama"), prompts(12), []
    requests = [GenerationRequest(ids, 2 + at * 3 % 11) for at, ids in enumerate(requested)]
    result = generate_all(make_scheduler(model, 3), requests, lambda at, _: done.append(at))
    assert [each.ids for each in result] == [
        generate_alone(model, request.ids, request.max_new_tokens) for request in requests
    ]
    assert sorted(done) == list(range(12))
    assert done != sorted(done)


def test_stop_token_is_not_part_of_the_response() -> None:
    model = model_of("llama")
    ids = prompts()[0]
    whole = generate_alone(model, ids, 12)
    (result,) = generate_all(make_scheduler(model), [GenerationRequest(ids, 12, stop_ids=frozenset({whole[4]}))])
    assert result.ids == whole[: whole.index(whole[4])]
    assert result.reason == "stop"


def test_failure_raises_instead_of_returning_an_empty_response(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = make_scheduler(model_of("llama"))

    def short(first, rows):
        raise MemoryError

    monkeypatch.setattr(loop.backend, "run", short)
    with pytest.raises(RuntimeError, match="Not enough memory for this step"):
        generate_all(loop, [GenerationRequest([5], 4)])
