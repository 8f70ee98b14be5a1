"""Load the tokenizer, and resize the model's embedding to have a row for each token.

In:  the options; a list that collects notes for the user. Out: a tokenizer with an EOS and a padding token. Refuses: a
folder without a tokenizer; tokens without a row in the embedding. Does not read weights.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from burnish.config.conversion import DuplicateKeyError, yaml_without_duplicate_keys
from burnish.config.errors import Problem, UserError, is_unusable
from burnish.config.options import raise_if
from burnish.models.load import message_of, meta_model
from burnish.models.options import ModelOptions
from burnish.models.source import find_source, hub_arguments, local_folder
from burnish.utils.files import open_regular_file
from burnish.utils.json_files import quote_value, read_object
from burnish.utils.patching import Reason, patch

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

NEW_TOKENS = Reason("model with new tokens", "an adapter must train their embeddings")
END_TOKENS = ("<|endoftext|>", "</s>", "<|im_end|>", "<eos>", "<|end_of_text|>", "<|eot_id|>")
"""Names of EOS tokens, tried in this order if the tokenizer does not define one."""
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "sentencepiece.bpe.model",
    "tekken.json", "tokenizer_config.json",
)  # fmt: skip
"""Files of tokenizers. transformers finds no tokenizer in a folder without any of these."""
_LOOKS_SPECIAL = re.compile(r"<.+>|\[.+\]|\u2581")
"""Tokens that tokenizer classes of transformers add without a vocabulary file: ``<|endoftext|>``, ``[UNK]``, and the
space of T5."""
ROW_MULTIPLE = 64
"""A resized embedding has a multiple of this number of rows, for fast matrix products on tensor cores."""


def load_tokenizer(
    options: ModelOptions, notes: list[str] | None = None, adapters: Sequence[Path] = ()
) -> PreTrainedTokenizerBase:
    """Load the model's tokenizer with right padding and the new tokens of adapters and options.

    Args:
        options: the options of the model.
        notes: receives a sentence if an EOS or padding token had to be chosen.
        adapters: folders of the adapters that are loaded. The last one with a tokenizer has the tokens that were added
            when it was trained; they get the same ids.

    Raises:
        UserError: if it is missing or cannot be read.
    """
    from transformers import AutoTokenizer

    notes = [] if notes is None else notes
    source = find_source(options.model_name_or_path, options)
    if source.folder is not None and not any((source.folder / name).is_file() for name in TOKENIZER_FILES):
        remedy = "Copy tokenizer.json and tokenizer_config.json of the model into it."
        raise UserError("there is no tokenizer in this folder.", where=source.name, remedy=remedy)
    _refuse_own_code(options)
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            source.name, padding_side="right", **hub_arguments(options)
        )
    except BaseException as error:
        if not is_unusable(error):
            raise
        what = (
            f"one of its files does not contain the key {error}." if isinstance(error, KeyError) else message_of(error)
        )
        what = f"its tokenizer cannot be loaded: {what}"
        raise UserError(what, source.name, remedy="Download its tokenizer files again.") from error
    _check_chat_template(tokenizer.chat_template, source.name)
    _check_ordinary_tokens(tokenizer, source.name)
    trained = _add_tokens_of_adapters(tokenizer, adapters, notes)
    _add_new_tokens(tokenizer, options, notes)
    tokenizer.new_tokens = [*trained, *named_tokens(options)]  # data may contain them: data/tokens/encoder.py
    tokenizer.trained_tokens = trained  # their embeddings are those of the adapter
    _ensure_eos_token(tokenizer, notes)
    if getattr(tokenizer, "legacy", None):  # it affects spaces, and transformers 5.23 does not save it
        tokenizer.init_kwargs["legacy"] = True
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
        notes.append(
            f"The tokenizer has no padding token; {tokenizer.eos_token} is used for padding, which is masked in "
            "the loss."
        )
    return tokenizer


def _check_chat_template(template: Any, where: str) -> None:
    """Raise UserError if a chat template is neither text nor texts by name."""
    texts = template.values() if isinstance(template, dict) else [template] if template is not None else []
    if wrong := [text for text in texts if not isinstance(text, str)]:
        what = f"the chat template of its tokenizer must be a string. Received: {quote_value(wrong[0])}."
        raise UserError(what, where=where, remedy="Correct chat_template in tokenizer_config.json.")


def _check_ordinary_tokens(tokenizer: PreTrainedTokenizerBase, where: str) -> None:
    """Raise UserError if the vocabulary contains only special tokens.

    Without the vocabulary file, transformers creates most tokenizers with an empty vocabulary. They encode any text as
    no tokens or as unknown tokens.
    """
    special = {*tokenizer.all_special_tokens, *tokenizer.get_added_vocab()}
    if all(_LOOKS_SPECIAL.fullmatch(token) for token in tokenizer.get_vocab().keys() - special):
        raise UserError(
            "its tokenizer has no tokens other than special ones.",
            where=where,
            why="The file with its vocabulary is missing or empty, so no text can be encoded.",
            remedy="Copy tokenizer.json of the model into the folder.",
        )


def tokenizer_in(folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a local folder, unchanged."""
    from transformers import AutoTokenizer

    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    return tokenizer


