"""The tokenizer, and the embedding that has to have a row for each of its tokens.

In:  the options; a list that collects sentences for a person. Out: a tokenizer with an end and a padding token.
Refuses: a folder without a tokenizer; tokens that the model has no rows for. Weights are not read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from burnish.core.errors import Problem, UserError
from burnish.models.source import find_source, hub_arguments

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

END_TOKENS = ("<|endoftext|>", "</s>", "<|im_end|>", "<eos>", "<|end_of_text|>", "<|eot_id|>")
"""What models call the end, tried in this order in a vocabulary that does not say."""
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "sentencepiece.bpe.model",
    "tekken.json", "tokenizer_config.json",
)  # fmt: skip
"""A folder with none of these has no tokenizer that transformers would find."""
ROW_MULTIPLE = 64
"""An embedding grows to a multiple of this: matrix products on tensor cores want it."""


def load_tokenizer(options: Any, notes: list[str] | None = None) -> PreTrainedTokenizerBase:
    """The model's tokenizer, padding on the right, with the new tokens of the options in it.

    Args:
        notes: receives what was chosen where the tokenizer does not say (its end or padding token).
    Raises:
        UserError: where there is none, or none that can be read.
    """
    from transformers import AutoTokenizer

    notes = [] if notes is None else notes
    source = find_source(options.model_name_or_path, options)
    if source.folder is not None and not any((source.folder / name).is_file() for name in TOKENIZER_FILES):
        raise UserError(_no_tokenizer(source.name))
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            source.name, use_fast=options.use_fast_tokenizer, padding_side="right", **hub_arguments(options)
        )
    except (OSError, ValueError, KeyError) as error:
        raise UserError(_broken_tokenizer(source.name, error)) from error
    _add_new_tokens(tokenizer, options, notes)
    _settle_end(tokenizer, notes)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
        notes.append(f"The tokenizer has no padding token; {tokenizer.eos_token} pads, and no padding is learned.")
    return tokenizer


def check_vocabulary(tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig, options: Any) -> list[Problem]:
    """What keeps the tokenizer's ids from being looked up in the model's embedding."""
    rows = config.get_text_config().vocab_size
    if len(tokenizer) <= rows or may_resize(options):
        return []
    return [
        Problem(
            f"the tokenizer has {len(tokenizer):,} tokens and the model's embedding has {rows:,} rows.",
            where=str(options.model_name_or_path),
            why="The tokens beyond them would have no vector.",
            remedy="Set resize_vocab: true, or use the tokenizer that belongs to the model.",
        )
    ]


def may_resize(options: Any) -> bool:
    """Whether the embedding is to grow: asked for, or implied by new tokens."""
    return bool(options.resize_vocab or options.add_tokens or options.add_special_tokens)


def fit_vocabulary(
    model: nn.Module, tokenizer: PreTrainedTokenizerBase, options: Any, notes: list[str] | None = None
) -> None:
    """Give every token a row, where the tokenizer has grown and the options allow it.

    New rows are drawn around the mean of the old ones, with their covariance (Hewitt 2021,
    https://nlp.stanford.edu/~johnhew/vocab-expansion.html). Sets ``model.has_new_tokens``, so that an adapter knows
    that frozen rows would stay noise.

    Raises:
        UserError: where rows are missing and may not be added.
    """
    problems = check_vocabulary(tokenizer, model.config, options)
    if problems:
        raise UserError(problems)
    before = model.get_input_embeddings().weight.shape[0]  # type: ignore[operator]
    if len(tokenizer) <= before:
        return
    model.resize_token_embeddings(len(tokenizer), pad_to_multiple_of=ROW_MULTIPLE)  # type: ignore[operator]
    model.has_new_tokens = True  # type: ignore[assignment]
    after = model.get_input_embeddings().weight.shape[0]  # type: ignore[operator]
    if notes is not None:
        notes.append(f"The embedding grew from {before:,} to {after:,} rows for {len(tokenizer):,} tokens.")


def _add_new_tokens(tokenizer: PreTrainedTokenizerBase, options: Any, notes: list[str]) -> None:
    added = tokenizer.add_tokens(options.add_tokens) if options.add_tokens else 0
    if options.add_special_tokens:
        added += tokenizer.add_tokens(options.add_special_tokens, special_tokens=True)
    if added and not options.resize_vocab:
        notes.append(f"{added} new tokens: the embedding grows for them (resize_vocab).")


def _settle_end(tokenizer: PreTrainedTokenizerBase, notes: list[str]) -> None:
    if tokenizer.eos_token is not None:
        return
    vocabulary = tokenizer.get_vocab()
    known = next((token for token in END_TOKENS if token in vocabulary), None)
    tokenizer.add_special_tokens({"eos_token": known or END_TOKENS[0]})
    how = "is in its vocabulary and ends" if known else "was added to it and ends"
    notes.append(f"The tokenizer names no end token; {tokenizer.eos_token} {how} an answer.")


def _no_tokenizer(name: str) -> Problem:
    return Problem(
        "there is no tokenizer in this folder.",
        where=name,
        remedy="Copy tokenizer.json and tokenizer_config.json of the model into it.",
    )


def _broken_tokenizer(name: str, error: Exception) -> Problem:
    first_line = str(error).strip().split("\n")[0]
    what = f"a file has no entry {first_line}" if isinstance(error, KeyError) else first_line
    return Problem(f"its tokenizer cannot be loaded: {what}", where=name, remedy="Fetch its tokenizer files again.")
