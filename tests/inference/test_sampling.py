"""Sampling: distribution of samples, penalties compared with a reference, samples that depend only on noise key and
position."""

import math
from collections import Counter

import numpy as np
import pytest
import torch

from burnish.inference.sampling import (
    DrawSettings,
    adjusted_logits,
    candidates,
    draw,
    draw_rows,
    log_probabilities,
    token_logps,
)
from burnish.inference.types import CHAT, ROLLOUT, NoiseKey, Sampling
from burnish.kernels.philox import BLOCK, gumbel, gumbel_argmax, permutation, philox

LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -3.0, 1.0, 0.2])


def expected_probabilities(sampling: Sampling) -> list[float]:
    """Compute the probabilities in plain Python."""
    weights = {token: math.exp(logit / sampling.temperature) for token, logit in enumerate(LOGITS.tolist())}
    ordered = sorted(weights, key=lambda token: (-weights[token], token))
    if sampling.top_k:
        threshold = weights[ordered[sampling.top_k - 1]]
        ordered = [token for token in ordered if weights[token] >= threshold]
    ordered = [token for token in ordered if weights[token] >= sampling.min_p * weights[ordered[0]]]
    total, kept, sum_ = sum(weights[token] for token in ordered), [], 0.0
    for token in ordered:
        if sum_ < sampling.top_p:
            kept.append(token)
        sum_ += weights[token] / total
    total = sum(weights[token] for token in kept)
    return [weights[token] / total if token in kept else 0.0 for token in weights]


