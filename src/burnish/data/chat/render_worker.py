"""Worker process that renders chat templates, started by ``rendering.py``.

It reads a JSON request per line from standard input and writes all replies to a request as one line. The process forks
once its libraries are imported, and the child renders. A rendering that exceeds its time limit ends the child, because
the kernel's timer also stops code that never returns to Python; the reply is then ``null``, and another child is
forked. Memory is limited by ``RLIMIT_AS``. Rendering uses transformers' ``apply_chat_template``, so the text is that of
the installed version.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import IO, Any, cast

from burnish.config.bounds import LONGEST_RENDERING, RENDERING_BYTES


class _Characters(dict[str, Any]):
    """An encoding with one token per character, so that transformers' token mask becomes a character mask.

    transformers 5.24 reads the offsets of its tokens, earlier versions the token of a character.
    """

    def char_to_token(self, row: int, place: int) -> int:
        return place

    @property
    def encodings(self) -> list[_Characters]:
        return [self]

    @property
    def offsets(self) -> list[tuple[int, int]]:
        return [(place, place + 1) for place in range(len(self["input_ids"]))]


def main() -> None:
    """Answer requests, in one process after another, until standard input ends."""
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # replies are not mixed with output of libraries
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase

    class Plain(PreTrainedTokenizerBase):
        def __call__(self, text: str, **kwargs: Any) -> _Characters:
            return _Characters(input_ids=text)

    tokenizer: Any = cast(Any, Plain)()
    _bound_memory()
    while (status := _exit_status_of_fork(lambda: _answer_requests(tokenizer, replies))) == -signal.SIGALRM:
        replies.write(b"null\n")
        replies.flush()
    if status < 0:
        os.kill(os.getpid(), -status)  # end as the child did
    sys.exit(abs(status))


def _exit_status_of_fork(work: Callable[[], None]) -> int:
    """Run ``work`` in a forked process and return the exit code of the process, negative if a signal ended it."""
    process = os.fork()
    if process == 0:
        try:
            work()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def _answer_requests(tokenizer: Any, replies: IO[bytes]) -> None:
    """Answer requests until standard input ends."""
    for line in sys.stdin.buffer:
        request = json.loads(line)
        found = [_answer(tokenizer, request, *job) for job in _jobs(request)]
        replies.write(json.dumps(found).encode() + b"\n")
        replies.flush()


def _jobs(request: Mapping[str, Any]) -> Iterator[tuple[Any, ...]]:
    for template, chat, tools, parts, marks, variables in request["conversations"]:
        for end, is_prompt in parts:
            yield request["templates"][template], chat[:end], tools, is_prompt, marks, variables


def _answer(
    tokenizer: Any, request: Mapping[str, Any], template: str, chat: Any, tools: Any, is_prompt: bool, marks: bool,
    variables: Any,
) -> dict[str, Any]:  # fmt: skip
    """Return ``text`` and ``spans``, or ``error`` and ``message``."""
    signal.setitimer(signal.ITIMER_REAL, request["seconds"])
    try:
        found = tokenizer.apply_chat_template(
            chat, tools=tools, chat_template=template, add_generation_prompt=is_prompt, tokenize=marks,
            return_dict=marks, return_assistant_tokens_mask=marks, **{**request["variables"], **variables},
        )  # fmt: skip
        text = found["input_ids"] if marks else found
        if len(text) > LONGEST_RENDERING:
            return {"error": "memory"}
        text.encode()  # a ValueError for half of a surrogate pair, which no tokenizer accepts
        return {"text": text, "spans": _spans(found["assistant_masks"]) if marks else []}
    except (MemoryError, RecursionError):
        return {"error": "memory"}
    except Exception as error:  # a template can make Jinja raise any exception
        name, line = type(error).__name__, getattr(error, "lineno", None)
        kind = "syntax" if name == "TemplateSyntaxError" else "refused"
        return {"error": kind, "message": f"{error}" or name, "line": line}
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _spans(marks: list[int]) -> list[tuple[int, int]]:
    """Return [start, end) of each run of ones."""
    edges = [i for i in range(len(marks) + 1) if (i < len(marks) and marks[i]) != (i > 0 and marks[i - 1])]
    return list(zip(edges[::2], edges[1::2], strict=True))


def _bound_memory() -> None:
    """Limit the memory of this process. macOS has no such limit; there only the time of a rendering is limited."""
    if sys.platform != "linux":
        return
    with open("/proc/self/statm", encoding="ascii") as file:
        used_bytes = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (used_bytes + RENDERING_BYTES, used_bytes + RENDERING_BYTES))


if __name__ == "__main__":
    main()
