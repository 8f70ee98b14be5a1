"""Bodies of ``/v1/chat/completions`` and ``/v1/completions`` -> typed requests, or all that is wrong with them.

Pure functions: nothing is tokenised, looked up, opened or fetched here. What OpenAI's clients may send is read and done
(``Settings``), accepted because it cannot change an answer here (``WITHOUT_EFFECT``), or refused by name with what to
use instead (``REFUSED``). Everything else is ignored and named in a header, or refused where the server is strict.

Source of the fields: OpenAI's API reference, as typed in the openai package (``CompletionCreateParams``); the others
are vLLM's and LLaMA-Factory's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from burnish.serve.api.fields import BodyFields
from burnish.serve.api.messages import AUTO, ChatMessage, ToolChoice, openai_tools, read_messages, read_tool_choice
from burnish.serve.http.errors import Refusal

WITHOUT_EFFECT = (
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    "prompt_cache_options", "verbosity", "moderation",
)  # fmt: skip
REFUSED = {
    "functions": 'Use "tools".',
    "function_call": 'Use "tool_choice".',
    "audio": "burnish answers with text.",
    "prediction": "Leave it out.",
    "web_search_options": "Nothing is ever fetched for a request.",
}
MOST_STOPS, MOST_BIASES, MOST_LOGPROBS, MOST_PROMPTS = 16, 1024, 20, 64
INT64 = 2**63


@dataclass(frozen=True)
class ResponseFormat:
    """``text`` leaves the answer free, ``json_object`` wants any JSON object, ``json_schema`` one of a schema."""

    kind: Literal["text", "json_object", "json_schema"] = "text"
    name: str = ""
    schema: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Settings:
    """Settings of the answer in both kinds of request. None: not given; then the operator's or the model's counts."""

    stream: bool = False
    include_usage: bool = False
    max_tokens: int | None = None
    n: int = 1
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    do_sample: bool | None = None
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    return_token_ids: bool = False
    top_logprobs: int | None = None  # None: no log-probabilities are asked for
    response_format: ResponseFormat = ResponseFormat()


@dataclass(frozen=True)
class ChatRequest:
    model: str
    messages: tuple[ChatMessage, ...]
    settings: Settings
    tools: tuple[Mapping[str, Any], ...] = ()
    tool_choice: ToolChoice = AUTO
    parallel_tool_calls: bool = True
    reasoning_effort: str | None = None
    template_arguments: Mapping[str, Any] = field(default_factory=dict)
    continue_final_message: bool = False
    ignored: tuple[str, ...] = ()

    @property
    def num_characters(self) -> int:
        """Characters of messages, calls and tools: at least that many are in the prompt."""
        texts = (len(one.content) + len(one.reasoning) for one in self.messages)
        calls = (len(call.arguments) for one in self.messages for call in one.calls)
        return sum(texts) + sum(calls) + (len(json.dumps(self.tools, ensure_ascii=False)) if self.tools else 0)


@dataclass(frozen=True)
class CompletionRequest:
    model: str
    prompts: tuple[str | tuple[int, ...], ...]
    settings: Settings
    echo: bool = False
    best_of: int = 1
    ignored: tuple[str, ...] = ()


@dataclass(frozen=True)
class Limits:
    """Limits that the operator sets."""

    max_choices: int = 8
    is_strict: bool = False


COMPLETION_TOKENS = 16
"""The length of a text completion whose request names none, as OpenAI's and vLLM's."""


def read_chat(body: Mapping[str, Any], limits: Limits) -> ChatRequest:
    """The body of a chat completion.

    Raises:
        Refusal: 400, with all problems.
    """
    fields = BodyFields(body)
    for name, remedy in REFUSED.items():
        if fields.raw(name) is not None:
            fields.unsupported(name, remedy)
    modalities = fields.items("modalities", most=8)
    if modalities is not None and modalities != ["text"]:
        fields.unsupported("modalities", 'burnish answers with text: leave it out, or send ["text"].')
    continues = fields.flag("continue_final_message")
    if continues and fields.flag("add_generation_prompt", default=False):
        fields.wrong("add_generation_prompt", "must be false with continue_final_message", True)
    fields.asked.add("add_generation_prompt")
    tools = openai_tools(fields)
    request = ChatRequest(
        model=fields.text("model", required=True) or "",
        messages=read_messages(fields, continues),
        settings=_settings(fields, limits, chat=True),
        tools=tools,
        tool_choice=read_tool_choice(fields, tools),
        parallel_tool_calls=fields.flag("parallel_tool_calls", default=True),
        reasoning_effort=fields.one_of(
            "reasoning_effort", ("none", "minimal", "low", "medium", "high", "xhigh", "max")
        ),
        template_arguments=fields.object("chat_template_kwargs") or {},
        continue_final_message=continues,
        ignored=(*_ignored(fields, limits), *(("tools.function.strict",) if _is_strict(tools) else ())),
    )
    fields.raise_all()
    return request


def _is_strict(tools: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether arguments must fit their schema even if the model chooses to call: here only a required call is
    held to it, and the header says so."""
    return any(tool["function"].get("strict") for tool in tools)