def probabilities(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Return (V,) the probabilities of sampling, 0 for excluded tokens."""
    result, (values,) = candidates(logits[None], [sampling])
    tokens = torch.arange(len(logits)) if result is None else result[0]
    chances = values.softmax(-1)
    assert tokens[chances > 0].tolist() == sorted(tokens[chances > 0].tolist())
    return torch.zeros(len(logits)).index_add_(0, tokens, chances)


def settings_of(sampling: Sampling, seed: int, row: int, prompt=(), answer=()) -> DrawSettings:
    return DrawSettings(sampling, prompt, answer, NoiseKey(seed, row=row))


def sample_one(sampling: Sampling, prompt=(), answer=(), seed: int = 1, request: int = 0, **more) -> int:
    """Sample a token from LOGITS."""
    return int(draw(LOGITS[None], [DrawSettings(sampling, prompt, answer, NoiseKey(seed, row=request), **more)]))


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
def test_sample_frequencies_match_probabilities(sampling: Sampling) -> None:
    number, chances = 5_000, expected_probabilities(sampling)
    assert probabilities(LOGITS, sampling).tolist() == pytest.approx(chances, abs=1e-6)
    if sampling.temperature != 1.3 and sampling != SETTINGS[0]:
        number = 2_000
    samples = Counter(draw(LOGITS.expand(number, -1), [settings_of(sampling, 5, at) for at in range(number)]).tolist())
    for token, chance in enumerate(chances):
        deviation = math.sqrt(number * chance * (1 - chance))
        assert abs(samples[token] - number * chance) <= 4 * deviation


def test_temperature_0_selects_the_likeliest_after_penalties() -> None:
    assert sample_one(Sampling(temperature=0)) == 0
    assert sample_one(Sampling(temperature=0, presence_penalty=1.5), answer=[0]) == 1
    assert sample_one(Sampling(temperature=0, bias={5: 100.0})) == 5
    assert sample_one(Sampling(temperature=0), excluded_ids=[0]) == 1


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=1e-320), Sampling(top_p=1e-320), Sampling(temperature=5e-324, top_k=3, top_p=1e-320),
        Sampling(temperature=1e-320, repetition_penalty=1e-320), Sampling(temperature=1e-320, min_p=1.0),
    ],
)  # fmt: skip
def test_extreme_settings_still_sample_a_likeliest_token(sampling: Sampling) -> None:
    answer = [0] if sampling.repetition_penalty != 1 else []
    assert sample_one(sampling, answer=answer) == 0


def test_penalties_match_plain_reference() -> None:
    prompt, answer = [0, 4], [1, 1, 4, 5]
    sampling = Sampling(
        repetition_penalty=1.7, presence_penalty=0.4, frequency_penalty=0.3, bias={0: 0.5, 4: -0.25}
    )  # fmt: skip
    result = adjusted_logits(LOGITS[None], [DrawSettings(sampling, prompt, answer)])[0].tolist()
    for token, logit in enumerate(LOGITS.tolist()):
        logit += {0: 0.5, 4: -0.25}.get(token, 0.0)
        if token in prompt or token in answer:
            logit = logit * 1.7 if logit < 0 else logit / 1.7
        if token in answer:
            logit -= 0.3 * answer.count(token) + 0.4
        assert result[token] == pytest.approx(logit, abs=1e-6)


def test_repetition_penalty_matches_transformers() -> None:
    from transformers import RepetitionPenaltyLogitsProcessor

    ids = [0, 4, 4, 6]
    theirs = RepetitionPenaltyLogitsProcessor(1.3)(torch.tensor([ids]), LOGITS[None].clone())[0]
    assert torch.equal(adjusted_logits(LOGITS[None], [DrawSettings(Sampling(repetition_penalty=1.3), ids)])[0], theirs)


def test_top_p_matches_transformers() -> None:
    from transformers import TopPLogitsWarper

    logits = LOGITS + torch.arange(8) / 100  # without equal logits, whose order in transformers is arbitrary
    for top_p in (0.1, 0.5, 0.9, 0.99):
        theirs = TopPLogitsWarper(top_p)(torch.tensor([[0]]), logits[None].clone())[0].softmax(-1)
        assert probabilities(logits, Sampling(top_p=top_p)).tolist() == pytest.approx(theirs.tolist(), abs=1e-6)


@pytest.mark.parametrize("width", [0.01, 1.0, 4.0])  # the nucleus has nearly all tokens, many, a few
def test_top_p_of_large_vocabulary_matches_transformers(width: float) -> None:
    from transformers import TopPLogitsWarper

    logits = torch.randn(20_000, generator=torch.Generator().manual_seed(0)) * width
    theirs = TopPLogitsWarper(0.9)(torch.tensor([[0]]), logits[None].clone())[0].softmax(-1)
    assert torch.allclose(probabilities(logits, Sampling(top_p=0.9)), theirs, rtol=1e-3)


def test_philox_matches_known_random123_vectors() -> None:
    """philox4x32-10 in ``kat_vectors`` of Random123 1.14.0."""
    ones, pi = [0xFFFFFFFF] * 4, [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344]
    known = [
        ([0] * 4, [0, 0], [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        (ones, ones[:2], [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (pi, [0xA4093822, 0x299F31D0], [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]),
    ]
    for counter, key, words in known:
        key, counter = ([np.array([word], np.uint64) for word in words] for words in (key, counter))
        assert [int(word[0]) for word in philox(key, counter)] == words


def test_sample_depends_only_on_key_and_position() -> None:
    torch.manual_seed(1)
    keys = [NoiseKey(7, ROLLOUT, 2, 3, sample).words(position) for sample in range(3) for position in range(5)]
    first = gumbel(keys, 3000)
    torch.rand(10)
    assert np.array_equal(first, gumbel(keys, 3000))
    assert np.array_equal(first[3:5, :20], gumbel(keys[3:5], 20))
    assert len(set(first[:, 0].tolist())) == 15


def test_noise_keys_are_distinct() -> None:
    seeds, rows = (0, 1, 2**31, 2**32, 2**63), (0, 1, 2**20 - 1, 2**20, 2**21 + 5)
    keys = {
        NoiseKey(seed, purpose, generation, row, sample).words(position)
        for seed in seeds for purpose in (CHAT, ROLLOUT) for generation in range(10) for row in rows
        for sample in range(20) for position in range(20)
    }  # fmt: skip
    assert len(keys) == 200_000


def chi_square(counts: torch.Tensor, probabilities: torch.Tensor) -> float:
    """Return the statistic in standard deviations from its mean. Tokens with expected counts below 10 are merged."""
    expected_probabilities, number = probabilities * counts.sum(), counts.sum()
    is_frequent = expected_probabilities >= 10
    pairs = [*zip(counts[is_frequent].tolist(), expected_probabilities[is_frequent].tolist(), strict=True)]
    rest = (float(number - counts[is_frequent].sum()), float(number - expected_probabilities[is_frequent].sum()))
    pairs += [rest] if rest[1] > 10 else []
    freedom = len(pairs) - 1
    return (sum((n - e) ** 2 / e for n, e in pairs) - freedom) / math.sqrt(2 * freedom)


@pytest.mark.parametrize("vocabulary", [8, 1_000, 32_000])
@pytest.mark.parametrize("over", ["row", "sample", "position"])
def test_samples_follow_softmax_over_rows_samples_and_positions(vocabulary: int, over: str) -> None:
    number = 4_000 if vocabulary < 32_000 else 600
    logits = torch.randn(vocabulary, generator=torch.Generator().manual_seed(3)) * 2
    logits, settings = logits.index_add(0, torch.tensor([1, 5]), torch.tensor([4.0, 5.0])), [Sampling()]
    words = [
        NoiseKey(11, ROLLOUT, 0, **({} if over == "position" else {over: at})).words(at if over == "position" else 3)
        for at in range(number)
    ]
    parts = [words[begin : begin + 100] for begin in range(0, number, 100)]
    samples = torch.cat([draw_rows(logits.expand(len(part), -1), part, settings * len(part)) for part in parts])
    counts = torch.bincount(samples, minlength=vocabulary).double()
    assert abs(chi_square(counts, logits.double().softmax(-1))) < 4


@pytest.mark.parametrize("scale", [0, 0.1, 1, 3, 10, 100, 1e4])
@pytest.mark.parametrize("vocabulary", [8, BLOCK, 4001])
def test_sample_matches_plain_computation_in_float64(vocabulary: int, scale: float) -> None:
    """Row by row: the block with the highest perturbed probability, then the token of that block."""
    generator = torch.Generator().manual_seed(vocabulary)
    words = [NoiseKey(5, ROLLOUT, int(scale), row=row).words(row) for row in range(40)]
    scores = torch.randn(len(words), vocabulary, generator=generator) * scale
    single, half, tied = (torch.full_like(scores, -torch.inf), scores.clone(), scores.round())
    single[:, 3], half[:, ::2] = 0.0, -torch.inf
    for logits in (scores, single, half, tied, scores - 1e30):
        noise, tokens = gumbel(words, 2 * BLOCK), gumbel_argmax(logits, words, vocabulary)
        ids = torch.arange(vocabulary).expand(len(words), -1).flip(-1)
        assert torch.equal(gumbel_argmax(logits.flip(-1), words, vocabulary, ids), tokens)
        for row, token, row_noise in zip(logits.double().numpy(), tokens.tolist(), noise, strict=True):
            row -= row.max()
            blocks = [row[begin : begin + BLOCK] for begin in range(0, vocabulary, BLOCK)]
            sums = [np.log(np.exp(block).sum() + 1e-300) for block in blocks]
            block = int(np.argmax(sums + row_noise[BLOCK : BLOCK + len(blocks)]))
            best = np.argmax(blocks[block] + row_noise[: len(blocks[block])])
            assert token == block * BLOCK + best


def test_samples_of_adjacent_positions_are_independent() -> None:
    logits, number = torch.tensor([1.0, 0.5, 0.0, -0.5]), 6_000
    samples = draw_rows(
        logits.expand(number, -1), [NoiseKey(3).words(at) for at in range(number)], [Sampling()] * number
    )
    pairs = torch.bincount(samples[:-1] * 4 + samples[1:], minlength=16).double()
    probabilities = logits.double().softmax(-1)
    assert abs(chi_square(pairs, torch.outer(probabilities, probabilities).flatten())) < 4


def test_logit_errors_change_few_samples() -> None:
    """Inverting the cumulative sum would change 4.4% of the tokens at an error of 1e-3."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2_000, 2_000, generator=generator) * 2
    words = [NoiseKey(0, row=at).words(0) for at in range(2_000)]
    shifted = logits + 1e-3 * torch.randn(logits.shape, generator=generator)
    exact, perturbed = (draw_rows(each, words, [Sampling()] * 2_000) for each in (logits, shifted))
    assert (exact != perturbed).float().mean() < 0.003


def test_permutation_is_complete_and_depends_on_generation() -> None:
    assert sorted(permutation(13, (5, 2), 0)) == list(range(13))
    assert permutation(13, (5, 2), 0) == permutation(13, (5, 2), 0) != permutation(13, (5, 2), 1)


def test_log_probabilities_are_of_raw_logits() -> None:
    (result,) = log_probabilities(LOGITS[None], torch.tensor([2]), top=2)
    logps = LOGITS.log_softmax(-1)
    assert result.logprob == pytest.approx(float(logps[2]))
    assert result.top == ((0, pytest.approx(float(logps[0]))), (1, pytest.approx(float(logps[1]))))


ALL_SETTINGS = [
    *SETTINGS,
    Sampling(temperature=0),
    Sampling(temperature=0.7, repetition_penalty=1.5, presence_penalty=0.2, frequency_penalty=0.1, bias={3: 2.0}),
]

EXPECTED_SAMPLES = [2722, 1129, 2649, 929, 2371, 1288, 449, 2419, 1744]


@pytest.mark.parametrize("vocabulary", [8, 3000])
def test_batched_row_samples_the_same_as_alone(vocabulary: int) -> None:
    logits = torch.randn(
        len(ALL_SETTINGS), vocabulary, generator=torch.Generator().manual_seed(0)
    ).bfloat16()  # bfloat16 gives equal logits
    for seed in range(50):
        rows = [settings_of(sampling, seed, at, [0, 1], [2, 2]) for at, sampling in enumerate(ALL_SETTINGS)]
        separate = [int(draw(logits[at : at + 1], rows[at : at + 1])) for at in range(len(rows))]
        assert draw(logits, rows).tolist() == separate


def test_sample_at_fixed_seed_is_stable() -> None:
    rows = [settings_of(sampling, 3, at, [0, 4], [1, 5]) for at, sampling in enumerate(ALL_SETTINGS)]
    logits = torch.sin(torch.arange(len(ALL_SETTINGS) * 3000, dtype=torch.float32)).view(len(ALL_SETTINGS), -1) * 4
    assert draw(logits, rows).tolist() == EXPECTED_SAMPLES


def test_equally_likely_tokens_enter_top_p_by_id() -> None:
    assert probabilities(torch.zeros(10), Sampling(top_p=0.35)).tolist() == pytest.approx([0.25] * 4 + [0.0] * 6)


def test_token_logps_are_those_of_raw_logits() -> None:
    logits = torch.stack([LOGITS, LOGITS.flip(0)])
    assert torch.allclose(token_logps(logits, torch.tensor([2, 2])), logits.log_softmax(-1)[:, 2])
