"""Prompts of chat requests: variables of templates, and messages that are joined or continued."""

from __future__ import annotations

from dataclasses import replace

import pytest

from burnish.data.chat.choose import load_template
from burnish.data.stats import DataStats
from burnish.loop.types import Message
from burnish.serve.api.body import read
from burnish.serve.api.prompts import Prompter
from burnish.serve.api.requests import ChatRequest
from burnish.serve.http.errors import APIError
from helpers.template_cases import byte_tokenizer, template_options

WITH_MOOD = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ mood }}{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QUESTION = {"role": "user", "content": "hi"}


def prompt_text(chat_template: str | None = None, name: str | None = None, **body: object) -> str:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = chat_template
    prompter = Prompter(load_template(template_options(template=name), tokenizer))
    return str(tokenizer.decode(prompter.row(read(ChatRequest, {"model": "m", **body}))["input_ids"]))


@pytest.mark.parametrize(
    "mood", ["glad", "\N{GRINNING FACE}é", 'a "b" \\ {% x %}\n', ["\N{GRINNING FACE}"], -1.5, None]
)
def test_template_variable_has_the_value_of_the_request(mood: object) -> None:
    text = prompt_text(WITH_MOOD, messages=[QUESTION], chat_template_kwargs={"mood": mood})
    assert text == f"<|im_start|>user\n{mood}hi<|im_end|>\n<|im_start|>assistant\n"


def test_value_that_the_template_cannot_render_is_an_error_of_the_request() -> None:
    template = WITH_MOOD.replace("{{ mood }}", "{{ mood.upper() if mood is defined }}")
    with pytest.raises(APIError, match="cannot render") as refused:
        prompt_text(template, messages=[QUESTION], chat_template_kwargs={"mood": 1})
    assert (refused.value.status, refused.value.param) == (400, "messages")


def test_joined_responses_keep_the_reasoning_of_each() -> None:
    thoughts = [{"role": "assistant", "content": text, "reasoning_content": f"because {text}"} for text in ("a", "b")]
    text = prompt_text(name="qwen3", messages=[QUESTION, *thoughts, QUESTION])
    assert "<think>\nbecause a\n\nbecause b\n</think>\n\na\n\nb<|im_end|>" in text


@pytest.mark.parametrize("name", ["chatml", "qwen3", "llama2"])
def test_scored_conversation_has_the_tokens_of_a_training_pair(name: str) -> None:
    template = load_template(template_options(template=name), byte_tokenizer())
    messages = [QUESTION, {"role": "assistant", "content": "<think>\nhm\n</think>\n\nb"}, QUESTION]
    request = read(ChatRequest, {"model": "m", "messages": [*messages, {"role": "assistant", "content": "red"}]})
    prompter = Prompter(template)
    pair = prompter.example(read(ChatRequest, {"model": "m", "messages": messages}))
    pair = replace(pair, chosen=(Message("assistant", "red"),), rejected=(Message("assistant", "blue"),))
    (row,) = template.encode_pairs([pair], DataStats())
    assert row is not None
    assert prompter.whole(request) == row["chosen_input_ids"].tolist()


def test_conversation_that_cannot_be_scored_is_refused_with_the_reason() -> None:
    prompter = Prompter(load_template(template_options(template="chatml"), byte_tokenizer()))
    request = read(ChatRequest, {"model": "m", "messages": [{"role": "assistant", "content": "red"}]})
    with pytest.raises(APIError, match=r"cannot render the conversation: .*do not alternate"):
        prompter.whole(request)


@pytest.mark.parametrize("second", ["system", "developer"])
def test_leading_system_messages_are_joined(second: str) -> None:
    system = [{"role": "system", "content": "Be brief."}, {"role": second, "content": "Be kind."}]
    text = prompt_text(name="qwen3", messages=[*system, QUESTION])
    assert text.startswith("<|im_start|>system\nBe brief.\n\nBe kind.<|im_end|>\n<|im_start|>user\nhi<|im_end|>")


def test_reasoning_of_a_response_to_continue_is_not_dropped_silently() -> None:
    response = {"role": "assistant", "content": "abc"}
    options = {"name": "qwen3", "continue_final_message": True}
    assert prompt_text(messages=[QUESTION, response], **options).endswith("<|im_start|>assistant\nabc")
    with pytest.raises(APIError, match="reasoning_content"):
        prompt_text(messages=[QUESTION, {**response, "reasoning_content": "because"}], **options)
