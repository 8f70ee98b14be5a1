"""Check the generation settings of a model, which transformers does not check before they are used.

In:  ``generation_config.json``, or the same names in ``config.json``. Out: one problem per setting of a wrong type or
outside its range. Names that transformers does not know are ignored, as transformers ignores them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from burnish.config.errors import Problem, UserError
from burnish.utils.json_files import DAMAGED_FILE_REMEDY, quote_value, read_object

_FILES = ("generation_config.json", "config.json")
"""transformers takes the settings from the first of these that exists."""
_LARGEST = 2**31 - 1
Rule = tuple[str, Callable[[Any], bool]]
"""What a value must be, in words and as a test."""


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _LARGEST


def _is_integer(value: Any, least: int = 0) -> bool:
    return _is_number(value) and float(value).is_integer() and value >= least


def _is_list(value: Any, of: Callable[[Any], bool]) -> bool:
    return isinstance(value, list | tuple) and all(map(of, value))


def _are_ids(value: Any) -> bool:
    return _is_list(value, _is_integer)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_pair(value: Any, first: Callable[[Any], bool]) -> bool:
    return isinstance(value, list | tuple) and len(value) == 2 and first(value[0]) and _is_number(value[1])


_COUNT: Rule = ("an integer of at least 0", _is_integer)
_POSITIVE: Rule = ("an integer of at least 1", lambda value: _is_integer(value, 1))
_FLAG: Rule = ("true or false", lambda value: isinstance(value, bool) or (_is_integer(value) and value < 2))
_NUMBER: Rule = ("a number", lambda value: _is_number(value) and math.isfinite(value))
_SHARE: Rule = ("a number from 0 to 1", lambda value: _is_number(value) and 0 <= value <= 1)
_NOT_NEGATIVE: Rule = ("a number of at least 0", lambda value: _is_number(value) and value >= 0)
_ABOVE_ZERO: Rule = ("a number above 0", lambda value: _is_number(value) and value > 0)
_TEXT: Rule = ("a string", _is_text)
_OBJECT: Rule = ("an object", lambda value: isinstance(value, dict) or hasattr(value, "to_dict"))
_ID: Rule = ("a token id", lambda value: _is_integer(value, -1))
_ID_OR_IDS: Rule = ("a token id or a list of token ids", lambda value: _is_integer(value, -1) or _are_ids(value))
_IDS: Rule = ("a list of token ids", _are_ids)
_SEQUENCES: Rule = ("a list of lists of token ids", lambda value: _is_list(value, lambda ids: _are_ids(ids) and ids))

_BY_RULE: tuple[tuple[Rule, str], ...] = (
    (_COUNT, "min_length min_new_tokens top_k no_repeat_ngram_size encoder_no_repeat_ngram_size max_cache_len "
             "num_assistant_tokens prompt_lookup_num_tokens max_matching_ngram_size assistant_early_exit "
             "assistant_lookbehind target_lookbehind prefill_chunk_size"),
    (_POSITIVE, "max_length max_new_tokens num_beams num_beam_groups num_return_sequences"),
    (_FLAG, "do_sample use_cache renormalize_logits remove_invalid_values token_healing output_attentions "
            "output_hidden_states output_scores output_logits return_dict_in_generate low_memory disable_compile "
            "is_assistant"),
    (_NUMBER, "length_penalty guidance_scale"),
    (_NOT_NEGATIVE, "temperature max_time diversity_penalty penalty_alpha"),
    (_ABOVE_ZERO, "repetition_penalty encoder_repetition_penalty"),
    (_SHARE, "top_p min_p top_h typical_p epsilon_cutoff eta_cutoff assistant_confidence_threshold "
             "assistant_ensemble_weight"),
    (_TEXT, "cache_implementation num_assistant_tokens_schedule speculation_type"),
    (_OBJECT, "watermarking_config cache_config compile_config"),
    (_ID, "bos_token_id pad_token_id forced_bos_token_id"),
    (_ID_OR_IDS, "eos_token_id forced_eos_token_id decoder_start_token_id"),
    (_IDS, "suppress_tokens begin_suppress_tokens"),
    (_SEQUENCES, "bad_words_ids"),
)  # fmt: skip
_RULES: dict[str, Rule] = {name: rule for rule, names in _BY_RULE for name in names.split()} | {
    "early_stopping": ('true, false or "never"', lambda value: isinstance(value, bool) or value == "never"),
    "stop_strings": ("a string or a list of strings", lambda value: _is_text(value) or _is_list(value, _is_text)),
    "exponential_decay_length_penalty": (
        "a list of an integer and a number", lambda value: _is_pair(value, _is_integer),
    ),
    "sequence_bias": (
        "a list of pairs of token ids and a number",
        lambda value: isinstance(value, dict) or _is_list(value, lambda pair: _is_pair(pair, _are_ids)),
    ),
}  # fmt: skip


def setting_problems(settings: Mapping[str, Any], where: str, remedy: str = DAMAGED_FILE_REMEDY) -> list[Problem]:
    """One problem per generation setting that is not null and of a wrong type or outside its range."""
    return [
        Problem(f'"{name}" must be {rule[0]}. Received: {quote_value(value)}.', where=where, remedy=remedy)
        for name, rule in _RULES.items()
        if (value := settings.get(name)) is not None and not rule[1](value)
    ]


def generation_file_problems(folder: Path) -> list[Problem]:
    """Problems of ``generation_config.json`` in a model's folder, or of ``config.json`` if there is no such file."""
    path = next((folder / name for name in _FILES if (folder / name).is_file()), None)
    if path is None:
        return []
    try:
        return setting_problems(read_object(path), str(path))
    except UserError as error:
        return list(error.problems)
