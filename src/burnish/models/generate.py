"""Generate responses to batches of prompts.

In:  prompts as token ids, options under LLaMA-Factory's names. Out: the new ids of each response. Prompts are padded on
the left, so that all prompts of a batch end at the same position; attention ignores the padding.
"""

# B prompts in a batch, T tokens of the longest

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from burnish.config.checks import check, notes
from burnish.config.errors import Problem, UserError
from burnish.config.options import option, shared_options
from burnish.kernels.probe import unwrap_peft
from burnish.models.load import message_of


@shared_options
@dataclass
class SamplingFields:
    """Options of sampling."""

    temperature: float = option(0.95, "Sampling temperature. 0: greedy decoding.", ge=0)
    top_p: float = option(
        0.7,
        "Sample from the smallest set of most likely tokens whose probabilities add up to this value (top-p).",
        gt=0,
        le=1,
    )
    top_k: int = option(50, "Sample from the k most likely tokens. 0: no limit.", ge=0)
    repetition_penalty: float = option(1.0, "Repetition penalty. 1: no penalty.", gt=0)


@dataclass
class GenerationOptions(SamplingFields):
    """Generation."""

    predict_with_generate: bool = option(
        False, "Generate responses for predictions instead of computing the loss of the reference responses."
    )
    do_sample: bool = option(True, "Sample tokens; false uses greedy decoding.")
    num_beams: int = option(
        1,
        "Number of beams for beam search. 1: no beam search.",
        ge=1,
        aliases=("eval_num_beams", "generation_num_beams"),
    )
    max_new_tokens: int = option(
        1024, "Maximum number of generated tokens. 0 or -1: limited by max_length.", unit="tokens", ge=-1
    )
    max_length: int = option(
        1024, "Maximum length of prompt and response together, if max_new_tokens is not positive.", unit="tokens", ge=1,
        aliases=("generation_max_length",),
    )  # fmt: skip
    length_penalty: float = option(1.0, "Length penalty of beam search. Above 0 prefers longer responses.")
    cache_implementation: str = option(
        "dynamic",
        "Key-value cache: growing (dynamic) or of fixed size (static). With static, the model is compiled "
        "on a GPU. Compilation takes about a minute and is worthwhile for many long responses.",
        choices=("dynamic", "static"),
    )  # fmt: skip
    skip_special_tokens: bool = option(True, "Remove special tokens from generated text.")
    samples: int = option(
        1, "Number of responses to sample per prompt in predictions, each with its log-likelihood.", ge=1
    )


PREDICTION_ONLY = (
    "predict_with_generate", "num_beams", "length_penalty", "cache_implementation", "skip_special_tokens", "samples",
)  # fmt: skip
"""Options that predictions read, but not chats and the API."""


def samples_tokens(options: GenerationOptions) -> bool:
    """Return whether tokens are sampled; with temperature 0, decoding is greedy."""
    return options.do_sample and options.temperature > 0


class AnswerChoices(GenerationOptions):
    """Options that enable generation."""

    do_predict: bool


@check
def check_generation(options: AnswerChoices) -> Iterator[Problem]:
    if options.samples > 1 and not (samples_tokens(options) and options.num_beams == 1):
        what = (
            f'"samples" {options.samples} requires sampling: without do_sample, with temperature 0, or with '
            "num_beams, all responses are the same."
        )
        yield Problem(
            what,
            remedy="Set do_sample: true, num_beams: 1 and a temperature above 0, or remove samples.",
            option=("samples", "do_sample", "num_beams", "temperature"),
        )


@notes
def generation_notes(options: AnswerChoices) -> Iterator[str]:
    if options.max_length != GenerationOptions().max_length and not options.predict_with_generate:
        yield '"max_length" has no effect: no responses are generated. The maximum sequence length is cutoff_len.'
    elif options.samples > 1 and not options.predict_with_generate:
        yield '"samples" has no effect without predict_with_generate.'
    elif options.predict_with_generate and not options.do_predict:
        yield '"predict_with_generate" has no effect without do_predict: evaluation computes the loss only.'


def generation_config(
    model: nn.Module, tokenizer: Any, stop_token_ids: Sequence[int], options: GenerationOptions
) -> Any:
    """The model's own ``GenerationConfig`` with the values of the options."""
    config: Any = copy.deepcopy(model.generation_config)
    config.eos_token_id, config.pad_token_id = list(stop_token_ids), tokenizer.pad_token_id
    config.do_sample = samples_tokens(options)
    # Without sampling, sampling parameters are removed, because transformers warns of each.
    config.temperature = options.temperature if config.do_sample else None
    config.top_p = options.top_p if config.do_sample else None
    config.top_k = options.top_k if config.do_sample else None
    config.num_beams = options.num_beams
    config.repetition_penalty = options.repetition_penalty
    config.length_penalty = options.length_penalty if options.num_beams > 1 else None
    config.max_new_tokens = options.max_new_tokens if options.max_new_tokens > 0 else None
    config.max_length = None if config.max_new_tokens else options.max_length
    config.use_cache = True  # disabled in training
    config.num_return_sequences, config.return_dict_in_generate = 1, False  # one list of ids per prompt
    config.cache_implementation = options.cache_implementation  # transformers replaces None with the model's own value
    return config


