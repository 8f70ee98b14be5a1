"""Request bodies of the API, with types and bounds.

Nothing is tokenized, opened or fetched here. Fields without effect are accepted (``WITHOUT_EFFECT``) or rejected with
an alternative (``UNSUPPORTED``). Unknown fields are named in a response header, or rejected in strict mode.

Source of the fields: OpenAI's API reference, as typed in the openai package. Others are vLLM's and LLaMA-Factory's.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BeforeValidator, Field, Tag, model_validator

from burnish.serve.api.body import (
    TEXT_OR_OTHER,
    AnyBody,
    Body,
    Integer,
    Stop,
    TokenId,
    api_error,
    combine_errors,
    format_value,
    problem,
    read,
    unknown_fields,
)
from burnish.serve.api.messages import MOST_IMAGES, MOST_MESSAGES, MOST_PARTS, MOST_TOOLS, ChatMessage, NamedTool, Tool
from burnish.serve.http.errors import APIError

WITHOUT_EFFECT = frozenset((
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    "prompt_cache_options", "verbosity", "moderation", "messages.annotations", "stream_options.include_obfuscation",
))  # fmt: skip
UNSUPPORTED = {
    "functions": 'Use "tools".',
    "function_call": 'Use "tool_choice".',
    "audio": "burnish returns text only.",
    "prediction": "Remove it.",
    "web_search_options": "burnish does not access the network for a request.",
    **dict.fromkeys((
        "guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs", "json_schema", "regex",
        "ebnf",
    ), 'Use "response_format".'),
    "allowed_token_ids": 'Use "logit_bias".',
    "bad_words": 'Use "logit_bias".',
    "chat_template": "Set the template when you start the server.",
    "documents": "Add their text to a message.",
}  # fmt: skip
"""Fields of OpenAI, vLLM and SGLang that would change the response -> an alternative."""
MOST_STOPS, MOST_BIASES, MOST_LOGPROBS, MOST_PROMPTS, MOST_IDS = 16, 1024, 20, 64, 2**18
COMPLETION_TOKENS = 16
"""Default length of a text completion, as in OpenAI's API and vLLM."""
_INT64 = 2**63

NAME_OF_TRAINERS = "model"
"""The model in requests for scores by ``reward_model_type: api``, and by LLaMA-Factory's PPO."""


class JsonSchema(Body):
    name: str
    schema_: dict[str, Any] = Field(alias="schema")
    description: str = ""
    strict: bool = False


