"""How fast answers are made over seats, and by transformers' own ways: one child process, all ways by turns.

In: the number of rounds. Out: a line of JSON per round: way -> new tokens per second of the process's own time, for 8
answers of 48 tokens at once (even) and for 32 answers whose lengths vary tenfold (uneven); and the tokens that differ.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable

import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from burnish.infer.batch import answer_many
from burnish.infer.seats import SeatLimits, SeatLoop
from burnish.infer.types import Ask
from burnish.models.generate import generate

SEATS, EVEN, UNEVEN = 8, 48, 32
VOCABULARY = 8192
_NEVER = VOCABULARY - 1


def model_of() -> LlamaForCausalLM:
    """A random Llama of 31 million weights."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=512, intermediate_size=1376, num_hidden_layers=8, num_attention_heads=8,
        num_key_value_heads=4, max_position_embeddings=1024,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def work() -> dict[str, tuple[list[list[int]], list[int]]]:
    """Prompts, and how long each answer is."""
    drawn = random.Random(0)
    prompts = [[drawn.randrange(3, _NEVER) for _ in range(drawn.randint(5, 90))] for _ in range(UNEVEN)]
    lengths = [int(6 * 10 ** drawn.random()) for _ in prompts]
    return {"even": (prompts[:SEATS], [EVEN] * SEATS), "uneven": (prompts, lengths)}


def over_seats(model: LlamaForCausalLM, prompts: list[list[int]], lengths: list[int]) -> list[list[int]]:
    asks = [Ask(ids, length) for ids, length in zip(prompts, lengths, strict=True)]
    return [found.ids for found in answer_many(SeatLoop(model, SeatLimits(SEATS, 1024)), asks)]


def config_of(length: int) -> GenerationConfig:
    return GenerationConfig(
        max_new_tokens=length, do_sample=False, eos_token_id=[_NEVER], pad_token_id=0, use_cache=True
    )


def one_by_one(model: LlamaForCausalLM, prompts: list[list[int]], lengths: list[int]) -> list[list[int]]:
    pairs = zip(prompts, lengths, strict=True)
    return [generate(model, [ids], config_of(length))[0] for ids, length in pairs]


def in_batches(model: LlamaForCausalLM, prompts: list[list[int]], lengths: list[int]) -> list[list[int]]:
    """Prompts of like length together, each batch as long as its longest answer."""
    order = sorted(range(len(prompts)), key=lambda at: -len(prompts[at]))
    found: dict[int, list[int]] = {}
    for start in range(0, len(order), SEATS):
        batch = order[start : start + SEATS]
        made = generate(model, [prompts[at] for at in batch], config_of(max(lengths[at] for at in batch)))
        found |= {at: ids[: lengths[at]] for at, ids in zip(batch, made, strict=True)}
    return [found[at] for at in range(len(prompts))]


WAYS: dict[str, Callable[..., list[list[int]]]] = {
    "burnish, over seats": over_seats,
    "generate, in batches": in_batches,
    "generate, one by one": one_by_one,
}


def main(rounds: int) -> None:
    model = model_of()
    for _ in range(rounds):
        found: dict[str, dict[str, float]] = {}
        for name, (prompts, lengths) in work().items():
            answers = {}
            for way, run in WAYS.items():
                begin = time.process_time()
                answers[way] = run(model, prompts, lengths)
                found.setdefault(way, {})[name] = sum(lengths) / (time.process_time() - begin)
            alone = answers["generate, one by one"]
            for way, ids in answers.items():
                found[way][f"{name}, same ids"] = sum(a == b for a, b in zip(ids, alone, strict=True)) / len(ids)
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(int(sys.argv[1]))
