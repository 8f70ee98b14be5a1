"""Generation over slots: token ids of transformers' ``generate``, independent of concurrent requests."""

import time
from random import Random

import pytest
import torch
from generation_runs import (
    SHAPES,
    ResponseCollector,
    generate_alone,
    generate_responses,
    make_scheduler,
    model_of,
    prompts,
)

from burnish.config.errors import UserError
from burnish.inference import scheduler as slots
from burnish.inference.scheduler import Scheduler
from burnish.inference.slots import SlotLimits
from burnish.inference.types import GenerationRequest, QueueFullError, Sampling
from representative import representative
from tiny_models import VOCABULARY, tiny_model

WITHOUT_SLOTS = {"bloom", "mamba", "qwen3_next"}
"""Families whose cache does not support slots."""


@pytest.mark.sample(3)
@pytest.mark.parametrize("shape", representative(SHAPES, {"llama", "qwen3", "gemma2", "qwen3_next"}))
def test_greedy_responses_match_generate(shape: str) -> None:
    model = model_of(shape)
    loop = make_scheduler(model)
    prompt_ids = prompts()
    responses = generate_responses(loop, [GenerationRequest(ids, 12) for ids in prompt_ids])
    assert [answer.ids for answer in responses] == [generate_alone(model, ids, 12) for ids in prompt_ids]
    assert {answer.reason for answer in responses} == {"length"}
    assert (loop.backend.name != "slots") == (shape in WITHOUT_SLOTS) == bool(loop.note)


def test_model_that_asserts_without_cache_is_prefilled_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """XLM rejects a cache with an assertion."""
    model = model_of("llama")
    forward = model.forward

    def forward_without_cache(input_ids, use_cache=False):
        assert not use_cache, "the model does not support a cache"
        return forward(input_ids=input_ids, use_cache=False)

    expected = generate_alone(model, prompts()[0], 6)
    monkeypatch.setattr(model, "forward", forward_without_cache)
    loop = make_scheduler(model)
    assert loop.backend.name == "whole text"
    assert "without" in loop.note
    (response,) = generate_responses(loop, [GenerationRequest(prompts()[0], 6)])
    assert response.ids == expected


def test_response_ends_with_its_stop_token() -> None:
    model = model_of("llama")
    ids = prompts()[0]
    full_response = generate_alone(model, ids, 12)
    (response,) = generate_responses(
        make_scheduler(model), [GenerationRequest(ids, 12, stop_ids=frozenset({full_response[4]}))]
    )
    assert response.ids == full_response[: full_response.index(full_response[4]) + 1]
    assert response.reason == "stop"


