"""A held-out record as a question: what a model is asked, and what the record answers.

In: values of a run, as its file has them. Out: one record of its evaluation set, cut before its last answer, in the
roles of a chat request. The split is that of the run, since the same function makes it.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

from burnish.app.plan import plan
from burnish.core.errors import Problem, UserError
from burnish.core.options import Given
from burnish.core.types import Answer, Example, Message
from burnish.data.sets.sources import load_datasets
from burnish.data.tally import Tally


def held_out(values: Mapping[str, Any], number: int | None = None) -> dict[str, Any]:
    """The question of a record, and its place.

    Args:
        values: name -> value.
        number: of the record in the evaluation set, from 1; None draws one.
    Raises:
        UserError: where the run holds nothing out, or the record asks nothing.
    """
    options = plan({name: Given(value, "") for name, value in values.items()}).options
    sets = load_datasets(options, options.seed, Tally(), stage=options.stage)
    records = list(chain.from_iterable(sets.eval.values()))
    if not records:
        why = "Set val_size or eval_dataset, and some records are held out."
        raise UserError(Problem("This run holds no record out of its training.", remedy=why))
    chosen = number or random.randrange(len(records)) + 1  # noqa: S311  (a record to look at)
    if not 1 <= chosen <= len(records):
        raise UserError(Problem(f"Records 1 to {len(records)} are held out. Received: {chosen}."))
    record = records[chosen - 1]
    return {**question_of(record), "number": chosen, "of": len(records), "place": record.place}


def question_of(record: Example) -> dict[str, Any]:
    """``{"system", "tools", "before", "user", "answer"}``: the conversation up to the last question, and its answer.

    Raises:
        UserError: for a text without a question.
    """
    messages = record.messages
    asks = max((place for place, one in enumerate(messages) if one.role == "user"), default=None)
    if asks is not None:
        before, user, behind = messages[:asks], messages[asks].content, messages[asks + 1 :]
    elif record.prompt is not None:
        before, user, behind = (), record.prompt, ()
    else:
        raise UserError(Problem(f"{record.place}: it is a text, and asks nothing."))
    given = record.chosen if record.chosen is not None else record.completion if behind == () else behind
    return {
        "system": record.system or "", "tools": json.loads(record.tools) if record.tools else [],
        "before": list(_in_chat_roles(before)), "user": user, "answer": _text(given),
    }  # fmt: skip


def _text(answer: Answer | None) -> str:
    return answer if isinstance(answer, str) else "\n\n".join(one.content for one in answer or ())


def _in_chat_roles(messages: Iterable[Message]) -> Iterator[dict[str, Any]]:
    """Calls get ids, and what they came back with takes these in order."""
    waiting: list[str] = []
    for place, message in enumerate(messages):
        if message.role == "function":
            found = json.loads(message.content)
            calls = found if isinstance(found, list) else [found]
            waiting = [f"call_{place}_{number}" for number in range(len(calls))]
            yield {"role": "assistant", "content": "", "tool_calls": [
                {"id": id, "type": "function",
                 "function": {"name": call["name"], "arguments": json.dumps(call.get("arguments", {}))}}
                for id, call in zip(waiting, calls, strict=True)
            ]}  # fmt: skip
        elif message.role == "observation":
            yield {"role": "tool", "content": message.content, "tool_call_id": waiting.pop(0) if waiting else "call_0"}
        else:
            yield {"role": message.role, "content": message.content}
