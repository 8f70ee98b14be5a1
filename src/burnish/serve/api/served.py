"""A loaded model for the routes: prompts, response parsers, sampling, model names.

``ServedModel`` translates between requests of the API and those of the engine.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any, Literal

from burnish.config.errors import UserError
from burnish.data.images.image_file import images_of
from burnish.inference.loaded_model import LoadedModel
from burnish.inference.replies.grammar import Grammars
from burnish.inference.replies.replies import Reply, ReplyPiece
from burnish.inference.replies.reply_forms import ReplyForm, opens_thought, schemas_of
from burnish.inference.scoring import ScoreEngine
from burnish.inference.types import BASE, Grammar, InferenceEngine
from burnish.loop.types import Row
from burnish.serve.api.prompts import Prompter
from burnish.serve.api.requests import BaseRequest, ChatRequest, CompletionRequest, unknown_model_error
from burnish.serve.api.responses import AnswerCall, Delta
from burnish.serve.http.errors import APIError

Reasoning = Literal["field", "inline", "drop"]
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class ServedModel:
    """A model with its adapters and its engine.

    Args:
        loaded: the loaded model.
        name: model name in requests.
        aliases: further names of the model.
        reasoning: where reasoning is returned: "field", "inline" or "drop".
        fingerprint: text that identifies weights and versions.
    """

    def __init__(
        self, loaded: LoadedModel, engine: InferenceEngine, name: str, aliases: Sequence[str] = (),
        reasoning: Reasoning = "field", fingerprint: str = "",
    ) -> None:  # fmt: skip
        self.scorer = engine if isinstance(engine, ScoreEngine) else None
        self.loaded, self.engine, self.name, self.reasoning = loaded, engine, name, reasoning
        self.fingerprint = f"fp_{hashlib.sha256(fingerprint.encode()).hexdigest()[:10]}"
        self.context, self.vocab_size = loaded.context, len(loaded.tokenizer)
        self.prompter = Prompter(loaded.template, loaded.images)
        self.created = int(time.time())
        self._names = {name: BASE, **dict.fromkeys(aliases, BASE)}
        for adapter in loaded.adapters:
            self._names |= {adapter: adapter, f"{name}:{adapter}": adapter}
        self.shown = lru_cache(maxsize=65536)(TokenPieces(loaded.tokenizer))

    def adapter_of(self, model: str) -> str:
        """Return the adapter (or BASE) for a request's ``model``. Raises APIError 404."""
        if model not in self._names:
            raise unknown_model_error(model, list(self._names))
        return self._names[model]

    def models(self) -> list[dict[str, Any]]:
        """Return the entries of ``/v1/models``: the model, its aliases and its adapters."""
        entries = []
        for name, adapter in self._names.items():
            if name == f"{self.name}:{adapter}":
                continue  # the long name of an adapter
            parent = self.name if adapter != BASE else None
            entries.append(
                {
                    "id": name, "object": "model", "created": self.created, "owned_by": "burnish", "parent": parent,
                    "root": adapter if adapter != BASE else self.name, "max_model_len": self.context,
                }
            )  # fmt: skip
        return entries

    # --- prompts ------------------------------------------------------------------------------------------------------

    def prompt_row(self, request: ChatRequest) -> Row:
        """Return the prompt as a row: ``input_ids``, and ``images`` if any. Raises APIError 400 if it is invalid."""
        return self.prompter.row(request)

    def counted_prompt(self, request: ChatRequest) -> tuple[list[int], list[dict[str, int]]]:
        """The prompt of a request, and the size and the tokens of each of its images."""
        row = self.prompt_row(request)
        images = [{"width": one.width, "height": one.height, "tokens": one.end - one.begin} for one in images_of(row)]
        return list(row["input_ids"]), images

    def image_fields(self, row: Row) -> Mapping[str, Any]:
        """Return the image fields of the engine's request. Decodes the images of the prompt.

        Raises:
            APIError: 400 for an image that cannot be decoded.
        """
        try:
            return {} if self.loaded.images is None else self.loaded.images.of(row)
        except UserError as error:
            raise APIError(400, "invalid_image", str(error), param="messages") from None

    def text_prompt(self, prompt: str | tuple[int, ...]) -> list[int]:
        """Return the ids of a text prompt; ids are returned unchanged.

        Text is encoded with the tokenizer's special prefix tokens. Names of control tokens in it are plain text.
        """
        if not isinstance(prompt, str):
            return list(prompt)
        tokenizer = self.loaded.tokenizer
        ids = list(tokenizer(prompt, split_special_tokens=True)["input_ids"])
        if not ids and tokenizer.bos_token_id is not None:
            ids = [tokenizer.bos_token_id]
        if not ids:
            raise APIError(400, "invalid_value", '"prompt" must contain at least one token.', param="prompt")
        return [int(token) for token in ids]

    def scored_text(self, text: str | ChatRequest) -> list[int]:
        """Return the ids to score: a text including its control tokens (as in LLaMA-Factory), or a conversation."""
        if not isinstance(text, str):
            return self.prompter.whole(text)
        return [int(token) for token in self.loaded.tokenizer(text, add_special_tokens=False)["input_ids"]]

    def text_of(self, ids: Sequence[int]) -> str:
        text: str = self.loaded.tokenizer.decode(
            list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return text

    # --- responses ----------------------------------------------------------------------------------------------------

    def chat_reader(self, request: ChatRequest, prompt: Sequence[int]) -> ReplyReader:
        form, tokenizer = self.loaded.form, self.loaded.tokenizer
        reply = Reply(
            form, tokenizer, offered=schemas_of(request.offered), stop=request.stop, stop_ids=self.stop_ids(request),
            in_thought=opens_thought(prompt, form, tokenizer), skips_special=request.skip_special_tokens,
            only_one_call=not request.parallel_tool_calls,
        )  # fmt: skip
        return ReplyReader(reply, self.reasoning, form)

    def text_reader(self, request: BaseRequest) -> ReplyReader:
        form = ReplyForm(thought_words=("", ""))
        reply = Reply(
            form, self.loaded.tokenizer, stop=request.stop, stop_ids=self.stop_ids(request),
            skips_special=request.skip_special_tokens,
        )  # fmt: skip
        return ReplyReader(reply, "field", form)

    def grammar(self, request: ChatRequest | CompletionRequest, prompt: Sequence[int]) -> Grammar | None:
        """Return the grammar of a response if requested. With open reasoning, it applies after the reasoning.

        Raises:
            APIError: 400 for an unsupported schema or tool format.
        """
        form, schema = self.loaded.form, None if request.response_format is None else request.response_format.schema_
        calls = request.required if isinstance(request, ChatRequest) else []
        if schema is None and not calls:
            return None
        param = "tool_choice" if calls else "response_format"
        is_open = isinstance(request, ChatRequest) and opens_thought(prompt, form, self.loaded.tokenizer)
        waits_for = form.thought_words[1] if is_open else ""
        try:
            if isinstance(request, ChatRequest) and request.offered:
                only_one = not request.parallel_tool_calls or not isinstance(request.tool_choice, str)
                allowed, grammars = schemas_of(calls or request.offered), self.grammars
                if schema is None or calls:  # a required call has no text, so the format of text does not apply
                    return grammars.calls(form.tool_format, allowed, only_one=only_one, waits_for=waits_for)
                return grammars.calls_or_json(form.tool_format, allowed, schema, only_one=only_one, waits_for=waits_for)
            return self.grammars.json_schema(schema or {}, waits_for)
        except UserError as error:
            raise APIError(400, "unsupported_parameter", f'"{param}": {error}', param=param) from error

    @cached_property
    def grammars(self) -> Grammars:
        model: Any = self.loaded.model
        rows = model.get_output_embeddings().weight.shape[0] if model is not None else self.vocab_size
        return Grammars(self.loaded.tokenizer, self.loaded.stop_ids, rows)

    def stop_ids(self, request: BaseRequest) -> frozenset[int]:
        own = () if request.ignore_eos else self.loaded.stop_ids
        return frozenset((*own, *request.stop_token_ids))


class ReplyReader:
    """``responses.DeltaReader`` for a reply: converts pieces to deltas, with reasoning as configured."""

    def __init__(self, reply: Reply, reasoning: Reasoning, form: ReplyForm) -> None:
        self.reply, self.reasoning, self.form = reply, reasoning, form
        self.num_thought_tokens = 0
        self._is_open = False  # an inline reasoning block is open

    def take(self, token: int, delta: Delta) -> bool:
        self._add(self.reply.feed([token]), delta)
        return self.reply.has_stopped

    def end(self, delta: Delta) -> None:
        self._add(self.reply.end(), delta)

    def _add(self, pieces: Sequence[ReplyPiece], delta: Delta) -> None:
        for piece in pieces:
            if piece.kind == "thought":
                self._add_reasoning(piece, delta)
                continue
            if self._is_open:
                delta.content += f"\n{self.form.thought_words[1]}\n\n"
                self._is_open = False
            if piece.call is not None:
                arguments = json.dumps(piece.call.arguments, ensure_ascii=False)
                delta.calls.append(AnswerCall(f"call_{secrets.token_hex(12)}", piece.call.name, arguments))
            else:
                delta.content += piece.text

    def _add_reasoning(self, piece: ReplyPiece, delta: Delta) -> None:
        self.num_thought_tokens += piece.tokens
        if self.reasoning == "field":
            delta.reasoning += piece.text
        elif self.reasoning == "inline":
            delta.content += piece.text if self._is_open else f"{self.form.thought_words[0]}\n{piece.text}"
            self._is_open = True


class TokenPieces:
    """Text and bytes of single tokens. An incomplete character has the text U+FFFD."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
        self._bytes = _bytes_of_characters() if "ByteLevel" in f"{type(decoder).__name__} {decoder!r}" else None
        self._whole = {token.content for token in tokenizer.added_tokens_decoder.values()}

    def __call__(self, token: int) -> tuple[str, bytes]:
        piece = self.tokenizer.convert_ids_to_tokens(token)
        if piece is None:
            return "", b""
        octets = piece.encode("utf-8") if piece in self._whole else self._octets(piece)
        return octets.decode("utf-8", "replace"), octets

    def _octets(self, piece: str) -> bytes:
        if self._bytes is not None:
            return b"".join(self._bytes.get(letter, letter.encode("utf-8")) for letter in piece)
        if single := _BYTE.fullmatch(piece):
            return bytes([int(single[1], 16)])
        return piece.replace("▁", " ").encode("utf-8")


def _bytes_of_characters() -> dict[str, bytes]:
    """Return the character -> byte mapping of byte-level vocabularies. Printable bytes map to themselves.

    Source: Radford et al. 2019, ``bytes_to_unicode`` of https://github.com/openai/gpt-2/blob/master/src/encoder.py
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [octet for octet in range(256) if octet not in printable]
    return {
        **{chr(octet): bytes([octet]) for octet in printable},
        **{chr(256 + place): bytes([octet]) for place, octet in enumerate(others)},
    }