def test_responses_do_not_depend_on_chunks_neighbors_or_order(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("qwen2")
    requests = [GenerationRequest(ids, 5 + at % 7) for at, ids in enumerate(prompts(10))]
    defaults = [answer.ids for answer in generate_responses(make_scheduler(model, 4), requests)]
    monkeypatch.setattr(slots, "MAX_CHUNK_TOKENS", 3)
    for number in (1, 3, 10):
        loop = make_scheduler(model, number)
        assert [answer.ids for answer in generate_responses(loop, requests)] == defaults
        assert loop.backend.name == "slots"
    assert [answer.ids for answer in generate_responses(make_scheduler(model, 4), requests[::-1])] == defaults[::-1]
    exact = Scheduler(model, SlotLimits(4, 64, exact=True))
    assert [answer.ids for answer in generate_responses(exact, requests)] == defaults


def test_later_requests_join_running_ones() -> None:
    model = model_of("llama")
    loop, prompt_ids = make_scheduler(model, 3), prompts(9)
    result = []
    for ids in prompt_ids:
        result.append(ResponseCollector())
        loop.submit(GenerationRequest(ids, 9), result[-1])
        loop.turn()
        loop.turn()
    while loop.turn():
        pass
    assert [answer.ids for answer in result] == [generate_alone(model, ids, 9) for ids in prompt_ids]


def test_next_conversation_turn_processes_only_new_tokens() -> None:
    model = model_of("qwen3")
    loop, first = make_scheduler(model), prompts()[0]
    (answer,) = generate_responses(loop, [GenerationRequest(first, 6)])
    following = [*first, *answer.ids, 5, 6, 7]
    (second,) = generate_responses(loop, [GenerationRequest(following, 6)])
    # The last token of a response is sampled but not processed.
    assert second.filled.cached_tokens == len(first) + len(answer.ids) - 1
    assert second.ids == generate_alone(model, following, 6)


def test_requests_with_a_common_prefix_process_it_once() -> None:
    model = model_of("llama")
    loop, prefix = make_scheduler(model, 3), prompts(1, 2)[0] + list(range(3, 43))
    requests = [GenerationRequest([*prefix, number], 5) for number in (7, 8, 9)]
    responses = generate_responses(loop, requests)
    assert [answer.filled.cached_tokens for answer in responses] == [0, len(prefix), len(prefix)]
    assert [answer.ids for answer in responses] == [generate_alone(model, request.ids, 5) for request in requests]


def test_long_prefix_of_a_running_request_is_copied_into_a_slot_with_a_shorter_one() -> None:
    model = model_of("llama")
    loop, prefix = make_scheduler(model, 4), list(range(3, 43))
    generate_responses(loop, [GenerationRequest(ids, 2) for ids in ([5, 6, 7], [8, 9, 7])])  # short contents
    collectors = [ResponseCollector(), ResponseCollector()]
    loop.submit(GenerationRequest(prefix, 20), collectors[0])
    loop.turn()
    loop.turn()
    loop.submit(GenerationRequest([*prefix, 50], 6), collectors[1])
    while loop.turn():
        pass
    assert collectors[1].filled.cached_tokens == len(prefix)
    assert collectors[1].ids == generate_alone(model, [*prefix, 50], 6)


@pytest.mark.parametrize("seed", [0, 1])
def test_requests_with_random_prefixes_get_the_log_probabilities_of_the_model(seed: int) -> None:
    """Prefixes are reused, copied and moved between slots in random order."""
    model, random = model_of("llama"), Random(seed)
    loop = make_scheduler(model, 6)
    prefixes = [[random.randrange(3, VOCABULARY) for _ in range(length)] for length in (5, 25, 40)]
    submitted: list[tuple[GenerationRequest, ResponseCollector]] = []
    for _ in range(120):
        for _ in range(random.choice([0, 0, 1, 3])):
            ids = random.choice(prefixes)[: random.randrange(1, 41)]
            ids = ids + [random.randrange(3, VOCABULARY) for _ in range(random.choice([0, 1, 4]))]
            submitted.append((GenerationRequest(ids, random.choice([1, 3, 12]), top_logprobs=0), ResponseCollector()))
            loop.submit(*submitted[-1])
        loop.turn()
    while loop.turn():
        pass
    assert sum(collector.filled.cached_tokens > 0 for _, collector in submitted) > 30
    for request, response in submitted:
        logps = model(input_ids=torch.tensor([request.ids + response.ids])).logits[0].detach().log_softmax(-1)
        expected = [float(logps[len(request.ids) - 1 + at, token]) for at, token in enumerate(response.ids)]
        assert [result.logprob for result in response.logprobs] == pytest.approx(expected, abs=1e-3)


def test_short_prompt_does_not_wait_for_a_long_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slots, "MAX_CHUNK_TOKENS", 4)
    loop, long, run_until_out_of_memory = make_scheduler(model_of("llama"), 2), ResponseCollector(), ResponseCollector()
    loop.submit(GenerationRequest(list(range(3, 43)), 4), long)
    loop.turn()
    loop.submit(GenerationRequest([5, 6], 4), run_until_out_of_memory)
    for _ in range(3):
        loop.turn()
    assert run_until_out_of_memory.ids
    assert not long.ids


