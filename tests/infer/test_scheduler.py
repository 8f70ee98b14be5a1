"""Answers over slots: the ids of transformers' ``generate``, whatever else is answered at the same time."""

import time

import pytest
import torch
from answering import SHAPES, Answer, alone, answers, loop_of, model_of, prompts

from burnish.config.errors import UserError
from burnish.inference import scheduler as slots
from burnish.inference.scheduler import Scheduler
from burnish.inference.slots import SlotLimits
from burnish.inference.types import Full, GenerationRequest, Sampling
from few import few
from tiny_models import tiny_model

ONE_AT_A_TIME = {"bloom", "mamba", "qwen3_next"}
"""Families that keep what they have read in a way of their own."""


@pytest.mark.parametrize("shape", few(SHAPES, {"llama", "qwen3", "gemma2", "qwen3_next"}))
def test_greedy_responses_match_generate(shape: str) -> None:
    model = model_of(shape)
    loop = loop_of(model)
    asked = prompts()
    made = answers(loop, [GenerationRequest(ids, 12) for ids in asked])
    assert [answer.ids for answer in made] == [alone(model, ids, 12) for ids in asked]
    assert {answer.reason for answer in made} == {"length"}
    assert (loop.backend.name != "slots") == (shape in ONE_AT_A_TIME) == bool(loop.note)


def test_model_that_asserts_without_cache_is_prefilled_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """XLM's refusal of a cache is an assertion."""
    model = model_of("llama")
    forward = model.forward

    def asserting(input_ids, use_cache=False):
        assert not use_cache, "a cache"
        return forward(input_ids=input_ids, use_cache=False)

    expected = alone(model, prompts()[0], 6)
    monkeypatch.setattr(model, "forward", asserting)
    loop = loop_of(model)
    assert loop.backend.name == "whole text"
    assert "without" in loop.note
    (made,) = answers(loop, [GenerationRequest(prompts()[0], 6)])
    assert made.ids == expected


def test_response_ends_with_its_stop_token() -> None:
    model = model_of("llama")
    ids = prompts()[0]
    whole = alone(model, ids, 12)
    (made,) = answers(loop_of(model), [GenerationRequest(ids, 12, stop_ids=frozenset({whole[4]}))])
    assert made.ids == whole[: whole.index(whole[4]) + 1]
    assert made.reason == "stop"


def test_responses_do_not_depend_on_chunks_neighbors_or_order(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("qwen2")
    requests = [GenerationRequest(ids, 5 + at % 7) for at, ids in enumerate(prompts(10))]
    usual = [answer.ids for answer in answers(loop_of(model, 4), requests)]
    monkeypatch.setattr(slots, "PIECE", 3)
    for number in (1, 3, 10):
        loop = loop_of(model, number)
        assert [answer.ids for answer in answers(loop, requests)] == usual
        assert loop.backend.name == "slots"
    assert [answer.ids for answer in answers(loop_of(model, 4), requests[::-1])] == usual[::-1]
    exact = Scheduler(model, SlotLimits(4, 64, exact=True))
    assert [answer.ids for answer in answers(exact, requests)] == usual


def test_later_requests_join_running_ones() -> None:
    model = model_of("llama")
    loop, asked = loop_of(model, 3), prompts(9)
    found = []
    for ids in asked:
        found.append(Answer())
        loop.submit(GenerationRequest(ids, 9), found[-1])
        loop.turn()
        loop.turn()
    while loop.turn():
        pass
    assert [answer.ids for answer in found] == [alone(model, ids, 9) for ids in asked]


def test_next_conversation_turn_processes_only_new_tokens() -> None:
    model = model_of("qwen3")
    loop, first = loop_of(model), prompts()[0]
    (answer,) = answers(loop, [GenerationRequest(first, 6)])
    following = [*first, *answer.ids, 5, 6, 7]
    (second,) = answers(loop, [GenerationRequest(following, 6)])
    # The last token of an answer is drawn and never read.
    assert second.filled.cached_tokens == len(first) + len(answer.ids) - 1
    assert second.ids == alone(model, following, 6)


def test_requests_with_a_common_prefix_process_it_once() -> None:
    model = model_of("llama")
    loop, shared = loop_of(model, 3), prompts(1, 2)[0] + list(range(3, 43))
    requests = [GenerationRequest([*shared, number], 5) for number in (7, 8, 9)]
    made = answers(loop, requests)
    assert [answer.filled.cached_tokens for answer in made] == [0, len(shared), len(shared)]
    assert [answer.ids for answer in made] == [alone(model, request.ids, 5) for request in requests]


def test_short_prompt_does_not_wait_for_a_long_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slots, "PIECE", 4)
    loop, long, short = loop_of(model_of("llama"), 2), Answer(), Answer()
    loop.submit(GenerationRequest(list(range(3, 43)), 4), long)
    loop.turn()
    loop.submit(GenerationRequest([5, 6], 4), short)
    for _ in range(3):
        loop.turn()
    assert short.ids
    assert not long.ids


def test_response_never_exceeds_context_length() -> None:
    loop = loop_of(model_of("llama"), context=16)
    (made,) = answers(loop, [GenerationRequest(list(range(3, 15)), 50)])
    assert len(made.ids) == 4
    assert made.reason == "length"
    with pytest.raises(UserError, match="16 tokens; the context"):
        loop.submit(GenerationRequest(list(range(3, 19)), 50), Answer())