def read_completion(body: Mapping[str, Any], limits: Limits) -> CompletionRequest:
    """The body of a text completion.

    Raises:
        Refusal: 400, with all problems.
    """
    fields = BodyFields(body)
    if fields.raw("suffix") not in (None, ""):
        fields.unsupported("suffix", "Text is written from left to right here: leave it out.")
    echo = fields.flag("echo")
    settings = _settings(fields, limits, chat=False, least_tokens=0 if echo else 1)
    best_of = fields.integer("best_of", ge=1, le=limits.max_choices)
    if best_of is not None and best_of < settings.n:
        fields.wrong("best_of", f"must be at least n, which is {settings.n}", best_of)
    if best_of is not None and best_of > settings.n and settings.stream:
        fields.wrong("best_of", "must be n in a stream, where nothing can be chosen afterwards", best_of)
    request = CompletionRequest(
        model=fields.text("model", required=True) or "",
        prompts=_prompts(fields),
        settings=settings,
        echo=echo,
        best_of=best_of or settings.n,
        ignored=_ignored(fields, limits),
    )
    fields.raise_all()
    return request


def _settings(fields: BodyFields, limits: Limits, chat: bool, least_tokens: int = 1) -> Settings:
    stream = fields.flag("stream")
    options = fields.within("stream_options")
    if options is not None and not stream:
        fields.wrong("stream_options", "is allowed in a stream only; send stream: true", "no stream")
    include_usage = options.flag("include_usage") if options else False
    older = fields.integer("max_tokens", ge=least_tokens)
    newer = fields.integer("max_completion_tokens", ge=least_tokens) if chat else None
    if older is None and not chat:
        older = COMPLETION_TOKENS
    return Settings(
        stream=stream,
        include_usage=include_usage,
        max_tokens=newer if newer is not None else older,
        n=fields.integer("n", ge=1, le=limits.max_choices) or 1,
        temperature=fields.number("temperature", ge=0, le=2),
        top_p=fields.number("top_p", gt=0, le=1),
        top_k=_top_k(fields),
        min_p=fields.number("min_p", ge=0, le=1),
        do_sample=fields.flag("do_sample") if fields.values.get("do_sample") is not None else None,
        repetition_penalty=fields.number("repetition_penalty", gt=0, le=100),
        presence_penalty=fields.number("presence_penalty", ge=-2, le=2) or 0.0,
        frequency_penalty=fields.number("frequency_penalty", ge=-2, le=2) or 0.0,
        bias=_bias(fields),
        seed=fields.integer("seed", ge=-INT64, le=INT64 - 1),
        stop=_stops(fields),
        stop_token_ids=_ids(fields, "stop_token_ids", MOST_STOPS),
        min_tokens=fields.integer("min_tokens", ge=0) or 0,
        ignore_eos=fields.flag("ignore_eos"),
        skip_special_tokens=fields.flag("skip_special_tokens", default=True),
        return_token_ids=fields.flag("return_token_ids"),
        top_logprobs=_chat_logprobs(fields) if chat else fields.integer("logprobs", ge=0, le=MOST_LOGPROBS),
        response_format=_response_format(fields),
    )


def _top_k(fields: BodyFields) -> int | None:
    """vLLM writes -1 for all tokens, others 0."""
    value = fields.integer("top_k", ge=-1)
    return 0 if value == -1 else value