def test_response_never_exceeds_context_length() -> None:
    loop = make_scheduler(model_of("llama"), context=16)
    (response,) = generate_responses(loop, [GenerationRequest(list(range(3, 15)), 50)])
    assert len(response.ids) == 4
    assert response.reason == "length"
    with pytest.raises(UserError, match="16 tokens; the context"):
        loop.submit(GenerationRequest(list(range(3, 19)), 50), ResponseCollector())


def test_cancelled_request_ends_within_a_step_and_frees_its_slot() -> None:
    loop, first, second = make_scheduler(model_of("llama"), 1), ResponseCollector(), ResponseCollector()
    handle = loop.submit(GenerationRequest([5], 50), first)
    loop.submit(GenerationRequest([6], 3), second)
    for _ in range(4):
        loop.turn()
    loop.cancel(handle)
    loop.turn()
    assert (first.reason, len(first.ids)) == ("cancelled", 5)  # the turn that completes a prompt generates two
    while loop.turn():
        pass
    assert second.reason == "length"


@pytest.mark.parametrize("cancels_all", [False, True])
def test_request_that_is_cancelled_at_any_moment_of_a_turn_ends_in_the_next_one(
    monkeypatch: pytest.MonkeyPatch, cancels_all: bool
) -> None:
    loop, answer = make_scheduler(model_of("llama")), ResponseCollector()

    class Clock:
        """Another thread submits a request and cancels it while the turn reads the time."""

        @staticmethod
        def monotonic() -> float:
            monkeypatch.setattr(slots, "time", time)
            handle = loop.submit(GenerationRequest([5], 50), answer)
            loop.cancel_all() if cancels_all else loop.cancel(handle)
            return time.monotonic()

    monkeypatch.setattr(slots, "time", Clock)
    loop.turn()
    loop.turn()
    assert answer.reason == "cancelled"


def test_request_ends_at_its_deadline() -> None:
    responses = generate_responses(
        make_scheduler(model_of("llama")), [GenerationRequest([5], 50, deadline=time.monotonic() - 1)]
    )
    assert responses[0].reason == "cancelled"
    assert "timed out" in str(responses[0].error)


def test_too_many_waiting_requests_are_rejected() -> None:
    loop = Scheduler(model_of("llama"), SlotLimits(1, 64, waiting=2))
    for _ in range(2):
        loop.submit(GenerationRequest([5], 5), ResponseCollector())
    with pytest.raises(QueueFullError) as raised:
        loop.submit(GenerationRequest([5], 5), ResponseCollector())
    assert 1 <= raised.value.retry_after_s <= 60


def test_non_finite_row_fails_alone() -> None:
    model = model_of("llama")
    with torch.no_grad():
        model.get_input_embeddings().weight[9] = torch.nan
    good, bad = generate_responses(
        make_scheduler(model), [GenerationRequest([5, 6, 7], 4), GenerationRequest([5, 9], 4)]
    )
    assert good.reason == "length"
    assert bad.reason == "failed"
    assert bad.error is not None
    assert bad.error.code == "non_finite_logits"


