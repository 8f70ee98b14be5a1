"""Answers by LLaMA-Factory's engine (``ChatModel``), in its own environment.

In: the folder of the model, the kinds of work. Out: a line of JSON: kind -> the ids, and the seconds that the process
took. All requests are handed over at once; the engine answers as many at a time as it does by default.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time

import torch
import without_media  # noqa: F401 - first, because LLaMA-Factory imports torchaudio where it needs none
from answer_material import Work, ids_of, text_of, work
from llamafactory.chat import ChatModel


def answered(chat: ChatModel, asked: Work) -> list[list[int]]:
    async def all_at_once() -> list[list[int]]:
        each = zip(asked.prompts, asked.lengths, asked.settings, strict=True)
        replies = await asyncio.gather(
            *(
                chat.achat(
                    [{"role": "user", "content": text_of(ids)}],
                    max_new_tokens=length,
                    skip_special_tokens=False,
                    **(settings or {"do_sample": False, "temperature": 0.0}),
                )
                for ids, length, settings in each
            )
        )
        return [ids_of(reply[0].response_text) for reply in replies]

    return asyncio.run_coroutine_threadsafe(all_at_once(), chat._loop).result()


def main(folder: str, kinds: list[str]) -> None:
    chat = ChatModel(
        {"model_name_or_path": folder, "template": "empty", "infer_dtype": "float32", "infer_backend": "huggingface"}
    )
    found = {}
    for kind in kinds:
        begin = time.process_time()
        ids = answered(chat, work()[kind])
        found[kind] = {"ids": ids, "cpu_s": time.process_time() - begin}
    print("\n" + json.dumps(found))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1], sys.argv[2:])