_GENERATION_ERRORS = (ValueError, TypeError, LookupError, AttributeError, NotImplementedError, OSError)
"""Errors of transformers' ``generate`` for settings of a model that it checks only then."""
_STATIC_LENGTH_MULTIPLE = 64
"""With a static cache each shape is compiled, so prompts are padded to a multiple of this number of tokens."""


def generate(
    model: nn.Module, prompts: Sequence[Sequence[int]], config: Any, context: int | None = None
) -> list[list[int]]:
    """Generate the response to each prompt, without the token that ended it.

    The length limit of a response depends on its own prompt. Prompts with the same limit are batched, so no response
    depends on other prompts. If a prompt leaves no room, its response is empty.

    Args:
        model: a causal language model.
        prompts: lists of token ids, not empty.
        config: a result of ``generation_config``.
        context: context length in tokens; None: unlimited.
    """
    alike: dict[int, list[int]] = {}
    for index, prompt in enumerate(prompts):
        alike.setdefault(_available(len(prompt), config, context), []).append(index)
    answers: list[list[int]] = [[] for _ in prompts]
    for room, together in alike.items():
        if room > 0:
            limited = copy.deepcopy(config)
            limited.max_new_tokens, limited.max_length = room, None
            made = _generate_batch(model, [prompts[index] for index in together], limited)
            for index, answer in zip(together, made, strict=True):
                answers[index] = answer
    return answers


def _available(prompt_length: int, config: Any, context: int | None) -> int:
    """Maximum length of the response to a prompt of that length."""
    room: int = config.max_new_tokens or config.max_length - prompt_length
    return room if context is None else min(room, context - prompt_length)


@torch.no_grad()
def _generate_batch(model: nn.Module, prompts: Sequence[Sequence[int]], config: Any) -> list[list[int]]:
    """Generate responses to B prompts, of at most ``config.max_new_tokens`` tokens."""
    device = next(model.parameters()).device
    longest = max(map(len, prompts))
    if config.cache_implementation == "static":  # to compile few shapes
        longest = -(-longest // _STATIC_LENGTH_MULTIPLE) * _STATIC_LENGTH_MULTIPLE
    padded = [[config.pad_token_id] * (longest - len(p)) + list(p) for p in prompts]
    mask = [[0] * (longest - len(p)) + [1] * len(p) for p in prompts]
    is_mixed = config.cache_implementation == "static" and torch.is_autocast_enabled(device.type)
    cache = _static_cache(model, longest + config.max_new_tokens) if is_mixed else {}
    if cache:
        config = copy.deepcopy(config)
        config.cache_implementation = None
    try:
        made = model.generate(  # type: ignore[operator]
            input_ids=torch.tensor(padded, device=device),
            attention_mask=torch.tensor(mask, device=device),
            generation_config=config,
            **cache,
        )
    except _GENERATION_ERRORS as error:
        what = f"transformers cannot generate with these settings: {message_of(error)}"
        raise UserError(what, remedy="Correct generation_config.json of the model.") from error
    return [until_stop(ids, config.eos_token_id) for ids in made[:, longest:].tolist()]


def _static_cache(model: nn.Module, length: int) -> dict[str, Any]:
    """transformers' static cache with a single dtype, as an argument of ``generate``. Empty if the model has its own
    cache.

    Under autocast values are in 16 bits, and keys in float32 after rotary positions. The cache uses the dtype of keys
    for both, and then refuses the values (transformers 5.23, StaticLayer.update).
    """
    inner, name = unwrap_peft(model), cache_argument(model)
    if name is None:
        return {}
    from transformers import StaticCache

    cache: Any = StaticCache(config=inner.config.get_text_config(decoder=True), max_cache_len=length)
    update = cache.update

    def in_one_format(keys: Tensor, values: Tensor, *arguments: Any, **named: Any) -> Any:
        return update(keys.to(values.dtype), values, *arguments, **named)

    cache.update = in_one_format
    return {name: cache}


def cache_argument(model: nn.Module) -> str | None:
    """The name of the cache in a model's forward pass: ``cache`` since transformers 5.24, ``past_key_values`` before it
    and in code that comes with a model. None if the model has its own cache.
    """
    parameters = signature(unwrap_peft(model).forward).parameters
    return next((name for name in ("cache", "past_key_values") if name in parameters), None)


def until_stop(ids: Sequence[int], stop_token_ids: Sequence[int]) -> list[int]:
    """``ids`` up to the first stop token."""
    end = next((place for place, token in enumerate(ids) if token in stop_token_ids), len(ids))
    return list(ids[:end])