def test_cancelled_request_ends_within_a_step_and_frees_its_slot() -> None:
    loop, first, second = loop_of(model_of("llama"), 1), Answer(), Answer()
    handle = loop.submit(GenerationRequest([5], 50), first)
    loop.submit(GenerationRequest([6], 3), second)
    for _ in range(4):
        loop.turn()
    loop.cancel(handle)
    loop.turn()
    assert (first.reason, len(first.ids)) == ("cancelled", 5)  # the turn that reads a prompt makes two
    while loop.turn():
        pass
    assert second.reason == "length"


def test_request_ends_at_its_deadline() -> None:
    made = answers(loop_of(model_of("llama")), [GenerationRequest([5], 50, deadline=time.monotonic() - 1)])
    assert made[0].reason == "cancelled"
    assert "timed out" in str(made[0].error)


def test_too_many_waiting_requests_are_rejected() -> None:
    loop = Scheduler(model_of("llama"), SlotLimits(1, 64, waiting=2))
    for _ in range(2):
        loop.submit(GenerationRequest([5], 5), Answer())
    with pytest.raises(Full) as refused:
        loop.submit(GenerationRequest([5], 5), Answer())
    assert 1 <= refused.value.retry_after_s <= 60


def test_non_finite_row_fails_alone() -> None:
    model = model_of("llama")
    with torch.no_grad():
        model.get_input_embeddings().weight[9] = torch.nan
    good, bad = answers(loop_of(model), [GenerationRequest([5, 6, 7], 4), GenerationRequest([5, 9], 4)])
    assert good.reason == "length"
    assert bad.reason == "failed"
    assert bad.error is not None
    assert bad.error.code == "non_finite_logits"


def test_out_of_memory_fails_its_requests_and_reduces_slots(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop = loop_of(model_of("llama"), 4)
    run, calls = loop.backend.run, []

    def short(first, rows):
        calls.append(len(rows))
        if len(calls) == 3:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes.")
        return run(first, rows)

    monkeypatch.setattr(loop.backend, "run", short)
    failed = answers(loop, [GenerationRequest(ids, 6) for ids in prompts(4)])
    assert {answer.reason for answer in failed} == {"failed"}
    assert failed[0].error is not None
    assert failed[0].error.code == "out_of_memory"
    assert loop.facts().slots == 3
    after = answers(loop, [GenerationRequest(ids, 6) for ids in prompts(4)])
    assert [a.ids for a in after] == [alone(loop.model, ids, 6) for ids in prompts(4)]


def test_log_probabilities_of_forced_response_match_training_loss() -> None:
    model = tiny_model("qwen2")
    ids = prompts(1, 30, seed=3)[0] + [5, 6, 7, 8]
    (made,) = answers(loop_of(model), [GenerationRequest(ids, 0, prompt_logprobs_from=len(ids) - 4)])
    labels = torch.tensor([[-100] * (len(ids) - 4) + ids[-4:]])
    loss = model(input_ids=torch.tensor([ids]), labels=labels).loss.detach() * 4
    assert made.reason == "length"
    assert sum(found.logprob for found in made.filled.logprobs) == pytest.approx(-float(loss), abs=1e-5)


def test_log_probabilities_of_response_match_model() -> None:
    model = model_of("llama")
    asked = prompts(3)
    for ids, made in zip(
        asked, answers(loop_of(model), [GenerationRequest(ids, 5, top_logprobs=3) for ids in asked]), strict=True
    ):
        logps = model(input_ids=torch.tensor([ids + made.ids])).logits[0].detach().log_softmax(-1)
        for at, found in enumerate(made.logprobs):
            row = logps[len(ids) - 1 + at]
            assert found.token == made.ids[at]
            assert found.logprob == pytest.approx(float(row[found.token]), abs=1e-4)
            assert [token for token, _ in found.top] == row.topk(3).indices.tolist()


def test_seeded_response_does_not_depend_on_neighbors() -> None:
    model = model_of("llama")
    sampling = Sampling(temperature=1.5, seed=7)
    requests = [GenerationRequest(ids, 8, sampling=sampling, index=at) for at, ids in enumerate(prompts(8))]
    together = [answer.ids for answer in answers(loop_of(model, 8), requests)]
    assert together == [answers(loop_of(model, 1), [request])[0].ids for request in requests]
    assert together != [answer.ids for answer in answers(loop_of(model, 8), [*requests[1:], requests[0]])]


def test_prefix_with_another_image_is_not_reused() -> None:
    loop = loop_of(model_of("llama"), 1)
    ids = [5, 9, 9, 6, 7, 8]

    def cached(hashes: list[int] | None) -> int:
        (answer,) = answers(loop, [GenerationRequest(ids, 1, content_hashes=hashes)])
        return answer.filled.cached_tokens

    assert cached([0, 11, 11, 0, 0, 0]) == 0
    assert cached([0, 11, 11, 0, 0, 0]) == 5
    assert cached([0, 12, 12, 0, 0, 0]) == 1
    assert cached(None) == 1
    assert cached(None) == 5


def test_responses_after_forget_use_new_weights() -> None:
    model, ids = model_of("llama"), prompts(1)[0]
    loop = loop_of(model, 2)
    before = answers(loop, [GenerationRequest(ids, 6)])[0].ids
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(-1.5)
    loop.forget()
    (after,) = answers(loop, [GenerationRequest(ids, 6)])
    assert after.filled.cached_tokens == 0
    assert after.ids == alone(model, ids, 6) != before
    loop.submit(GenerationRequest(ids, 6), lambda made: None)
    loop.turn()
    with pytest.raises(RuntimeError, match="1 requests are running"):
        loop.forget()