def test_error_of_a_library_fails_its_requests_only(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = make_scheduler(model_of("llama"))
    run = loop.backend.run

    def fails_once(first, rows):
        monkeypatch.setattr(loop.backend, "run", run)
        raise TypeError("mixed batches are not supported")

    monkeypatch.setattr(loop.backend, "run", fails_once)
    (failed,) = generate_responses(loop, [GenerationRequest([5, 6], 4)])
    assert (failed.reason, str(failed.error)) == ("failed", "TypeError: mixed batches are not supported")
    (response,) = generate_responses(loop, [GenerationRequest([5, 6], 4)])
    assert response.ids == generate_alone(loop.model, [5, 6], 4)


def test_out_of_memory_fails_its_requests_and_reduces_slots(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop = make_scheduler(model_of("llama"), 4)
    run, calls = loop.backend.run, []

    def run_until_out_of_memory(first, rows):
        calls.append(len(rows))
        if len(calls) == 3:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes.")
        return run(first, rows)

    monkeypatch.setattr(loop.backend, "run", run_until_out_of_memory)
    failed = generate_responses(loop, [GenerationRequest(ids, 6) for ids in prompts(4)])
    assert {answer.reason for answer in failed} == {"failed"}
    assert failed[0].error is not None
    assert failed[0].error.code == "out_of_memory"
    assert loop.facts().slots == 3
    after = generate_responses(loop, [GenerationRequest(ids, 6) for ids in prompts(4)])
    assert [a.ids for a in after] == [generate_alone(loop.model, ids, 6) for ids in prompts(4)]


def test_log_probabilities_of_forced_response_match_training_loss() -> None:
    model = tiny_model("qwen2")
    ids = prompts(1, 30, seed=3)[0] + [5, 6, 7, 8]
    (response,) = generate_responses(
        make_scheduler(model), [GenerationRequest(ids, 0, prompt_logprobs_from=len(ids) - 4)]
    )
    labels = torch.tensor([[-100] * (len(ids) - 4) + ids[-4:]])
    loss = model(input_ids=torch.tensor([ids]), labels=labels).loss.detach() * 4
    assert response.reason == "length"
    assert sum(result.logprob for result in response.filled.logprobs) == pytest.approx(-float(loss), abs=1e-5)


def test_log_probabilities_of_response_match_model() -> None:
    model = model_of("llama")
    prompt_ids = prompts(3)
    for ids, response in zip(
        prompt_ids,
        generate_responses(make_scheduler(model), [GenerationRequest(ids, 5, top_logprobs=3) for ids in prompt_ids]),
        strict=True,
    ):
        logps = model(input_ids=torch.tensor([ids + response.ids])).logits[0].detach().log_softmax(-1)
        for at, result in enumerate(response.logprobs):
            row = logps[len(ids) - 1 + at]
            assert result.token == response.ids[at]
            assert result.logprob == pytest.approx(float(row[result.token]), abs=1e-4)
            assert [token for token, _ in result.top] == row.topk(3).indices.tolist()


def test_seeded_response_does_not_depend_on_neighbors() -> None:
    model = model_of("llama")
    sampling = Sampling(temperature=1.5, seed=7)
    requests = [GenerationRequest(ids, 8, sampling=sampling, index=at) for at, ids in enumerate(prompts(8))]
    batched = [answer.ids for answer in generate_responses(make_scheduler(model, 8), requests)]
    assert batched == [generate_responses(make_scheduler(model, 1), [request])[0].ids for request in requests]
    assert batched != [
        answer.ids for answer in generate_responses(make_scheduler(model, 8), [*requests[1:], requests[0]])
    ]


def test_prefix_with_another_image_is_not_reused() -> None:
    loop = make_scheduler(model_of("llama"), 1)
    ids = [5, 9, 9, 6, 7, 8]

    def cached_tokens(hashes: list[int] | None) -> int:
        (answer,) = generate_responses(loop, [GenerationRequest(ids, 1, content_hashes=hashes)])
        return answer.filled.cached_tokens

    assert cached_tokens([0, 11, 11, 0, 0, 0]) == 0
    assert cached_tokens([0, 11, 11, 0, 0, 0]) == 5
    assert cached_tokens([0, 12, 12, 0, 0, 0]) == 1
    assert cached_tokens(None) == 1
    assert cached_tokens(None) == 5


def test_responses_after_forget_use_new_weights() -> None:
    model, ids = model_of("llama"), prompts(1)[0]
    loop = make_scheduler(model, 2)
    before = generate_responses(loop, [GenerationRequest(ids, 6)])[0].ids
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(-1.5)
    loop.forget()
    (after,) = generate_responses(loop, [GenerationRequest(ids, 6)])
    assert after.filled.cached_tokens == 0
    assert after.ids == generate_alone(model, ids, 6) != before
    loop.submit(GenerationRequest(ids, 6), lambda output: None)
    loop.turn()
    with pytest.raises(RuntimeError, match="1 requests are running"):
        loop.forget()
