"""Sampling: frequencies of draws, penalties by a reference, draws that only seed, request and position decide."""

import math
from collections import Counter

import pytest
import torch

from burnish.inference.sampling import (
    DrawSettings,
    adjusted_logits,
    draw,
    log_probabilities,
    probabilities,
    token_logps,
    uniform,
)
from burnish.inference.types import Sampling

LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -3.0, 1.0, 0.2])


def expected(sampling: Sampling) -> list[float]:
    """The distribution by hand, in plain Python."""
    weights = {token: math.exp(logit / sampling.temperature) for token, logit in enumerate(LOGITS.tolist())}
    ordered = sorted(weights, key=lambda token: (-weights[token], token))
    if sampling.top_k:
        least = weights[ordered[sampling.top_k - 1]]
        ordered = [token for token in ordered if weights[token] >= least]
    ordered = [token for token in ordered if weights[token] >= sampling.min_p * weights[ordered[0]]]
    whole, kept, sum_ = sum(weights[token] for token in ordered), [], 0.0
    for token in ordered:
        if sum_ < sampling.top_p:
            kept.append(token)
        sum_ += weights[token] / whole
    whole = sum(weights[token] for token in kept)
    return [weights[token] / whole if token in kept else 0.0 for token in weights]


def of_all(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """(V,) probabilities, 0 of what a draw never takes."""
    (tokens,), (chances,) = probabilities(logits[None], [sampling])
    assert tokens[chances > 0].tolist() == sorted(tokens[chances > 0].tolist())
    return torch.zeros(len(logits)).index_add_(0, tokens, chances / chances.sum())


def one(sampling: Sampling, prompt=(), answer=(), seed: int = 1, request: int = 0, **more) -> int:
    """One draw from LOGITS."""
    return int(draw(LOGITS[None], [DrawSettings(sampling, prompt, answer, seed, request, **more)]))


SETTINGS = [
    Sampling(),
    Sampling(temperature=0.5),
    Sampling(temperature=2.0),
    Sampling(top_k=3),
    Sampling(top_p=0.7),
    Sampling(min_p=0.3),
    Sampling(temperature=1.3, top_k=6, top_p=0.9, min_p=0.05),
]


@pytest.mark.parametrize("sampling", SETTINGS)
def test_draws_come_as_often_as_their_probabilities_say(sampling: Sampling) -> None:
    number, chances = 5_000, expected(sampling)
    assert of_all(LOGITS, sampling).tolist() == pytest.approx(chances, abs=1e-6)
    if sampling.temperature != 1.3 and sampling != SETTINGS[0]:
        number = 2_000
    drawn = Counter(
        draw(LOGITS.expand(number, -1), [DrawSettings(sampling, seed=5, request=at) for at in range(number)]).tolist()
    )
    for token, chance in enumerate(chances):
        deviation = math.sqrt(number * chance * (1 - chance))
        assert abs(drawn[token] - number * chance) <= 4 * deviation


def test_temperature_0_takes_the_likeliest_after_penalties() -> None:
    assert one(Sampling(temperature=0)) == 0
    assert one(Sampling(temperature=0, presence_penalty=1.5), answer=[0]) == 1
    assert one(Sampling(temperature=0, bias={5: 100.0})) == 5
    assert one(Sampling(temperature=0), barred=[0]) == 1


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=1e-320), Sampling(top_p=1e-320), Sampling(temperature=5e-324, top_k=3, top_p=1e-320),
        Sampling(temperature=1e-320, repetition_penalty=1e-320), Sampling(temperature=1e-320, min_p=1.0),
    ],
)  # fmt: skip
def test_settings_at_the_edge_of_numbers_still_draw_a_likeliest_token(sampling: Sampling) -> None:
    answer = [0] if sampling.repetition_penalty != 1 else []
    assert one(sampling, answer=answer) == 0


def test_penalties_are_those_of_a_plain_reference() -> None:
    prompt, answer = [0, 4], [1, 1, 4, 5]
    sampling = Sampling(
        repetition_penalty=1.7, presence_penalty=0.4, frequency_penalty=0.3, bias={0: 0.5, 4: -0.25}
    )  # fmt: skip
    found = adjusted_logits(LOGITS[None], [DrawSettings(sampling, prompt, answer)])[0].tolist()
    for token, logit in enumerate(LOGITS.tolist()):
        logit += {0: 0.5, 4: -0.25}.get(token, 0.0)
        if token in prompt or token in answer:
            logit = logit * 1.7 if logit < 0 else logit / 1.7
        if token in answer:
            logit -= 0.3 * answer.count(token) + 0.4
        assert found[token] == pytest.approx(logit, abs=1e-6)