def check_vocabulary(
    tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig, options: ModelOptions
) -> Iterator[Problem]:
    """Check that the model's embedding has a row for each token of the tokenizer."""
    rows = config.get_text_config().vocab_size
    is_trained = bool(getattr(tokenizer, "trained_tokens", ()))
    if len(tokenizer) <= rows or options.resize_vocab or named_tokens(options) or is_trained:  # new tokens imply it
        return
    yield Problem(
        f"the tokenizer has {len(tokenizer):,} tokens and the model's embedding has {rows:,} rows.",
        where=str(options.model_name_or_path),
        why="The remaining tokens would have no embedding.",
        remedy="Set resize_vocab: true, or use the tokenizer that belongs to the model.",
    )


def named_tokens(options: ModelOptions) -> list[str]:
    """The tokens that the options add."""
    special = list(descriptions(options)) or options.add_special_tokens or []
    return [*(options.add_tokens or []), *special]


def descriptions(options: ModelOptions) -> dict[str, str]:
    """Read descriptions: new special token -> its description.

    Raises:
        UserError: if the file is missing or invalid.
    """
    config = options.new_special_tokens_config
    if not config:
        return {}
    found = config if isinstance(config, dict) else _read_descriptions(Path(config))
    if not found or not all(isinstance(word, str) and word.strip() for pair in found.items() for word in pair):
        raise UserError(_no_descriptions(config, found))
    return found


def _read_descriptions(path: Path) -> Any:
    import yaml

    try:
        with open_regular_file(path) as file:
            text = file.read().decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"new_special_tokens_config cannot be read: {error}.", option="new_special_tokens_config"
        ) from error
    try:
        found = yaml_without_duplicate_keys(text, yaml.SafeLoader)
    except DuplicateKeyError as error:
        raise UserError(
            f"new_special_tokens_config {error}", where=str(path), option="new_special_tokens_config"
        ) from error
    except (yaml.YAMLError, ValueError) as error:
        raise UserError(_no_descriptions(path, error)) from error
    return found if isinstance(found, dict) else {"": found}


def _no_descriptions(config: Any, received: Any) -> Problem:
    return Problem(
        f"new_special_tokens_config must map each new token to a description. Received: {received}",
        where="" if isinstance(config, dict) else str(config),
        remedy='For example: {"<think>": "the start of the reasoning"}.',
        option="new_special_tokens_config",
    )


def resize_embeddings(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, options: ModelOptions, notes: list[str] | None = None
) -> None:
    """Resize the embedding to have a row for every token, if the options allow it.

    New rows are drawn from a normal distribution with the mean and covariance of the old ones (Hewitt 2021,
    https://nlp.stanford.edu/~johnhew/vocab-expansion.html), or initialized as ``init_special_tokens`` says. Sets
    ``model.has_new_tokens``, so that an adapter knows that frozen rows would stay random, also if existing unused rows
    suffice.

    Raises:
        UserError: if rows are missing and may not be added.
    """
    raise_if(check_vocabulary(tokenizer, model.config, options))
    before = num_embeddings(model)
    if named_tokens(options) or num_without_embedding(tokenizer) > before:
        patch(model, "has_new_tokens", True, NEW_TOKENS)
    if len(tokenizer) > before:
        model.resize_token_embeddings(len(tokenizer), pad_to_multiple_of=ROW_MULTIPLE)
        after = num_embeddings(model)
        if notes is not None:
            notes.append(f"The embedding was resized from {before:,} to {after:,} rows for {len(tokenizer):,} tokens.")
    if options.init_special_tokens != "noise_init":
        _initialize_from_descriptions(model, tokenizer, options)


def num_without_embedding(tokenizer: PreTrainedTokenizerBase) -> int:
    """Number of tokens whose embedding no adapter holds."""
    return len(tokenizer) - len(getattr(tokenizer, "trained_tokens", ()))


def num_embeddings(model: PreTrainedModel) -> int:
    """Number of rows of the input embedding."""
    weight: Any = model.get_input_embeddings().weight
    return int(weight.shape[0])


def resized_meta_model(
    config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, options: ModelOptions
) -> PreTrainedModel:
    """The model without weights, with a row for every token."""
    model = meta_model(deepcopy(config), options.trust_remote_code)  # resizing changes the config
    before = num_embeddings(model)
    if len(tokenizer) > before:
        with torch.device("meta"):
            model.resize_token_embeddings(len(tokenizer), pad_to_multiple_of=ROW_MULTIPLE, mean_resizing=False)
    if named_tokens(options) or num_without_embedding(tokenizer) > before:
        patch(model, "has_new_tokens", True, NEW_TOKENS)
    return model