class ResponseFormat(Body):
    """Required response format: ``text`` is unconstrained, ``json_object`` any JSON object, ``json_schema`` a
    schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _has_schema(self) -> ResponseFormat:
        if self.type == "json_schema" and self.json_schema is None:
            raise problem("missing_required_parameter", "is required.", ".json_schema")
        return self

    @property
    def schema_(self) -> dict[str, Any] | None:
        """The schema of a JSON response, None for text."""
        schema = {"type": "object"} if self.json_schema is None else self.json_schema.schema_
        return None if self.type == "text" else schema


class StreamingOptions(Body):
    include_usage: bool = False


def _checked_logit_bias(values: dict[str, float]) -> dict[str, float]:
    for key in values:
        if not (key.isascii() and key.isdigit() and len(key) < 10):
            raise problem("invalid_value", f"must be a token id. Received: {format_value(key)}.", f".{key[:80]}")
    return values


class BaseRequest(Body):
    """Fields of both kinds of completions. None means the default of the server or the model."""

    model: str
    stream: bool = False
    stream_options: StreamingOptions | None = None
    max_tokens: Annotated[Integer, Field(ge=0)] | None = None
    n: Annotated[Integer, Field(ge=1)] = 1
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[Integer, Field(ge=-1), AfterValidator(lambda k: max(k, 0))] | None = None  # -1 is vLLM's 0
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    do_sample: bool | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    logit_bias: Annotated[
        dict[str, Annotated[float, Field(ge=-100, le=100)]],
        Field(max_length=MOST_BIASES),
        AfterValidator(_checked_logit_bias),
    ] = Field(default={})
    seed: Annotated[Integer, Field(ge=-_INT64, lt=_INT64)] | None = None
    stop: Annotated[
        Annotated[Stop, Tag("·text")] | Annotated[list[Stop], Field(max_length=MOST_STOPS), Tag("·other")],
        TEXT_OR_OTHER, AfterValidator(lambda stop: [stop] if isinstance(stop, str) else stop),
    ] = Field(default=[])  # fmt: skip
    stop_token_ids: list[TokenId] = Field(default=[], max_length=MOST_STOPS)
    min_tokens: Annotated[Integer, Field(ge=0)] = 0
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    return_token_ids: bool = False
    response_format: ResponseFormat | None = None

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def sampling(self) -> dict[str, Any]:
        """Fields of ``inference.types.Sampling`` that the request sets, and ``do_sample``."""
        names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed", "do_sample")
        values = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        values |= {name: getattr(self, name) for name in ("presence_penalty", "frequency_penalty")}
        return {**values, "bias": self.token_bias}

    @property
    def token_bias(self) -> dict[int, float]:
        return {int(token): value for token, value in self.logit_bias.items()}

    @property
    def ignored(self) -> tuple[str, ...]:
        """Names of unknown fields, also of those in messages. Tools are part of the prompt with all their fields."""
        unknown = (name for name in unknown_fields(self) if not name.startswith("tools."))
        return tuple(name for name in dict.fromkeys(unknown) if name not in WITHOUT_EFFECT)

    def problems(self, most_choices: int) -> Iterator[APIError]:
        """Yield problems that involve several fields."""
        for name, remedy in UNSUPPORTED.items():
            if name in (self.model_extra or ()):
                yield api_error("unsupported_parameter", name, f"is not supported. {remedy}")
        if self.n > most_choices:
            yield api_error("invalid_value", "n", f"must be at most {most_choices}. Received: {self.n}.")
        if self.stream_options is not None and not self.stream:
            yield api_error("invalid_value", "stream_options", "requires stream: true.")


class ChatRequest(BaseRequest):
    """The body of ``/v1/chat/completions``."""

    messages: list[ChatMessage] = Field(min_length=1, max_length=MOST_MESSAGES)
    max_tokens: Annotated[Integer, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[Integer, Field(ge=1)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[Integer, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    tools: list[Tool] = Field(default=[], max_length=MOST_TOOLS)
    tool_choice: Annotated[
        Annotated[Literal["none", "auto", "required"], Tag("·text")] | Annotated[NamedTool, Tag("·other")],
        TEXT_OR_OTHER,
    ] = "auto"
    parallel_tool_calls: bool = True
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    chat_template_kwargs: dict[str, Any] = Field(default={})
    continue_final_message: bool = False
    add_generation_prompt: bool | None = None
    modalities: list[str] = Field(default=["text"])

    @model_validator(mode="after")
    def _has_few_images(self) -> ChatRequest:
        """Checked before any image is fetched or read from a file."""
        number = sum(part.image_url is not None for message in self.messages for part in message.parts)
        if number > MOST_IMAGES:
            what = f"must contain at most {MOST_IMAGES} images. Received: {number:,}."
            raise problem("invalid_value", what, ".messages")
        return self

    @property
    def has_images(self) -> bool:
        return any(message.parts for message in self.messages)

    @property
    def most_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def num_logprobs(self) -> int | None:
        """Number of most likely tokens to return log-probabilities of; None for no log-probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def offered(self) -> list[dict[str, Any]]:
        """The tools in the prompt, in OpenAI's format."""
        return [] if self.tool_choice == "none" else [tool.model_dump(exclude_unset=True) for tool in self.tools]

    @property
    def required(self) -> list[dict[str, Any]]:
        """The tools of which one must be called; empty if the model may choose."""
        if isinstance(self.tool_choice, str):
            return self.offered if self.tool_choice == "required" else []
        return [tool for tool in self.offered if tool["function"]["name"] == self.tool_choice.function.name]

    @property
    def num_characters(self) -> int:
        """Number of characters in messages, calls and tools: a lower bound for the length of the prompt."""
        texts = sum(len(one.text) + len(one.reasoning) for one in self.messages)
        calls = sum(len(call.function.arguments) for one in self.messages for call in one.calls)
        return texts + calls + (len(json.dumps(self.offered, ensure_ascii=False)) if self.tools else 0)

    @property
    def ignored(self) -> tuple[str, ...]:
        wants_json = self.response_format is not None and self.response_format.schema_ is not None
        # Schemas are enforced for required calls, and for calls instead of a JSON response.
        is_free = not self.required and not wants_json and any(tool.function.strict for tool in self.tools)
        names = ["tools.function.strict"] * is_free + ["response_format"] * (wants_json and bool(self.required))
        return (*super().ignored, *names)

    def problems(self, most_choices: int) -> Iterator[APIError]:
        yield from super().problems(most_choices)
        if self.modalities != ["text"]:
            message = 'is not supported: remove it, or send ["text"].'
            yield api_error("unsupported_parameter", "modalities", message)
        if self.top_logprobs is not None and not self.logprobs:
            yield api_error("invalid_value", "top_logprobs", "requires logprobs: true.")
        if self.add_generation_prompt is self.continue_final_message:
            must = "must be false if continue_final_message is true, and true otherwise."
            yield api_error("invalid_value", "add_generation_prompt", must)
        yield from self._problems_of_tools()
        yield from self._problems_of_order()

    def _problems_of_tools(self) -> Iterator[APIError]:
        names = [tool.function.name for tool in self.tools]
        if len(set(names)) < len(names):
            yield api_error("invalid_value", "tools", "must have different names.")
        if self.tool_choice == "required" and not names:
            yield api_error("invalid_value", "tool_choice", "requires tools.")
        if not isinstance(self.tool_choice, str) and self.tool_choice.function.name not in names:
            known = ", ".join(names) or "none were sent"
            yield api_error("invalid_value", "tool_choice.function.name", f"must be one of the tools ({known}).")

    def _problems_of_order(self) -> Iterator[APIError]:
        last = self.messages[-1]
        if self.continue_final_message and (last.role != "assistant" or last.calls):
            message = f"must end with an assistant message without tool calls. Received: role {last.role}."
            yield api_error("invalid_value", "messages", message)
        if not self.continue_final_message and last.role not in ("user", "tool"):
            where = f"messages[{len(self.messages) - 1}].role"
            message = "of the last message must be user or tool, or assistant with continue_final_message: true."
            yield api_error("invalid_value", where, f"{message} Received: {last.role}.")
        offered: list[str] = []
        for index, each in enumerate(self.messages):
            if each.role == "assistant":
                offered = [call.id for call in each.calls]
            elif each.role != "tool":
                offered = []
            elif each.tool_call_id not in (offered if each.tool_call_id else offered and [""]):
                ids = ", ".join(offered) or "none"
                what = f"must be the id of a tool call in the preceding assistant message ({ids})."
                received = f"Received: {format_value(each.tool_call_id)}."
                yield api_error("invalid_value", f"messages[{index}].tool_call_id", f"{what} {received}")


