"""Measure generation with LLaMA-Factory's engine (``ChatModel``), in its own environment.

    python bench/generation_llamafactory.py MODEL WORKLOAD ...

Prints a line of JSON: workload -> ids, and processor seconds. All requests are sent at once; the engine processes as
many at a time as by default.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time

import torch
import without_torchaudio  # noqa: F401 - first, because LLaMA-Factory imports torchaudio without need
from generation_material import Workload, to_ids, to_text, workloads
from llamafactory.chat import ChatModel


def respond(chat: ChatModel, workload: Workload) -> list[list[int]]:
    """Send all prompts of a workload at once and return the ids of the responses."""

    async def all_at_once() -> list[list[int]]:
        each = zip(workload.prompts, workload.lengths, workload.settings, strict=True)
        replies = await asyncio.gather(
            *(
                chat.achat(
                    [{"role": "user", "content": to_text(ids)}],
                    max_new_tokens=length,
                    skip_special_tokens=False,
                    **(settings or {"do_sample": False, "temperature": 0.0}),
                )
                for ids, length, settings in each
            )
        )
        return [to_ids(reply[0].response_text) for reply in replies]

    return asyncio.run_coroutine_threadsafe(all_at_once(), chat._loop).result()


def main(folder: str, names: list[str]) -> None:
    chat = ChatModel(
        {"model_name_or_path": folder, "template": "empty", "infer_dtype": "float32", "infer_backend": "huggingface"}
    )
    results = {}
    for name in names:
        begin = time.process_time()
        ids = respond(chat, workloads()[name])
        results[name] = {"ids": ids, "cpu_s": time.process_time() - begin}
    print("\n" + json.dumps(results))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1], sys.argv[2:])
