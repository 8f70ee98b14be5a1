"""The completion source with tools.

A completion with tools is generated in turns: a turn of the model, then the results of the tools that it called, whose
tokens are not trained, then the next turn of the model. Ids are never recomputed from text: the ids of results are
those of the chat template after a conversation of two messages, without the ids of these messages.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from burnish.config.errors import UserError
from burnish.data.chat.chat_template import JinjaFormat
from burnish.data.chat.choose import TemplateOptions
from burnish.data.chat.rendering import PROMPT, WHOLE, Conversation, chat_ids
from burnish.data.chat.truncate import EncodingOptions
from burnish.inference.replies.replies import read_whole
from burnish.inference.replies.reply_forms import ReplyForm, form_of_jinja, opens_thought, schemas_of
from burnish.inference.types import NoiseKey
from burnish.rollouts.completions import Completion, CompletionLimits, CompletionSource, with_text_results
from burnish.rollouts.user_functions import TimeLimitReached, call_function, run_coroutines
from burnish.trainer.notes import logger
from burnish.trainer.trl.rollouts.environments import Environments
from burnish.trainer.trl.rollouts.tool_functions import Tool, schemas, text_of, text_or_list

_LONGEST_RUN = 1 << 30


class _SchemasWithUnknownNames(dict[str, Any]):
    """Schemas by name. A call of an unknown name is parsed as a call and fails when it is run."""

    def __contains__(self, name: object) -> bool:
        return True

    def __missing__(self, name: str) -> dict[str, Any]:
        return {}


class _DefaultTemplateOptions(TemplateOptions, EncodingOptions):
    """The options of a chat template without changes."""


class ToolDialogue:
    """The format of tools, calls and results in a chat template.

    Args:
        tokenizer: tokenizer with the chat template.
        tools: schemas of all tools.
        variables: further arguments of the template.

    Raises:
        UserError: if calls cannot be parsed, or if the template renders a prompt differently when others follow.
    """

    def __init__(self, tokenizer: Any, tools: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> None:
        self.tokenizer, self.tools, self.variables = tokenizer, list(tools), dict(variables)
        self._has_warned = False
        if not tokenizer.chat_template:
            raise UserError("Tools require a chat template, but the tokenizer has none.", option="tools")
        self.form: ReplyForm = form_of_jinja(
            JinjaFormat(tokenizer.chat_template, _DefaultTemplateOptions(), tokenizer, "own")
        )
        if self.form.reader is None:
            what = "The chat template does not support tool calls, or uses an unknown format for them."
            raise UserError(what, remedy="Use the chat template of a model that supports tool calls.", option="tools")
        self.offered = _SchemasWithUnknownNames(schemas_of(self.tools))
        self.results_of([{"role": "tool", "name": next(iter(self.offered), "tool"), "content": "1"}])

    def prompt_ids(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[int]:
        """Return the ids of a prompt."""
        return self._ids(messages, add_generation_prompt=True, tools=list(tools) or None)

    def results_of(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Return the ids of tool messages from the end token of a turn to the start of the next one."""
        call = {"type": "function", "function": {"name": messages[0]["name"], "arguments": {}}}
        dummy = [{"role": "user", "content": "dummy"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
        before = self._ids(dummy, add_generation_prompt=False)
        ids = self._ids([*dummy, *with_text_results(messages)], add_generation_prompt=True)
        eos = self.tokenizer.eos_token_id
        if eos in before:
            before = before[: len(before) - before[::-1].index(eos)]
        if ids[: len(before)] == before:
            return ids[len(before) :]
        # The turn is rendered differently, such as without an empty thought. The completion keeps what was generated,
        # so only its end is needed here: the end token that is as many tokens of its kind into the conversation.
        of_prompt = self._ids(dummy[:1], add_generation_prompt=False)
        ends = [at for at, token in enumerate(ids) if token == eos]
        if ids[: len(of_prompt)] != of_prompt or not 0 < before.count(eos) <= len(ends):
            raise UserError(
                "The chat template changes a prompt when a tool result follows, so completions of several turns would "
                "differ from what the model generated.",
                remedy="Use a chat template that leaves earlier turns unchanged.",
                option="tools",
            )
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "The chat template renders an assistant turn differently when a tool result follows it, for example "
                "without its reasoning. Completions keep each turn as it was generated."
            )
        return ids[ends[before.count(eos) - 1] + 1 :]

    def message_of(self, prompt: Sequence[int], ids: Sequence[int], stops: frozenset[int]) -> dict[str, Any]:
        """Return the message of an assistant turn, with its ``tool_calls`` if any. Args: prompt: the ids before it."""
        in_thought = opens_thought(prompt, self.form, self.tokenizer)
        reply = read_whole(ids, self.form, self.tokenizer, offered=self.offered, stop_ids=stops, in_thought=in_thought)
        if not reply.calls:
            return {"role": "assistant", "content": self.tokenizer.decode(ids, skip_special_tokens=True)}
        calls = [{"type": "function", "function": {"name": c.name, "arguments": c.arguments}} for c in reply.calls]
        return {"role": "assistant", "content": reply.content, "tool_calls": calls}

    def _ids(self, messages: Sequence[Any], add_generation_prompt: bool, tools: Any = None) -> list[int]:
        part = PROMPT if add_generation_prompt else WHOLE
        (ids,) = chat_ids(self.tokenizer, [Conversation(list(messages), tools, [part], variables=self.variables)])
        return ids


@dataclass
class _PendingCompletion:
    """A completion in progress."""

    prompt: list[int]
    key: NoiseKey
    tools: Mapping[str, Tool]
    ids: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)
    is_ended: bool = False
    messages: list[dict[str, Any]] = field(default_factory=list)
    changed_prompt: list[int] | None = None