def _prompts(value: Any) -> Any:
    """Convert a text, texts, ids, or lists of ids to a list of texts and lists of ids."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        return value
    if all(isinstance(item, int) and not isinstance(item, bool) for item in value):
        return [value]
    if len(value) > MOST_PROMPTS:
        raise problem("invalid_value", f"must have at most {MOST_PROMPTS} prompts. Received: {len(value):,}.")
    for index, item in enumerate(value):
        if not isinstance(item, str | list):
            raise problem("invalid_value", "must be a string or a list of token ids.", f"[{index}]")
        if isinstance(item, list) and not all(isinstance(token, int) and 0 <= token < 2**31 for token in item or [""]):
            raise problem("invalid_value", "must be a string or a list of token ids.", f"[{index}]")
    return value


class CompletionRequest(BaseRequest):
    """The body of ``/v1/completions``."""

    prompt: Annotated[
        list[Annotated[Annotated[str, Tag("·text")] | Annotated[list[TokenId], Tag("·other")], TEXT_OR_OTHER]],
        Field(min_length=1), BeforeValidator(_prompts),
    ]  # fmt: skip
    logprobs: Annotated[Integer, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    echo: bool = False
    best_of: Annotated[Integer, Field(ge=1)] | None = None
    suffix: str = ""

    @property
    def most_tokens(self) -> int:
        return COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def num_made(self) -> int:
        """Number of completions generated per prompt; the best ``n`` are returned."""
        return self.best_of or self.n

    def problems(self, most_choices: int) -> Iterator[APIError]:
        yield from super().problems(most_choices)
        if self.suffix:
            yield api_error("unsupported_parameter", "suffix", "is not supported: remove it.")
        if self.max_tokens == 0 and not self.echo:
            yield api_error("invalid_value", "max_tokens", "must be at least 1 without echo. Received: 0.")
        if self.num_made > most_choices:
            yield api_error("invalid_value", "best_of", f"must be at most {most_choices}. Received: {self.best_of}.")
        if self.num_made < self.n:
            yield api_error("invalid_value", "best_of", f"must be at least n ({self.n}). Received: {self.best_of}.")
        if self.num_made > self.n and self.stream:
            yield api_error("invalid_value", "best_of", "must equal n if stream is true.")


class ModelRequest(Body):
    """The body of ``/load_model``."""

    model: str


class TokenizeRequest(Body):
    model: str | None = None
    prompt: str | None = None
    messages: Any = None
    add_generation_prompt: bool = True

    @model_validator(mode="after")
    def _has_prompt(self) -> TokenizeRequest:
        if self.prompt is None and self.messages is None:
            raise problem("missing_required_parameter", "is required.", ".prompt")
        return self


class DetokenizeRequest(Body):
    model: str | None = None
    tokens: Annotated[list[TokenId], Field(max_length=MOST_IDS)]


class ScoreRequest(Body):
    model: str
    messages: list[Any] = Field(min_length=1, max_length=MOST_PARTS)
    max_length: Annotated[Integer, Field(ge=1)] | None = None


AnyRequest = TypeVar("AnyRequest", bound=BaseRequest)


def read_request(kind: type[AnyRequest], body: Mapping[str, Any], most_choices: int, is_strict: bool) -> AnyRequest:
    """Parse the body of a completion request. With ``is_strict``, unknown fields are rejected. Raises like ``read``."""
    request = read(kind, body)
    problems = list(request.problems(most_choices))
    if is_strict:
        problems += _unknown_fields(name for name in request.ignored if name not in UNSUPPORTED)
    if problems:
        raise combine_errors(problems)
    return request


def read_fields(kind: type[AnyBody], body: Mapping[str, Any], is_strict: bool) -> tuple[AnyBody, tuple[str, ...]]:
    """Parse the body of another request. Returns it with the names of its unknown fields, which ``is_strict`` rejects.
    Raises like ``read``."""
    fields = read(kind, body)
    ignored = tuple(fields.model_extra or ())
    if is_strict and ignored:
        raise combine_errors(list(_unknown_fields(ignored)))
    return fields, ignored


def _unknown_fields(names: Iterable[str]) -> Iterator[APIError]:
    for name in names:
        message = "is unknown, and this server rejects unknown fields (api_strict)."
        yield api_error("unsupported_parameter", name, message)


def unknown_model_error(name: str, known: list[str]) -> APIError:
    message = f'The model "{name[:100]}" does not exist. Available: {", ".join(known)}.'
    return APIError(404, "model_not_found", message, param="model")
