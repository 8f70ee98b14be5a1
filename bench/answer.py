"""The rate of answers over slots and by transformers' own ways: one process, all ways by turns.

In: nothing, or "engine" for what ``ask_server.py`` is compared with. Out: a line of JSON: way -> kind of work -> ids,
and the seconds that the process took. What is there before the first request, slots and a continuous batch, is made
outside of the clock.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack

import torch
from answer_material import EVEN, SEATS, STOP, Work, model_of, work
from transformers import ContinuousBatchingConfig, GenerationConfig

from burnish.inference.batch import generate_all
from burnish.inference.forward import STEP
from burnish.inference.scheduler import Scheduler
from burnish.inference.slots import SlotLimits
from burnish.inference.types import GenerationRequest, Sampling
from burnish.models.generate import generate

Way = Callable[[Work], list[list[int]]]


def over_slots(ends: ExitStack) -> Way:
    loop = Scheduler(model_of(), SlotLimits(SEATS, 1024))

    def answered(asked: Work) -> list[list[int]]:
        each = zip(asked.prompts, asked.lengths, asked.settings, strict=True)
        asks = [GenerationRequest(ids, length, sampling=_sampling(settings)) for ids, length, settings in each]
        return [found.ids for found in generate_all(loop, asks)]

    return answered


def _sampling(settings: dict[str, float] | None) -> Sampling:
    if settings is None:
        return Sampling(temperature=0)
    return Sampling(settings["temperature"], int(settings["top_k"]), settings["top_p"], seed=1)


def config_of(length: int, settings: dict[str, float] | None = None) -> GenerationConfig:
    return GenerationConfig(
        max_new_tokens=length, do_sample=settings is not None, eos_token_id=[STOP], pad_token_id=0, use_cache=True,
        **(settings or {}),
    )  # fmt: skip


def one_by_one(ends: ExitStack) -> Way:
    model = model_of()

    def answered(asked: Work) -> list[list[int]]:
        each = zip(asked.prompts, asked.lengths, asked.settings, strict=True)
        return [generate(model, [ids], config_of(length, settings))[0] for ids, length, settings in each]

    return answered


def in_batches(ends: ExitStack) -> Way:
    """Prompts of like length together, each batch as long as its longest answer, all with one setting."""
    model = model_of()

    def answered(asked: Work) -> list[list[int]]:
        order = sorted(range(len(asked.prompts)), key=lambda at: -len(asked.prompts[at]))
        found: dict[int, list[int]] = {}
        for start in range(0, len(order), SEATS):
            batch = order[start : start + SEATS]
            config = config_of(max(asked.lengths[at] for at in batch), asked.settings[0])
            made = generate(model, [asked.prompts[at] for at in batch], config)
            found |= {at: ids[: asked.lengths[at]] for at, ids in zip(batch, made, strict=True)}
        return [found[at] for at in range(len(order))]

    return answered


def continuously(ends: ExitStack) -> Way:
    """transformers' continuous batching, as large as what is asked for: its defaults take most of the memory."""
    managers: dict[bool, object] = {}

    def manager(draws: bool):
        if draws not in managers:
            # Per-request settings act only where the manager's own differ from those that change nothing.
            settings = {"temperature": 0.9, "top_k": 40, "top_p": 0.95} if draws else None
            size = ContinuousBatchingConfig(
                num_blocks=160, page_size=64, max_batch_tokens=512, max_requests_per_batch=SEATS,
                per_request_processors=draws,
            )  # fmt: skip
            made = model_of().init_continuous_batching(config_of(64, settings), size)
            made.warmup()
            made.start()
            managers[draws] = made
        return managers[draws]

    for draws in (False, True):
        ends.callback(manager(draws).stop, block=True, timeout=5)

    def answered(asked: Work) -> list[list[int]]:
        batch, found = manager(asked.settings[0] is not None), {}
        numbers = {}
        for at, ids in enumerate(asked.prompts):
            numbers[batch.add_request(ids, max_new_tokens=asked.lengths[at], **(asked.settings[at] or {}))] = at
        while len(found) < len(numbers):
            result = batch.get_result(timeout=60)
            if result is None or result.error:
                raise RuntimeError(f"continuous batching: {result and result.error}")
            if result.is_finished():
                found[numbers[result.request_id]] = result.generated_tokens
        return [found[at] for at in range(len(numbers))]

    return answered


WAYS: dict[str, Callable[[ExitStack], Way]] = {
    "burnish": over_slots,
    "transformers, generate in batches": in_batches,
    "transformers, generate one by one": one_by_one,
    "transformers, continuous batching": continuously,
}


def engine_alone() -> dict[str, float]:
    """Time that the engine takes without a server: seconds of a step of eight on the small model, by the clock and of
    processors; bytes of a slot."""
    prompts, length = work()["even"].prompts, 4 * EVEN
    loop, taken = Scheduler(model_of(is_small=True), SlotLimits(SEATS, 1024)), []
    for turn in range(8):
        begin, used = time.monotonic(), time.process_time()
        generate_all(loop, [GenerationRequest([number + turn for number in ids], length) for ids in prompts])
        taken.append(((time.monotonic() - begin) / length, (time.process_time() - used) / length))
    large = Scheduler(model_of(), SlotLimits(SEATS, 1024))
    generate_all(large, [GenerationRequest([5, 6, 7], 2)])
    clock, processor = (min(each) for each in zip(*taken, strict=True))
    size = large.way.cache_bytes / SEATS / STEP
    return {"small_token_s": clock, "small_token_cpu_s": processor, "slot_bytes_per_token": size}


def main() -> None:
    found: dict[str, dict[str, object]] = {}
    ways: dict[str, Way] = {}
    with ExitStack() as ends:
        for name, way in WAYS.items():
            try:
                ways[name] = way(ends)
            except Exception as error:  # whatever a peer fails with is its figure
                found[name] = {"failed": f"{type(error).__name__}: {error}"}
        for kind, asked in work().items():
            for name, way in ways.items():
                begin = time.process_time()
                ids = way(asked)
                found.setdefault(name, {})[kind] = {"ids": ids, "cpu_s": time.process_time() - begin}
    print("\n" + json.dumps(found))


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1:] == ["engine"]:
        print("\n" + json.dumps(engine_alone()))
    else:
        main()