class ToolSource(CompletionSource):
    """Completions with tool calls.

    Args:
        inner: generates the turns of the model.
        form: format of the chat template.
        tools: functions by name; coroutines run concurrently.
        max_rounds: maximum number of tool rounds of a completion; None for no limit.
        context: maximum length of prompt and completion together.
        timeout_s: time limit of each call.
        environments: environments of the completions, or None.
    """

    def __init__(
        self, inner: CompletionSource, form: ToolDialogue, tools: Mapping[str, Tool], max_rounds: int | None,
        context: int, timeout_s: float, environments: Environments | None = None,
    ) -> None:  # fmt: skip
        self.inner, self.form, self.tools, self.context, self.timeout_s = inner, form, tools, context, timeout_s
        self.max_rounds = _LONGEST_RUN if max_rounds is None else max_rounds
        self.environments = environments
        self.records: Sequence[Mapping[str, Any]] = ()
        self.num_calls = self.num_failures = 0  # of the last call of ``complete``

    def set_records(self, records: Sequence[Mapping[str, Any]]) -> None:
        self.records = records

    def complete(
        self, prompts: Sequence[Sequence[int]], keys: Sequence[NoiseKey], limits: CompletionLimits
    ) -> list[Completion]:
        self.num_calls = self.num_failures = 0
        pending = [_PendingCompletion(list(prompt), key, self.tools) for prompt, key in zip(prompts, keys, strict=True)]
        if self.environments is not None:
            started = self.environments.reset(self.records, self.timeout_s)
            for completion, (messages, tools) in zip(pending, started, strict=True):
                completion.tools = {tool.__name__: tool for tool in tools}
                completion.prompt = completion.changed_prompt = self.form.prompt_ids(messages, schemas(tools))
            prompts = [completion.prompt for completion in pending]
        self._generate_turn(pending, prompts, limits)
        calling = [completion for completion in pending if completion.messages[-1].get("tool_calls")]
        rounds = 0
        while calling and rounds < self.max_rounds:
            rounds += 1
            for cut_off in (completion for completion in calling if not completion.is_ended):
                cut_off.messages[-1].pop("tool_calls")
            calling = [completion for completion in calling if completion.is_ended]
            results = self._call_tools(calling)
            continuing = [
                completion
                for completion, messages in zip(calling, results, strict=True)
                if self._append(completion, messages, limits.max_new_tokens)
            ]
            self._generate_turn(continuing, [completion.prompt + completion.ids for completion in continuing], limits)
            calling = [completion for completion in continuing if completion.messages[-1].get("tool_calls")]
        return [
            Completion(
                each.ids, each.is_ended, each.mask, each.logps if limits.wants_logps else None,
                messages=each.messages, prompt=each.changed_prompt,
            )
            for each in pending
        ]  # fmt: skip

    def free(self) -> None:
        self.inner.free()

    def _generate_turn(
        self, pending: Sequence[_PendingCompletion], prompts: Sequence[Sequence[int]], limits: CompletionLimits
    ) -> None:
        """Generate and parse the next turn of each completion."""
        if not pending:
            return
        remaining = [limits.max_new_tokens - len(completion.ids) for completion in pending]
        keys = [replace(completion.key, start=len(completion.ids)) for completion in pending]
        completions = self.inner.complete(prompts, keys, replace(limits, max_new_tokens=max(remaining)))
        for completion, prompt, room, each in zip(pending, prompts, remaining, completions, strict=True):
            ids = each.ids[:room]
            completion.is_ended = each.is_ended and len(ids) == len(each.ids)
            completion.messages.append(self.form.message_of(prompt, ids, limits.stop_ids))
            completion.ids += ids
            completion.mask += [1] * len(ids)
            completion.logps += (each.logps or [0.0] * len(ids))[:room]

    def _append(self, completion: _PendingCompletion, results: Sequence[dict[str, Any]], longest: int) -> bool:
        """Append the results of calls. Returns whether they fit and the completion continues."""
        ids = self.form.results_of(results)
        length = len(completion.ids) + len(ids)
        if length >= longest or len(completion.prompt) + length >= self.context:
            return False
        completion.messages += results
        completion.ids += ids
        completion.mask += [0] * len(ids)
        completion.logps += [0.0] * len(ids)
        return True

    def _call_tools(self, calling: Sequence[_PendingCompletion]) -> list[list[dict[str, Any]]]:
        """Run the calls of the last turn of each completion: functions one after another, then coroutines concurrently.

        Returns:
            The messages with the results of each completion, in order. A failure is a result too. A result is text or,
            for reward functions, a list that the tool returned.
        """
        calls = [(each, call["function"]) for each in calling for call in each.messages[-1]["tool_calls"]]
        names = [f"Tool {call['name']}" for _, call in calls]
        results: list[Any] = [
            self._call(completion.tools, call, name) for (completion, call), name in zip(calls, names, strict=True)
        ]
        waiting = [at for at, result in enumerate(results) if inspect.isawaitable(result)]
        finished = run_coroutines(
            [partial(_finish, results[at]) for at in waiting], [names[at] for at in waiting], self.timeout_s
        )
        for at, result in zip(waiting, finished, strict=True):
            results[at] = result
        self.num_calls += len(calls)
        self.num_failures += sum(isinstance(result, BaseException) for result in results)
        messages = iter(
            {"role": "tool", "name": call["name"], "content": self._content(result, name)}
            for (_, call), result, name in zip(calls, results, names, strict=True)
        )
        return [[next(messages) for _ in each.messages[-1]["tool_calls"]] for each in calling]

    def _call(self, tools: Mapping[str, Tool], call: Mapping[str, Any], name: str) -> Any:
        """Return the result of a function, which may be awaitable, or its exception."""
        if call["name"] not in tools:
            return ValueError(f"Tool {call['name']} not found.")

        def result() -> Any:
            found = tools[call["name"]](**call["arguments"])
            return found if inspect.isawaitable(found) else text_or_list(found)

        try:
            return call_function(result, self.timeout_s, name)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # the script's code may raise anything
            return error

    def _content(self, result: Any, name: str) -> Any:
        """Return the content of a tool message."""
        if isinstance(result, TimeLimitReached):
            return str({"error": f"{name} has not returned for {self.timeout_s:g} s."})
        if isinstance(result, SystemExit):
            return str({"error": f"{name} called sys.exit({result.code})."})
        return str({"error": text_of(result)}) if isinstance(result, BaseException) else result


async def _finish(result: Any) -> Any:
    return text_or_list(await result)
