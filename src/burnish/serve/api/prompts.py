"""Render the messages of a chat request to prompt ids, with the template that the model was trained with.

A conversation becomes an ``Example``, like a record of training data, and ``Template.prompt`` encodes it. Served
prompts therefore cannot differ from trained ones. Errors: messages or tools that the template cannot render, reasoning
options for a template without reasoning, and unknown template variables.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from burnish.data.chat.chat_template import JinjaFormat
from burnish.data.chat.rendering import RenderingTimeout
from burnish.data.chat.rows import Template
from burnish.data.chat.table import TemplateSpec
from burnish.data.images.image_file import MAX_PIXELS, BadImage, ImageFile
from burnish.data.stats import DataStats
from burnish.data.template_arguments import variables_of
from burnish.inference.images.reading import ImageReader
from burnish.loop.types import ContentPart, Example, Message, Row
from burnish.serve.api.image_access import access_disabled_error
from burnish.serve.api.messages import ChatMessage, ImageUrl, TextPart
from burnish.serve.api.prompt_queue import SlowRendering
from burnish.serve.api.requests import ChatRequest
from burnish.serve.http.errors import APIError

_RENDERING_ERRORS = (ValueError, KeyError, TypeError, AttributeError)
NO_REASONING_EFFORTS = ("none", "minimal")


class Prompter:
    """Renders prompts with one template.

    Args:
        template: template of the model, with the options it was loaded with.
        images: reads images of requests; None for a text-only model.
    """

    def __init__(self, template: Template, images: ImageReader | None = None) -> None:
        self.template, self.images = template, images
        self._template_with = lru_cache(maxsize=32)(self._with_variables)

    def row(self, request: ChatRequest) -> Row:
        """Return the prompt of a request as a row: ``input_ids``, and ``images`` if there are any.

        Raises:
            APIError: 400.
        """
        arguments = json.dumps(self._arguments(request), sort_keys=True)
        try:
            template = self._template_with(arguments)
            row = dict(template.prompt_row(self.example(request)))
        except _RENDERING_ERRORS as error:
            raise self._unwritable(error) from error
        if request.continue_final_message:
            row["input_ids"] = [*row["input_ids"], *self._continuation(template, request.messages[-1])]
        return row

    def whole(self, request: ChatRequest) -> list[int]:
        """Return the ids of a conversation with its last response, as in the pairs that a reward model is trained on.

        Raises:
            APIError: 400 if the template cannot render it, or the last message is not from the assistant.
        """
        if request.messages[-1].role != "assistant":
            message = "The last message must have the role assistant: its content is scored."
            raise APIError(400, "invalid_value", message, param="messages")
        try:
            example, stats = self.example(request.model_copy(update={"continue_final_message": False})), DataStats()
            (ids,) = self.template.encode_answers([example], stats)
        except _RENDERING_ERRORS as error:
            raise self._unwritable(error) from error
        if ids is None:
            reason = next((each for each in stats.records if each.kind == "dropped"), "").removeprefix("dropped: ")
            message = f"The chat template ({self.template.name}) cannot render the conversation: {reason}"
            raise APIError(400, "invalid_value", message, param="messages")
        return ids.tolist()

    def _unwritable(self, error: Exception) -> APIError:
        message = f"The chat template ({self.template.name}) cannot render the conversation: {_first_line(error)}"
        kind = SlowRendering if isinstance(error, RenderingTimeout) else APIError
        return kind(400, "invalid_value", message, param="messages")

    def example(self, request: ChatRequest) -> Example:
        """Return the conversation as an example, like a record of training data."""
        messages: Sequence[ChatMessage] = request.messages[: -1 if request.continue_final_message else None]
        tools = _json(request.offered) if request.offered else ""
        if tools and not self.shows_tools:
            message = (
                f"The chat template ({self.template.name}) does not support tools: remove tools from the request, "
                "or serve the model with a template that does."
            )
            raise APIError(400, "unsupported_parameter", message, param="tools")
        if self.template.spec is not None:
            messages = _join_messages(messages)
        system = None
        if messages and messages[0].role in ("system", "developer"):
            system, messages = messages[0].text, messages[1:]
        images = self._images(request.messages)
        markers = self.template.spec.tool_call_words if self.template.spec else TemplateSpec.tool_call_words
        thoughts = self.template.spec.thought_words if self.template.spec else TemplateSpec.thought_words
        written = tuple(
            replace(_message(message, markers, thoughts), content=_content(message, images))
            if message.parts
            else _message(message, markers, thoughts)
            for message in messages
        )
        return Example(written, system=system, tools=tools, source="the request", number=1)

    def _images(self, messages: Sequence[ChatMessage]) -> Mapping[int, ImageFile]:
        """Return the image of each part, keyed by ``id`` of the part. Raises APIError if one cannot be read."""
        with_images = [message for message in messages if message.parts]
        if not with_images:
            return {}
        if self.images is None:
            message = "The model supports text only: remove the image_url parts."
            raise APIError(400, "unsupported_content", message, param="messages")
        if any(message.role not in ("user", "tool") for message in with_images):
            message = "Only messages with the role user or tool can contain images."
            raise APIError(400, "unsupported_content", message, param="messages")
        places = [
            (part, f"messages[{place}].content[{number}].image_url.url")
            for place, message in enumerate(messages)
            for number, part in enumerate(message.parts)
            if part.image_url
        ]
        found = {id(part): self._image(part.image_url, param) for part, param in places if part.image_url}
        pixels = sum(image.width * image.height for image in found.values())
        if pixels > MAX_PIXELS:
            message = f"The images of the request have {pixels:,} pixels in total; the maximum is {MAX_PIXELS:,}."
            raise APIError(400, "invalid_value", message, param="messages")
        return found

    def _image(self, image_url: ImageUrl, param: str) -> ImageFile:
        assert self.images is not None
        if not image_url.url.startswith("data:"):
            raise access_disabled_error(image_url.url, param)
        try:
            return self.images.image(image_url.url, param, image_url.detail)
        except BadImage as error:
            raise APIError(400, "invalid_image", str(error), param=param) from None

    def _continuation(self, template: Template, response: ChatMessage) -> list[int]:
        """Return the ids of the response that should be continued. Raises APIError."""
        text = response.text
        if response.reasoning:
            message = "reasoning_content of the message to continue is not supported: remove it."
            raise APIError(400, "unsupported_parameter", message, param="messages")
        if not text:
            return []
        encoder = template.form.encoder
        hidden = encoder.hide(text, assistant=True)
        return [int(token) for token in encoder.encode([hidden])[hidden]]

    def _arguments(self, request: ChatRequest) -> dict[str, Any]:
        """Return the request's template variables, after checking them."""
        variables = dict(request.chat_template_kwargs)
        effort = request.reasoning_effort
        if effort is not None and (
            self.enables_thinking or effort not in NO_REASONING_EFFORTS
        ):  # "none" is valid for every template
            if not self.enables_thinking:
                message = "The model's template does not support reasoning: remove reasoning_effort from the request."
                raise APIError(400, "unsupported_parameter", message, param="reasoning_effort")
            variables.setdefault("enable_thinking", effort not in NO_REASONING_EFFORTS)
            if "reasoning_effort" in self.reads:
                variables.setdefault("reasoning_effort", effort)
        for name, value in variables.items():
            self._check(name, value)
        return variables

    def _check(self, name: str, value: Any) -> None:
        path = f"chat_template_kwargs.{name[:64]}"
        if name not in self.reads:
            message = f'"{path}" is not used by this template. It uses: {", ".join(sorted(self.reads)) or "none"}.'
            raise APIError(400, "unsupported_parameter", message, param=path)
        if self.template.spec is not None and not isinstance(value, bool | None):
            raise APIError(400, "invalid_type", f'"{path}" must be true, false or null.', param=path)

    @property
    def enables_thinking(self) -> bool:
        """Whether reasoning can be switched on or off."""
        return self.template.spec.reasoning if self.template.spec is not None else "enable_thinking" in self.reads

    @property
    def shows_tools(self) -> bool:
        """Whether tools are part of the prompt. Every named template renders them, a chat template may not."""
        form = self.template.form
        return not isinstance(form, JinjaFormat) or "tools" in variables_of("\0".join(form.templates.values()))

    @property
    def reads(self) -> frozenset[str]:
        """Names of the variables that the template uses and requests may set."""
        return self.template.form.arguments

    def _with_variables(self, arguments: str) -> Template:
        """Return the template with the given variables (JSON text)."""
        values: Mapping[str, Any] = json.loads(arguments)
        template = self.template
        if not values:
            return template
        form = template.form.with_arguments(values)
        return Template(template.name, form, template.options, template.tokenizer, template.spec, template.cutoff_len)