def _chat_logprobs(fields: BodyFields) -> int | None:
    wanted, top = fields.flag("logprobs"), fields.integer("top_logprobs", ge=0, le=MOST_LOGPROBS)
    if top is not None and not wanted:
        fields.wrong("top_logprobs", "is allowed with logprobs: true only", top)
    return (top or 0) if wanted else None


def _bias(fields: BodyFields) -> Mapping[int, float]:
    given = fields.object("logit_bias")
    if given is None:
        return {}
    if len(given) > MOST_BIASES:
        fields.wrong("logit_bias", f"may have {MOST_BIASES:,} entries", f"{len(given):,} entries")
        return {}
    inner, found = BodyFields(given, "logit_bias", fields.problems), {}
    for key in given:
        value = inner.number(key, ge=-100, le=100)
        if not (key.isascii() and key.isdigit() and len(key) < 10):
            inner.wrong(key, "must be the id of a token", key)
        elif value is not None:
            found[int(key)] = value
    return found


def _stops(fields: BodyFields) -> tuple[str, ...]:
    given = fields.raw("stop")
    if given is None:
        return ()
    listed = [given] if isinstance(given, str) else fields.items("stop", MOST_STOPS)
    for index, stop in enumerate(listed or ()):
        name = "stop" if isinstance(given, str) else f"stop[{index}]"
        if not isinstance(stop, str):
            fields.wrong_type(name, "text", stop)
        elif not stop:
            fields.wrong(name, "must not be empty: it would end every answer before it begins", '""')
    return tuple(stop for stop in listed or () if isinstance(stop, str))


def _ids(fields: BodyFields, name: str, most: int) -> tuple[int, ...]:
    listed = fields.items(name, most) or []
    for index, item in enumerate(listed):
        if not is_id(item):
            fields.wrong(f"{name}[{index}]", "must be the id of a token", item)
    return tuple(item for item in listed if is_id(item))


def is_id(item: Any) -> bool:
    return isinstance(item, int) and not isinstance(item, bool) and 0 <= item < 2**31


def _response_format(fields: BodyFields) -> ResponseFormat:
    given = fields.within("response_format")
    if given is None:
        return ResponseFormat()
    kind = given.one_of("type", ("text", "json_object", "json_schema"))
    if kind is None:
        if given.values.get("type") is None:
            given.missing("type")
        return ResponseFormat()
    if kind != "json_schema":
        return ResponseFormat("json_object" if kind == "json_object" else "text")
    wanted = given.within("json_schema", required=True)
    if wanted is None:
        return ResponseFormat()
    name, schema = wanted.text("name", required=True) or "", wanted.object("schema", required=True)
    wanted.text("description")
    wanted.flag("strict")
    return ResponseFormat("json_schema", name, schema or {})


def _prompts(fields: BodyFields) -> tuple[str | tuple[int, ...], ...]:
    """A text, texts, ids, or lists of ids."""
    given = fields.raw("prompt")
    if isinstance(given, str):
        return (given,)
    listed = fields.items("prompt", most=2**20, required=True)
    if not listed:
        return ()
    if all(is_id(item) for item in listed):
        return (tuple(listed),)
    if len(listed) > MOST_PROMPTS:
        fields.wrong("prompt", f"may be at most {MOST_PROMPTS} prompts", f"{len(listed):,} prompts")
        return ()
    return tuple(prompt for index, item in enumerate(listed) if (prompt := _prompt(fields, index, item)) is not None)


def _prompt(fields: BodyFields, index: int, item: Any) -> str | tuple[int, ...] | None:
    if isinstance(item, str):
        return item
    if isinstance(item, list) and item and all(is_id(token) for token in item):
        return tuple(item)
    fields.wrong(f"prompt[{index}]", "must be text or a list of token ids", item)
    return None


def _ignored(fields: BodyFields, limits: Limits) -> tuple[str, ...]:
    """Fields that nobody asked for; refused where the server is strict."""
    fields.asked.update(WITHOUT_EFFECT)
    unknown = fields.unknown
    if limits.is_strict:
        for name in unknown:
            fields.add("unsupported_parameter", name, "is not known here, and this server refuses what it ignores.")
    return tuple(unknown)


def unknown_model(name: str, known: list[str]) -> Refusal:
    message = f'There is no model "{name[:100]}". Served: {", ".join(known)}.'
    return Refusal(404, "model_not_found", message, param="model")