@torch.no_grad()
def _initialize_from_descriptions(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, options: ModelOptions
) -> None:
    """Initialize each described token with the mean of its description's tokens plus noise.

    Applies to the embedding and to an untied head. The noise has the standard deviation 1 / sqrt(width of a row).
    Source: LLaMA-Factory 0.9.5, model/model_utils/embedding.py, which uses rows of the embedding for the head.
    """
    described = descriptions(options)
    new = {tokenizer.convert_tokens_to_ids(token) for token in named_tokens(options)}
    tables: tuple[Any, ...] = (model.get_input_embeddings(), model.get_output_embeddings())
    weights = {id(table.weight): table.weight for table in tables if table is not None}
    for token, description in described.items():
        ids = [i for i in tokenizer.encode(description, add_special_tokens=False) if i not in new]
        if not ids:
            raise UserError(
                _no_descriptions(options.new_special_tokens_config, f'"{token}": "{description}", all new tokens')
            )
        for weight in weights.values():
            mean = weight[ids].float().mean(0)
            if options.init_special_tokens == "desc_init_w_noise":
                mean += torch.randn(mean.shape).to(mean.device) / mean.numel() ** 0.5
            weight[tokenizer.convert_tokens_to_ids(token)] = mean.to(weight.dtype)


def _add_new_tokens(tokenizer: PreTrainedTokenizerBase, options: ModelOptions, notes: list[str]) -> None:
    added = tokenizer.add_tokens(options.add_tokens) if options.add_tokens else 0
    special = list(descriptions(options)) or options.add_special_tokens
    if special:
        added += tokenizer.add_tokens(special, special_tokens=True)
    if added and not options.resize_vocab:
        notes.append(f"{added} new tokens were added: the embedding is resized (resize_vocab).")


def _add_tokens_of_adapters(
    tokenizer: PreTrainedTokenizerBase, adapters: Sequence[Path], notes: list[str]
) -> list[str]:
    """Add the tokens that an adapter's tokenizer has and the model's does not, and return them.

    Raises:
        UserError: if they would get other ids than when the adapter was trained.
    """
    folders = (folder for folder in reversed(adapters) if any((folder / name).is_file() for name in TOKENIZER_FILES))
    if (folder := next(folders, None)) is None:
        return []
    try:
        trained = tokenizer_in(folder)
    except BaseException as error:
        if not is_unusable(error):
            raise
        notes.append(f"The tokenizer in {folder} cannot be loaded and is not used: {message_of(error)}")
        return []
    known = tokenizer.get_vocab()
    added = {at: token for at, token in sorted(trained.added_tokens_decoder.items()) if token.content not in known}
    tokenizer.add_tokens(list(added.values()))
    words = [token.content for token in added.values()]
    if tokenizer.convert_tokens_to_ids(words) != list(added):
        raise UserError(
            "the tokens that were added when this adapter was trained have other ids with the tokenizer of the model.",
            where=str(folder),
            why=f"Tokens: {', '.join(words[:5])}.",
            remedy="Use the base model that the adapter was trained on.",
            option="adapter_name_or_path",
        )
    return words


def _ensure_eos_token(tokenizer: PreTrainedTokenizerBase, notes: list[str]) -> None:
    if tokenizer.eos_token is not None:
        return
    vocabulary = tokenizer.get_vocab()
    known = next((token for token in END_TOKENS if token in vocabulary), None)
    tokenizer.add_special_tokens({"eos_token": known or END_TOKENS[0]})
    how = "from its vocabulary is used" if known else "was added"
    notes.append(f"The tokenizer defines no EOS token; {tokenizer.eos_token} {how}.")


def _refuse_own_code(options: ModelOptions) -> None:
    """Raise UserError if the tokenizer is a custom class of the model, because transformers would silently use another
    one instead.
    """
    if options.trust_remote_code:
        return
    name = options.model_name_or_path or ""
    folder = local_folder(name, options, "model_name_or_path", _NAMES_A_CLASS, with_weights=False)
    path, classes = next(
        ((folder / name, found) for name in _NAMES_A_CLASS if (found := _own_class(folder / name))), (folder, None)
    )
    written = [str(one) for one in (classes if isinstance(classes, list) else [classes]) if one]
    if written:
        raise UserError(
            f"its tokenizer requires running its own Python code ({', '.join(written)}).",
            where=str(path),
            why="Another class would tokenize the same text differently.",
            remedy="Review that code; if you trust it, set trust_remote_code: true.",
        )


_NAMES_A_CLASS = ("tokenizer_config.json", "config.json")
"""Files whose ``auto_map`` may contain the class of a tokenizer."""


def _own_class(path: Path) -> Any:
    """The tokenizer class or classes that a file of the model defines; a plain list in older files."""
    named = read_object(path).get("auto_map") if path.is_file() else None
    if isinstance(named, dict):
        return named.get("AutoTokenizer")
    return named if path.name == _NAMES_A_CLASS[0] else None
