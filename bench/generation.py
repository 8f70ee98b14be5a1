"""Measure the rate of concurrent generation with burnish's engine and with transformers, alternating in one process.

    python bench/generation.py [engine]

Prints a line of JSON: backend -> workload -> ids, and processor seconds. With ``engine``, measures the engine alone,
for comparison with ``measure_server.py``. Setup before the first request (slots, continuous batch) is not measured.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from generation_material import END_TOKEN, EVEN, SLOTS, Workload, make_model, workloads
from transformers import ContinuousBatchingConfig, GenerationConfig

from burnish.inference.batch import generate_all
from burnish.inference.forward import STEP
from burnish.inference.scheduler import Scheduler
from burnish.inference.slots import SlotLimits
from burnish.inference.types import GenerationRequest, Sampling
from burnish.models.generate import generate
from burnish.models.patches.packed import pack

Backend = Callable[[Workload], list[list[int]]]


def burnish_engine(stack: ExitStack) -> Backend:
    """Generate with burnish's scheduler, as the API does."""
    model = make_model().requires_grad_(False)
    pack(model)
    scheduler = Scheduler(model, SlotLimits(SLOTS, 1024))

    def respond(workload: Workload) -> list[list[int]]:
        each = zip(workload.prompts, workload.lengths, workload.settings, strict=True)
        requests = [GenerationRequest(ids, length, sampling=_sampling(settings)) for ids, length, settings in each]
        return [result.ids for result in generate_all(scheduler, requests)]

    return respond


def _sampling(settings: dict[str, float] | None) -> Sampling:
    if settings is None:
        return Sampling(temperature=0)
    return Sampling(settings["temperature"], int(settings["top_k"]), settings["top_p"], seed=1)


def config_of(length: int, settings: dict[str, float] | None = None) -> GenerationConfig:
    """Return the configuration of ``generate``. Args: settings: None for greedy decoding."""
    return GenerationConfig(
        max_new_tokens=length, do_sample=settings is not None, eos_token_id=[END_TOKEN], pad_token_id=0, use_cache=True,
        **(settings or {}),
    )  # fmt: skip


def one_by_one(stack: ExitStack) -> Backend:
    """Generate with transformers, one prompt at a time."""
    model = make_model()

    def respond(workload: Workload) -> list[list[int]]:
        each = zip(workload.prompts, workload.lengths, workload.settings, strict=True)
        return [generate(model, [ids], config_of(length, settings))[0] for ids, length, settings in each]

    return respond


def in_batches(stack: ExitStack) -> Backend:
    """Generate in batches of prompts with similar lengths; each batch is as long as its longest response, and all have
    the same settings."""
    model = make_model()

    def respond(workload: Workload) -> list[list[int]]:
        order = sorted(range(len(workload.prompts)), key=lambda index: -len(workload.prompts[index]))
        results: dict[int, list[int]] = {}
        for start in range(0, len(order), SLOTS):
            batch = order[start : start + SLOTS]
            config = config_of(max(workload.lengths[index] for index in batch), workload.settings[0])
            outputs = generate(model, [workload.prompts[index] for index in batch], config)
            results |= {index: ids[: workload.lengths[index]] for index, ids in zip(batch, outputs, strict=True)}
        return [results[index] for index in range(len(order))]

    return respond


def continuous_batching(stack: ExitStack) -> Backend:
    """Generate with transformers' continuous batching, sized for the workload: its defaults take most of the memory."""
    managers: dict[bool, Any] = {}

    def manager(samples: bool) -> Any:
        if samples not in managers:
            # Per-request settings have an effect only if those of the manager differ from the neutral values.
            settings = {"temperature": 0.9, "top_k": 40, "top_p": 0.95} if samples else None
            size = ContinuousBatchingConfig(
                num_blocks=160, page_size=64, max_batch_tokens=512, max_requests_per_batch=SLOTS,
                per_request_processors=samples,
            )  # fmt: skip
            created = make_model().init_continuous_batching(config_of(64, settings), size)
            created.warmup()
            created.start()
            managers[samples] = created
        return managers[samples]

    for samples in (False, True):
        stack.callback(manager(samples).stop, block=True, timeout=5)

    def respond(workload: Workload) -> list[list[int]]:
        batch = manager(workload.settings[0] is not None)
        results: dict[int, Any] = {}
        numbers = {}
        for index, ids in enumerate(workload.prompts):
            numbers[
                batch.add_request(ids, max_new_tokens=workload.lengths[index], **(workload.settings[index] or {}))
            ] = index
        while len(results) < len(numbers):
            result = batch.get_result(timeout=60)
            if result is None or result.error:
                raise RuntimeError(f"continuous batching: {result and result.error}")
            if result.is_finished():
                results[numbers[result.request_id]] = result.generated_tokens
        return [results[index] for index in range(len(numbers))]

    return respond


BACKENDS: dict[str, Callable[[ExitStack], Backend]] = {
    "burnish": burnish_engine,
    "transformers, generate in batches": in_batches,
    "transformers, generate one by one": one_by_one,
    "transformers, continuous batching": continuous_batching,
}


def engine_alone() -> dict[str, float]:
    """Return the time of the engine without a server: wall and processor seconds of a step of eight with the small
    model, and bytes per token of a slot."""
    prompts, length = workloads()["even"].prompts, 4 * EVEN
    small = make_model(is_small=True).requires_grad_(False)
    pack(small)
    scheduler, taken = Scheduler(small, SlotLimits(SLOTS, 1024)), []
    for turn in range(8):
        begin, begin_cpu = time.monotonic(), time.process_time()
        generate_all(scheduler, [GenerationRequest([number + turn for number in ids], length) for ids in prompts])
        taken.append(((time.monotonic() - begin) / length, (time.process_time() - begin_cpu) / length))
    large = Scheduler(make_model(), SlotLimits(SLOTS, 1024))
    generate_all(large, [GenerationRequest([5, 6, 7], 2)])
    wall_s, cpu_s = (min(each) for each in zip(*taken, strict=True))
    size = large.backend.cache_bytes / SLOTS / STEP
    return {"small_token_s": wall_s, "small_token_cpu_s": cpu_s, "slot_bytes_per_token": size}


def main() -> None:
    results: dict[str, dict[str, object]] = {}
    backends: dict[str, Backend] = {}
    with ExitStack() as stack:
        for name, create in BACKENDS.items():
            try:
                backends[name] = create(stack)
            except Exception as error:  # any failure of another library is reported in its line
                results[name] = {"failed": f"{type(error).__name__}: {error}"}
        for kind, workload in workloads().items():
            for name, backend in backends.items():
                begin = time.process_time()
                ids = backend(workload)
                results.setdefault(name, {})[kind] = {"ids": ids, "cpu_s": time.process_time() - begin}
    print("\n" + json.dumps(results))


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1:] == ["engine"]:
        print("\n" + json.dumps(engine_alone()))
    else:
        main()