def _join_messages(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """Join consecutive messages of the same role with a blank line, since named templates require alternation."""
    found: list[ChatMessage] = []
    for message in messages:
        has_images = bool(message.parts or (found and found[-1].parts))
        is_alike = bool(found) and _role(found[-1]) == _role(message) != "tool"
        if is_alike and has_images:
            between = [TextPart(type="text", text="\n\n")]
            found[-1] = found[-1].model_copy(update={"content": [*_parts(found[-1]), *between, *_parts(message)]})
        elif is_alike and not (found[-1].calls or message.calls):
            text = "\n\n".join(filter(None, (found[-1].text, message.text)))
            reasoning = "\n\n".join(filter(None, (found[-1].reasoning, message.reasoning)))
            found[-1] = found[-1].model_copy(update={"content": text, "reasoning_content": reasoning})
        else:
            found.append(message)
    return found


def _role(message: ChatMessage) -> str:
    """Return the role of a message in templates; developer is OpenAI's newer name of system."""
    return "system" if message.role == "developer" else message.role


def _content(message: ChatMessage, images: Mapping[int, ImageFile]) -> tuple[ContentPart, ...]:
    """Return the parts of a message with images."""
    return tuple(
        ContentPart("text", part.text or "") if part.image_url is None else ContentPart("image", images[id(part)])
        for part in message.parts
    )


def _parts(message: ChatMessage) -> list[TextPart]:
    return message.parts or [TextPart(type="text", text=message.text)]


def _message(message: ChatMessage, call_words: tuple[str, str], thought_words: tuple[str, str]) -> Message:
    """Convert a message to the roles of training data: ``function`` has tool calls, ``observation`` a tool result."""
    if message.role == "tool":
        return Message("observation", message.text)
    if message.role != "assistant":
        return Message("user" if message.role == "user" else "system", message.text)
    thought = thought_words[0] + message.reasoning + thought_words[1] if message.reasoning else ""
    content = thought + message.text
    if not message.calls:
        return Message("assistant", content)
    calls = [{"name": call.function.name, "arguments": json.loads(call.function.arguments)} for call in message.calls]
    return Message("function", content + call_words[0] + _json(calls) + call_words[1])


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _first_line(error: BaseException) -> str:
    text = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
    return text.removeprefix("the request, record 1: ")[:300]
