"""Batched generation returns responses in the order of the prompts."""

import pytest
from generation_runs import generate_alone, make_scheduler, model_of, prompts

from burnish.inference.batch import generate_all
from burnish.inference.types import GenerationRequest


def test_responses_are_in_the_order_of_the_requests() -> None:
    model, prompt_ids, finished = model_of("llama"), prompts(12), []
    requests = [GenerationRequest(ids, 2 + at * 3 % 11) for at, ids in enumerate(prompt_ids)]
    result = generate_all(make_scheduler(model, 3), requests, lambda at, _: finished.append(at))
    assert [response.ids for response in result] == [
        generate_alone(model, request.ids, request.max_new_tokens) for request in requests
    ]
    assert sorted(finished) == list(range(12))
    assert finished != sorted(finished)


def test_stop_token_is_not_part_of_the_response() -> None:
    model = model_of("llama")
    ids = prompts()[0]
    response = generate_alone(model, ids, 12)
    (result,) = generate_all(make_scheduler(model), [GenerationRequest(ids, 12, stop_ids=frozenset({response[4]}))])
    assert result.ids == response[: response.index(response[4])]
    assert result.reason == "stop"


def test_failure_raises_instead_of_returning_an_empty_response(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = make_scheduler(model_of("llama"))

    def out_of_memory(first, rows):
        raise MemoryError

    monkeypatch.setattr(loop.backend, "run", out_of_memory)
    with pytest.raises(RuntimeError, match="Not enough memory for this step"):
        generate_all(loop, [GenerationRequest([5], 4)])