def test_the_repetition_penalty_is_that_of_transformers() -> None:
    from transformers import RepetitionPenaltyLogitsProcessor

    ids = [0, 4, 4, 6]
    theirs = RepetitionPenaltyLogitsProcessor(1.3)(torch.tensor([ids]), LOGITS[None].clone())[0]
    assert torch.equal(adjusted_logits(LOGITS[None], [DrawSettings(Sampling(repetition_penalty=1.3), ids)])[0], theirs)


def test_the_nucleus_is_that_of_transformers() -> None:
    from transformers import TopPLogitsWarper

    logits = LOGITS + torch.arange(8) / 100  # two that are the same are cut in no order
    for top_p in (0.1, 0.5, 0.9, 0.99):
        theirs = TopPLogitsWarper(top_p)(torch.tensor([[0]]), logits[None].clone())[0].softmax(-1)
        assert of_all(logits, Sampling(top_p=top_p)).tolist() == pytest.approx(theirs.tolist(), abs=1e-6)


@pytest.mark.parametrize("width", [0.01, 1.0, 4.0])  # nearly all tokens are in the nucleus, many, a few
def test_the_nucleus_of_a_large_vocabulary_is_that_of_transformers(width: float) -> None:
    from transformers import TopPLogitsWarper

    logits = torch.randn(20_000, generator=torch.Generator().manual_seed(0)) * width
    theirs = TopPLogitsWarper(0.9)(torch.tensor([[0]]), logits[None].clone())[0].softmax(-1)
    assert torch.allclose(of_all(logits, Sampling(top_p=0.9)), theirs, rtol=1e-3)


def test_a_draw_is_decided_by_seed_request_and_position_alone() -> None:
    torch.manual_seed(1)
    first = [uniform(7, 3, position) for position in range(5)]
    torch.rand(10)
    assert first == [uniform(7, 3, position) for position in range(5)]
    assert len({*first, uniform(8, 3, 0), uniform(7, 4, 0), uniform(-7, 3, 0), uniform(2**63, 3, 0)}) == 9
    assert all(0 <= number < 1 for number in first)


def test_uniform_numbers_are_even() -> None:
    numbers = torch.tensor([uniform(seed, 0, position) for seed in range(40) for position in range(250)])
    assert numbers.mean() == pytest.approx(0.5, abs=0.012)
    assert numbers.histc(10, 0, 1).div(1000).sub(1).abs().max() < 0.15


def test_log_probabilities_are_of_the_bare_logits() -> None:
    (found,) = log_probabilities(LOGITS[None], [2], top=2)
    logps = LOGITS.log_softmax(-1)
    assert found.logprob == pytest.approx(float(logps[2]))
    assert found.top == ((0, pytest.approx(float(logps[0]))), (1, pytest.approx(float(logps[1]))))


MIXED = [
    *SETTINGS,
    Sampling(temperature=0),
    Sampling(temperature=0.7, repetition_penalty=1.5, presence_penalty=0.2, frequency_penalty=0.1, bias={3: 2.0}),
]

DRAWN = [1334, 1111, 2842, 2349, 775, 320, 1869, 2419, 2586]


@pytest.mark.parametrize("vocabulary", [8, 3000])
def test_a_row_of_a_batch_draws_what_it_draws_alone(vocabulary: int) -> None:
    logits = torch.randn(len(MIXED), vocabulary, generator=torch.Generator().manual_seed(0)).bfloat16()  # with ties
    for seed in range(50):
        rows = [DrawSettings(sampling, [0, 1], [2, 2], seed, at) for at, sampling in enumerate(MIXED)]
        each = [int(draw(logits[at : at + 1], rows[at : at + 1])) for at in range(len(rows))]
        assert draw(logits, rows).tolist() == each


def test_the_draw_at_a_fixed_seed_stays_the_same() -> None:
    """Ids of version 0.1, whose rows were drawn one by one."""
    rows = [DrawSettings(sampling, [0, 4], [1, 5], seed=3, request=at) for at, sampling in enumerate(MIXED)]
    logits = torch.sin(torch.arange(len(MIXED) * 3000, dtype=torch.float32)).view(len(MIXED), -1) * 4
    assert draw(logits, rows).tolist() == DRAWN


def test_equally_likely_tokens_enter_the_nucleus_by_id() -> None:
    assert of_all(torch.zeros(10), Sampling(top_p=0.35)).tolist() == pytest.approx([0.25] * 4 + [0.0] * 6)


def test_token_logps_are_those_of_the_bare_logits() -> None:
    logits = torch.stack([LOGITS, LOGITS.flip(0)])
    assert torch.allclose(token_logps(logits, torch.tensor([2, 2])), logits.log_softmax(-1)[:, 2])
