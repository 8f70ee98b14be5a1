"""Messages and tools of a chat request in OpenAI's format, as pydantic models.

Errors, each with its path: parts that are neither text nor image, arguments that are not a JSON object, and tool
parameters that a template could not list.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, NoReturn

from pydantic import AfterValidator, BeforeValidator, Field, Tag, model_validator

from burnish.serve.api.body import TEXT_OR_OTHER, Body, format_value, problem

MOST_MESSAGES, MOST_TOOLS, MOST_CALLS, MOST_PARTS = 4096, 128, 128, 1024
MOST_IMAGES = 64
"""Maximum number of images per request."""


def _part_kind(kind: str) -> str:
    if kind not in ("text", "refusal", "image_url"):
        message = f'must be "text" or "image_url": audio and files are not supported. Received: "{kind[:40]}".'
        raise problem("unsupported_content", message)
    return kind


class ImageUrl(Body):
    """URL of an image, and the level of detail."""

    url: str
    detail: Literal["auto", "low", "high"] = "auto"


class TextPart(Body):
    """A part of a message's content: text, refusal or image."""

    type: Annotated[str, AfterValidator(_part_kind)]
    text: str | None = None
    refusal: str | None = None
    image_url: ImageUrl | None = None

    @model_validator(mode="after")
    def _has_text(self) -> TextPart:
        if getattr(self, self.type) is None:
            raise problem("missing_required_parameter", "is required.", f".{self.type}")
        return self


def _join_content(content: str | list[TextPart]) -> str | list[TextPart]:
    """Return the content as text, or as a list of parts if there are images."""
    if isinstance(content, str) or any(part.image_url for part in content):
        return content
    return "".join(getattr(part, part.type) for part in content)


def _arguments_as_json(value: Any) -> Any:
    """Return an object as JSON text. Some clients send the object itself."""
    if isinstance(value, dict):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, str) and not _is_json_object(value or "{}"):
        raise problem("invalid_value", f"must be a JSON object as a string. Received: {format_value(value)}.")
    return value or "{}"


def _is_json_object(text: str) -> bool:
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
        json.dumps(value, ensure_ascii=False).encode()  # a ValueError for an unpaired surrogate
    except (ValueError, RecursionError):
        return False
    return isinstance(value, dict)


def _refuse_constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is not a JSON number")


class CalledFunction(Body):
    name: str
    arguments: Annotated[str, BeforeValidator(_arguments_as_json)]


class ToolCall(Body):
    """A tool call of the assistant; ``function.arguments`` is a JSON object as text."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatMessage(Body):
    """A message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[
        Annotated[str, Tag("·text")] | Annotated[list[TextPart], Field(max_length=MOST_PARTS), Tag("·other")],
        TEXT_OR_OTHER, AfterValidator(_join_content),
    ] | None = None  # fmt: skip
    reasoning_content: str = ""
    tool_calls: list[ToolCall] = Field(default=[], max_length=MOST_CALLS)
    tool_call_id: str = ""

    @model_validator(mode="after")
    def _has_content(self) -> ChatMessage:
        may_lack = self.role == "assistant" and (self.tool_calls or self.reasoning_content)
        if self.content is None and not may_lack:
            raise problem("missing_required_parameter", "is required.", ".content")
        return self

    @property
    def text(self) -> str:
        """The text content, without images."""
        return self.content or "" if not isinstance(self.content, list) else "".join(p.text or "" for p in self.content)

    @property
    def parts(self) -> list[TextPart]:
        """The parts of a content with images; empty for text content."""
        return self.content if isinstance(self.content, list) else []

    @property
    def calls(self) -> list[ToolCall]:
        return self.tool_calls if self.role == "assistant" else []

    @property
    def reasoning(self) -> str:
        return self.reasoning_content if self.role == "assistant" else ""


def _tool_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """Raise an error for a schema that a template cannot list parameter by parameter."""
    properties, required = schema.get("properties", {}), schema.get("required", [])
    is_schema = (
        schema.get("type", "object") == "object"
        and isinstance(properties, dict)
        and all(isinstance(each, dict) for each in properties.values())
        and isinstance(required, list)
        and all(isinstance(name, str) for name in required)
    )
    if not is_schema:
        raise problem("invalid_value", 'must be a JSON schema of an object with "properties".')
    return schema


class ToolFunction(Body):
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
    description: str = ""
    strict: bool = False
    parameters: Annotated[dict[str, Any], AfterValidator(_tool_schema)] = Field(default={})


class Tool(Body):
    type: Literal["function"] = "function"
    function: ToolFunction


class FunctionName(Body):
    name: str


class NamedTool(Body):
    type: Literal["function"] = "function"
    function: FunctionName


def ends_with_assistant(messages: Any) -> bool:
    """Return whether a conversation, as a JSON value, ends with an assistant message."""
    last = messages[-1] if isinstance(messages, list) and messages else None
    return isinstance(last, dict) and last.get("role") == "assistant"
