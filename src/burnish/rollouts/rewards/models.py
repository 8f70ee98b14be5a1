"""Reward models as reward functions.

A reward model is a language model with a value head (stage: rm), a sequence classifier with one label, an adapter of
either, or a server. It reads prompt and completion in its own chat template. The score is that of the last token, whose
position is known from the length and not from padding.
"""

# B sequences in a pass, T tokens of the longest, H hidden size

from __future__ import annotations

import json
import math
import os
import reprlib
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.client import HTTPException
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from burnish.config.errors import Problem, UserError, first_line
from burnish.data.chat.rendering import Conversation, UnreadableTemplate, chat_texts
from burnish.losses.reward import ValueHead
from burnish.models.options import ModelOptions
from burnish.models.reward_files import WEIGHT, check_head_width, load_reward_model, load_reward_tokenizer
from burnish.models.source import check_model_path
from burnish.rollouts.completions import with_text_results

_BATCH_SIZE = 8
_TRIES, _TIMEOUT_S = 3, 30.0
_SAVE_TEMPLATE = "Save its tokenizer with a chat template."
_SHOWN = 200
"""Maximum number of bytes of a server's message in an error."""


class RewardModel:
    """A model that scores responses; also a reward function::

        model = RewardModel.from_pretrained("saves/rm")
        scores = model.score([[{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]])

    Args:
        model: sequence classifier of transformers with one label, or a language model if there is a ``head``.
        tokenizer: tokenizer of that model; its chat template renders conversations.
        head: (N, H) -> (N,) scores of hidden states; None for the classifier's own head.
        name: name in the log.
    """

    def __init__(self, model: Any, tokenizer: Any, head: nn.Module | None = None, name: str = "") -> None:
        labels = getattr(model.config, "num_labels", 1)
        if head is None and (labels != 1 or not hasattr(model, "score")):
            kind = type(model).__name__
            what = f"A reward model must be a sequence classifier with one label. Received: {kind}, {labels} labels."
            raise UserError(what, remedy="Pass the folder of a reward model, or a function.", option="reward_funcs")
        self.model, self.tokenizer = model.eval().requires_grad_(False), tokenizer
        self.head: nn.Module = model.score if head is None else head
        self.__name__ = name or Path(str(getattr(model.config, "_name_or_path", "") or "reward_model")).name

    @classmethod
    def from_pretrained(
        cls, folder: str | os.PathLike[str], adapters: Sequence[str] = (), quantization_bit: int | None = None
    ) -> RewardModel:
        """Load a reward model in any of its forms. Arguments and errors are those of ``reward_model_of``."""
        return reward_model_of(os.fspath(folder), adapters, quantization_bit)

    def score(self, conversations: Sequence[str | Sequence[Mapping[str, Any]]]) -> list[float]:
        """Return the score of each conversation, in order.

        Args:
            conversations: lists of messages that end with the response, rendered by the chat template; or texts, which
                are tokenized as they are.

        Raises:
            TypeError: if an entry is neither text nor a list of messages.
            UserError: if there is no chat template, it cannot render a conversation, or an entry has no tokens.
        """
        for place, each in enumerate(conversations):
            if isinstance(conversations, str) or not (isinstance(each, str) or _are_messages(each)):
                raise TypeError(
                    "`conversations` must be a list of texts or of lists of messages. Received: "
                    f"{reprlib.repr(conversations if isinstance(conversations, str) else each)} as entry {place}."
                )
            if not each:
                raise UserError(f"Entry {place} of `conversations` is empty.", remedy="Remove it.")
        prompts = ["" if isinstance(each, str) else each[:-1] for each in conversations]
        return self(prompts, [each if isinstance(each, str) else each[-1:] for each in conversations])

    def to(self, device: torch.device) -> RewardModel:
        """Move the weights to a device. Returns the function itself."""
        self.model.to(device)
        self.head.to(device)
        return self

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any], **_: Any) -> list[float]:
        texts = self._texts(prompts, completions)
        ids = [self.tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
        order = sorted(range(len(ids)), key=lambda at: len(ids[at]))
        scores = [0.0] * len(ids)
        for start in range(0, len(order), _BATCH_SIZE):
            part = order[start : start + _BATCH_SIZE]
            for at, score in zip(part, self._scores([ids[at] for at in part]).tolist(), strict=True):
                scores[at] = score
        return scores

    def _texts(self, prompts: Sequence[Any], completions: Sequence[Any]) -> list[str]:
        """Return each prompt with its completion: texts joined, messages rendered by the chat template."""
        pairs = list(zip(prompts, completions, strict=True))
        conversations = [pair for pair in pairs if not isinstance(pair[1], str)]
        rendered = iter(_conversation_texts(self.tokenizer, self.__name__, conversations) if conversations else ())
        return [f"{prompt}{answer}" if isinstance(answer, str) else next(rendered) for prompt, answer in pairs]

    @torch.no_grad()
    def _scores(self, ids: Sequence[Sequence[int]]) -> Tensor:
        """Return (B,) float32 scores. Padding is on the right, where no token attends to it."""
        device = next(self.model.parameters()).device
        lengths = torch.tensor([len(each) for each in ids])
        width = int(lengths.max())
        tokens = torch.tensor([[*each, *[0] * (width - len(each))] for each in ids], device=device)
        mask = (torch.arange(width)[None] < lengths[:, None]).long().to(device)
        hidden = self.model.base_model(input_ids=tokens, attention_mask=mask)[0]  # (B, T, H)
        last = hidden[torch.arange(len(ids), device=device), (lengths - 1).to(device)]
        dtype = next(self.head.parameters()).dtype
        scores: Tensor = self.head(last.to(dtype)).float().flatten()
        return scores


def _are_messages(value: Any) -> bool:
    return isinstance(value, Sequence) and all(isinstance(message, Mapping) for message in value)


def check_conversations(
    tokenizer: Any, name: str, prompts: Iterable[Any], remedy: str = _SAVE_TEMPLATE
) -> Iterator[Problem]:
    """Yield a problem if a reward model cannot read completions of conversations: its tokenizer has no chat template,
    or one that cannot render the first conversation of ``prompts``.

    Args:
        tokenizer: the tokenizer of the reward model.
        name: name of the reward model, for the message.
        prompts: texts, or lists of messages.
        remedy: what to do if there is no chat template.
    """
    prompt = next((prompt for prompt in prompts if not isinstance(prompt, str)), None)
    if prompt is None:
        return
    if not tokenizer.chat_template:
        yield _no_template(name, remedy)
        return
    try:
        _conversation_texts(tokenizer, name, [(prompt, [{"role": "assistant", "content": "Yes."}])])
    except UserError as error:
        yield from error.problems
        return


def _no_template(name: str, remedy: str = _SAVE_TEMPLATE) -> Problem:
    what = f"The reward model {name} has no chat template, but the prompts are conversations."
    return Problem(what, remedy=remedy, option="reward_model")


def _conversation_texts(tokenizer: Any, name: str, pairs: Sequence[tuple[Any, Any]]) -> list[str]:
    """Return the texts of prompts with their completions, both lists of messages.

    Raises:
        UserError: if the tokenizer has no chat template, or it cannot render one of them.
    """
    if not tokenizer.chat_template:
        raise UserError(_no_template(name))
    try:
        return chat_texts(tokenizer, [Conversation([*prompt, *with_text_results(answer)]) for prompt, answer in pairs])
    except UnreadableTemplate as error:
        what = f"The chat template of the reward model {name} cannot render a completion: {error}."
        raise UserError(what, remedy="Correct the chat template.", option="reward_model") from error


@contextmanager
def _loading(name: str) -> Iterator[None]:
    """Raise UserError for an error of transformers while a reward model or its tokenizer is loaded."""
    try:
        yield
    except UserError:
        raise
    except (OSError, ValueError) as error:
        what = f'The reward model "{name}" cannot be loaded: {first_line(error).removesuffix(".")}.'
        remedy = "Set it to the folder or Hub ID of a reward model."
        raise UserError(what, remedy=remedy, option="reward_model") from error


def tokenizer_of_reward_model(name: str, folders: Sequence[Path | None], num_adapters: int) -> Any:
    """Load the tokenizer of a reward model, without its weights. None if one of its folders is not known yet.

    Args:
        name: name of the reward model.
        folders: result of ``reward_model_folders``.
        num_adapters: number of adapters that are given besides ``name``.

    Raises:
        UserError: if it cannot be loaded.
    """
    known = [folder for folder in folders if folder is not None]
    if len(known) < len(folders):
        return None
    with _loading(name):
        return load_reward_tokenizer(known, num_adapters)


def reward_model_of(
    folder: str, adapters: Sequence[str] = (), quantization_bit: int | None = None, options: ModelOptions | None = None
) -> RewardModel:
    """Load a reward model from a folder or hub id.

    Args:
        adapters: folders of its adapters; the last one may contain the head.
        options: options of the hub.

    Raises:
        UserError: if it cannot be loaded, or if there is no head: a new one would give random scores.
    """
    check_model_path(folder, "reward_model")
    with _loading(folder):
        model, tokenizer, weights = load_reward_model(folder, adapters, quantization_bit, options)
    head = None
    if weights is not None:
        width = weights[WEIGHT].shape[-1]
        check_head_width(width, model.config.get_text_config().hidden_size, folder)
        head = ValueHead(width)
        head.take(weights)
    return RewardModel(model, tokenizer, head, Path(folder).name)


class RewardServer:
    """A reward function that calls an HTTP server like LLaMA-Factory's: POST {"model": ..., "messages": [texts]}
    returns {"scores": [...]}. It receives the prompt with the completion as the policy reads them, with special tokens.

    Args:
        url: address of the server.
    """

    __name__ = "reward_model"

    def __init__(self, url: str) -> None:
        self.url = url

    def __call__(self, texts: Sequence[str]) -> list[float]:
        answer = self._post(json.dumps({"model": "model", "messages": list(texts)}).encode())
        scores = answer.get("scores") if isinstance(answer, dict) else None
        if not isinstance(scores, list) or len(scores) != len(texts):
            received = f"{len(scores)}" if isinstance(scores, list) else reprlib.repr(answer)
        else:
            wrong = [(at, score) for at, score in enumerate(scores, 1) if not _is_finite(score)]
            if not wrong:
                return [float(score) for score in scores]
            received = f"{reprlib.repr(wrong[0][1])} as score {wrong[0][0]}"
        what = f'The reward server {self.url} must return "scores" with one finite number for each of the {len(texts)} '
        raise UserError(f"{what}texts. Received: {received}.", option="reward_model")

    def _post(self, body: bytes) -> Any:
        if not self.url.startswith(("http://", "https://")):
            what = f"reward_model must be a URL that starts with http:// or https://. Received: {self.url}."
            raise UserError(what, option="reward_model")
        headers = {"Content-Type": "application/json"}
        for attempt in range(_TRIES):
            request = urllib.request.Request(self.url, body, headers)  # noqa: S310
            try:
                with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as reply:  # noqa: S310
                    return json.loads(reply.read())
            except (OSError, HTTPException, ValueError) as error:  # OSError: base class of urllib's errors
                if attempt == _TRIES - 1:
                    what = f"The reward server {self.url} failed {_TRIES} times: {_reason(error)}."
                    raise UserError(what, remedy="Check the server and its log.", option="reward_model") from error
                time.sleep(1 + attempt)
        raise AssertionError("unreachable")


def _is_finite(score: Any) -> bool:
    return isinstance(score, int | float) and math.isfinite(score)


def _reason(error: Exception) -> str:
    """Describe why a request failed, with the beginning of the server's message."""
    if isinstance(error, urllib.error.HTTPError):
        try:
            message = error.read(_SHOWN).decode(errors="replace").strip()
        except (OSError, HTTPException):
            message = ""
        return f"{first_line(error)}{f' ({message.splitlines()[0]})' if message else ''}"
    if isinstance(error, ValueError):
        return f"the response is not JSON ({first_line(error)})"
    return first_line(getattr(error, "reason", error))
