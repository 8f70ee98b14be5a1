"""Generate responses for several batches of an evaluation at once with slots, instead of ``model.generate`` per batch.

In:  a model, the arguments of ``generate``, collated batches. Out: for each batch the ids that ``generate`` would
return. Slots are refilled as soon as a response ends, so no batch waits for its longest response.

Not supported (the caller uses ``generate`` then): encoder-decoder models, sampling, beams and other features that slots
lack (``is_plain``), inputs besides ids and mask, prompts without left padding, models with a custom cache, and configs
in which ``generate`` determines the length.
"""

# B rows of a batch, T tokens of the padded prompt, N new tokens of the longest response

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import islice
from typing import Any, cast

import torch
from torch import Tensor
from transformers import GenerationMixin

from burnish.inference.batch import Finished, generate_all
from burnish.inference.scheduler import Scheduler
from burnish.inference.slots import SlotLimits
from burnish.inference.types import GenerationRequest
from burnish.models.patches.packed import packed_weights
from burnish.run.predictions.answers import is_plain

_INPUTS = {"input_ids", "attention_mask", "labels"}
DEFAULT_MAX_LENGTH = 20
"""Default ``max_length`` of ``model.generate`` (transformers, ``GenerationConfig``)."""


@dataclass(frozen=True)
class GenerationSettings:
    """Settings of all responses of an evaluation.

    Args:
        longest: maximum length of a response; None if ``max_length`` includes the padded prompt.
        stops: tokens that end a response.
        padding: token after a response that is shorter than the longest of its batch.
    """

    longest: int | None
    max_length: int | None
    min_new_tokens: int
    stops: frozenset[int]
    padding: int


def generation_settings_of(model: Any, kwargs: Mapping[str, Any]) -> GenerationSettings | None:
    """The settings of ``model.generate(**kwargs)``. None if slots do not support them."""
    if not isinstance(model, GenerationMixin) or type(model).generate is not GenerationMixin.generate:
        return None
    if "generate" in vars(model) or cast(Any, model).config.is_encoder_decoder:
        return None
    config = deepcopy(model.generation_config)
    is_foreign = bool(config.update(**kwargs))
    has_default_length = kwargs.get("max_length") is None and config.max_length in (None, DEFAULT_MAX_LENGTH)
    if is_foreign or config.do_sample or not is_plain(config) or (config.max_new_tokens is None and has_default_length):
        return None
    if (config.repetition_penalty or 1.0) != 1.0:  # generate counts the padding of a prompt as repetitions
        return None
    eos = config.eos_token_id
    stops = () if eos is None else tuple(eos) if isinstance(eos, list | tuple) else (eos,)
    # Without a stop, no response ends early, and the padding is not used.
    padding = next(iter(stops), 0) if config.pad_token_id is None else config.pad_token_id
    least = config.min_new_tokens or 0
    return GenerationSettings(config.max_new_tokens, config.max_length, least, frozenset(stops), padding)


def generate_with_slots(
    model: Any, batches: Sequence[Mapping[str, Any]], settings: GenerationSettings, slots: int
) -> list[Tensor] | None:
    """Per batch (B, T + N) ids: the padded prompts and their responses. None if slots do not support the model or
    batches."""
    by_batch = [_requests_of_batch(batch, settings) for batch in batches]
    if any(one is None for one in by_batch):
        return None
    flat = [request for one in by_batch for request in one or ()]
    context = max(len(request.ids) + request.max_new_tokens for request in flat)
    loop = Scheduler(model, SlotLimits(slots, context))
    if not loop.backend.is_batched:
        return None
    with packed_weights(model):
        answers = iter(generate_all(loop, flat))
    prompts = [batch["input_ids"] for batch in batches]
    return [_padded_outputs(ids, list(islice(answers, len(ids))), settings.padding) for ids in prompts]


def _requests_of_batch(batch: Mapping[str, Any], settings: GenerationSettings) -> list[GenerationRequest] | None:
    ids, mask = batch.get("input_ids"), batch.get("attention_mask")
    if set(batch) - _INPUTS or not isinstance(ids, Tensor) or not isinstance(mask, Tensor) or mask.shape != ids.shape:
        return None
    limit = settings.longest if settings.longest is not None else (settings.max_length or 0) - ids.shape[1]
    is_left = bool((mask[:, 1:] >= mask[:, :-1]).all()) and bool(mask[:, -1:].all())
    if limit < 1 or not ids.numel() or not is_left:
        return None
    prompts = [row[seen.bool()].tolist() for row, seen in zip(ids, mask, strict=True)]
    stops, least = settings.stops, settings.min_new_tokens
    return [GenerationRequest(prompt, limit, stop_ids=stops, min_new_tokens=least) for prompt in prompts]


def _padded_outputs(prompts: Tensor, answers: Sequence[Finished], padding: int) -> Tensor:
    rows = [[*answer.ids, *([] if answer.stop is None else [answer.stop])] for answer in answers]
    longest = max(map(len, rows))
    new = torch.tensor([[*row, *[padding] * (longest - len(row))] for row in rows], dtype=prompts.dtype)
    return torch.cat([prompts, new.to(prompts.device)], 1)
