"""Rows -> micro-batches: padding-free, padded, or packed.

In: rows (``input_ids`` and ``labels`` as plain lists; a pack gives the lengths of its rows in ``seq_lengths``). Out: a
``Batch`` of tensors on the CPU, and for packing, the rows that share a pack.

In a padding-free batch the sequences of a micro-batch are concatenated to one row: the linear layers see real tokens
only, and ``cu_seq_lens_q`` tells the attention where each sequence begins. Padding is for models that cannot keep the
sequences of a row apart. In a pack, however it was made, a document never attends to another one; where the model
cannot run padding-free, packs are split into their rows again. (LLaMA-Factory's plain ``packing`` lets documents attend
to each other; that is not copied.)
"""

# R rows in a micro-batch, S sequences in it (in packs there are more than rows), T tokens

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any, Protocol

import torch

from burnish.config.checks import check
from burnish.config.errors import Problem, UserError
from burnish.config.options import option
from burnish.data.batches.prefix_sharing import segments
from burnish.loop.types import IGNORE_INDEX, INPUT_COLUMNS, TOKEN_COLUMNS, Batch, Row


@dataclass
class BatchingOptions:
    """Batching, packing and padding."""

    padding_free: bool = option(True, "Concatenate the sequences of a micro-batch instead of padding them.")
    needed_tokens_only: bool | None = option(
        None,
        "Share common prefixes and skip tokens that do not affect the loss. Default: on for CPUs with "
        "padding-free batches and no dropout.",
    )  # fmt: skip
    packing: bool | None = option(
        None, "Pack several examples into sequences of cutoff_len tokens. Default: on for stage pt only."
    )
    neat_packing: bool = option(False, "LLaMA-Factory's name for packing without attention between examples.")
    packing_strategy: str | None = option(
        None,
        "Packing strategy: best fit (bfd), best fit with long examples split (bfd_split), or fixed-size "
        "blocks of concatenated text (wrapped). Default: wrapped for stage pt, bfd otherwise.",
        choices=("bfd", "bfd_split", "wrapped"),
    )  # fmt: skip
    eval_packing: bool | None = option(None, "Packing of the evaluation set. Default: same as packing.")
    drop_incomplete_block: bool = option(
        False, "Drop the last block of a text if it is not full, as LLaMA-Factory does."
    )
    pad_to_multiple_of: int | None = option(
        None, "Pad sequence lengths to a multiple of this value, if sequences are padded.", unit="tokens", ge=1
    )
    ignore_pad_token_for_loss: bool = option(True, "Exclude padding tokens from the loss.")


@check
def check_batching(options: BatchingOptions) -> list[Problem]:
    problems = []
    if not options.ignore_pad_token_for_loss and options.padding_free:
        what = '"ignore_pad_token_for_loss": false requires padding, but padding_free batches have none.'
        problems.append(
            Problem(
                what,
                remedy="Set padding_free: false as well, or remove ignore_pad_token_for_loss.",
                option=("ignore_pad_token_for_loss", "padding_free"),
            )
        )
    if options.neat_packing and options.packing is False:
        problems.append(
            Problem(
                '"neat_packing": true contradicts "packing": false.',
                remedy="Remove one of them.",
                option=("neat_packing", "packing"),
            )
        )
    return problems


class PackingChoices(Protocol):
    """The options that say how rows are packed."""

    packing: bool | None
    packing_strategy: str | None
    neat_packing: bool
    eval_packing: bool | None
    drop_incomplete_block: bool
    streaming: bool


def packs_rows(options: PackingChoices, default: str | None, is_eval: bool = False) -> bool:
    """Return whether rows are packed. Args: default: the strategy of the objective (``default_packing``), or None."""
    if is_eval and options.eval_packing is not None:
        return bool(options.eval_packing)
    if options.packing is None:
        return bool(options.neat_packing or (default and not options.streaming))
    return bool(options.packing)


def splits_rows(options: PackingChoices, default: str | None, is_eval: bool = False) -> bool:
    """Return whether packing takes rows of any length and splits them itself, so that rows need not be truncated."""
    return packs_rows(options, default, is_eval) and strategy_of(options, default) != "bfd"


def strategy_of(options: PackingChoices, default: str | None) -> str:
    return options.packing_strategy or default or "bfd"


# --- rows -> batch ----------------------------------------------------------------------------------------------------


def collator(
    options: BatchingOptions, pad_id: int, is_padding_free: bool, shares_prefixes: bool = False
) -> Callable[[Sequence[Row]], Batch]:
    """The function that makes a micro-batch of rows.

    Args:
        pad_id: the token that fills up rows, where they are padded.
        is_padding_free: make padding-free batches: ``padding_free`` or packing asks for it, and the model keeps the
            sequences of a row apart (``models.attention.make_padding_free``).
        shares_prefixes: padding-free rows may share prefixes (``ops.probe.shares_prefixes``), and end at the last token
            that a loss depends on.
    """
    if is_padding_free:
        return collate_prefix_sharing if shares_prefixes else collate_padding_free
    return partial(
        collate_padded,
        pad_id=pad_id,
        pad_to_multiple_of=options.pad_to_multiple_of,
        learns_padding=not options.ignore_pad_token_for_loss,
    )


def collate_padding_free(rows: Sequence[Row]) -> Batch:
    """Concatenate all sequences to one row, without padding.

    Returns:
        input_ids, labels: (1, T); the first label of each sequence is ``IGNORE_INDEX``, since nothing predicts it.
        position_ids: (1, T), from 0 in each sequence.
        cu_seq_lens_q, cu_seq_lens_k: (S + 1,) int32, where each sequence begins, and T.
        max_length_q, max_length_k: int, tokens of the longest sequence.
        loss_weights: (1, T) float32, sequence: (1, T), only where a row has them.
    """
    lengths = [length for row in rows for length in lengths_of(row)]
    begins = list(accumulate(lengths, initial=0))
    labels = _concatenated(rows, "labels")
    for begin in begins[:-1]:
        labels[begin] = IGNORE_INDEX
    cu_seq_lens = torch.tensor(begins, dtype=torch.int32)
    batch: Batch = {
        "input_ids": torch.tensor([_concatenated(rows, "input_ids")]),
        "labels": torch.tensor([labels]),
        "position_ids": torch.cat([torch.arange(length) for length in lengths]).unsqueeze(0),
        "cu_seq_lens_q": cu_seq_lens,
        "cu_seq_lens_k": cu_seq_lens,
        "max_length_q": max(lengths),
        "max_length_k": max(lengths),
    }
    for name in _columns_of_tokens(rows):
        batch[name] = torch.tensor([[value for row in rows for value in _column(row, name)]])
    return batch


def collate_prefix_sharing(rows: Sequence[Row]) -> Batch:
    """Like ``collate_padding_free``, with only the tokens that have to be computed (``prefix_sharing.py``).

    The last token of a row predicts a token that is left out. The label of that one takes the place of the first label
    of the next sequence, which in a padding-free batch is not used; after the last row, the token itself is kept.

    Returns:
        The same, with S the number of segments, and besides:
        position_ids: (1, T), of each token in its own sequence.
        key_runs: the tokens that each segment attends to, as (begin, length) of runs of tokens, segment after segment.
        cu_seq_lens_k: (S + 1,) int32, where these begin; max_length_k: int, the most that one segment has.
        num_tokens: int, tokens of the rows.
        Where no segment continues another, keys are the segments' own, as in ``collate_padding_free``.
    """
    sequences = [sequence for row in rows for sequence in sequences_of(row)]
    found = segments(sequences)
    if not found:
        return collate_padding_free(rows)
    found[-1] = replace(found[-1], end=found[-1].end + 1)
    parts = [_slice(sequences[segment.sequence], segment.begin, segment.end) for segment in found]
    batch = collate_padding_free(parts)
    begins = list(accumulate((segment.length for segment in found), initial=0))
    for segment, end in zip(found[:-1], begins[1:], strict=False):
        if segment.is_last:
            predicted = sequences[segment.sequence]
            batch["labels"][0, end] = predicted["labels"][segment.end]
            for name in set(_columns_of_tokens(rows)) - INPUT_COLUMNS.keys():
                batch[name][0, end] = _column(predicted, name)[segment.end]
    batch["num_tokens"] = sum(len(sequence["input_ids"]) for sequence in sequences)
    if not any(segment.path for segment in found):
        return batch
    keys = [[(begins[number], found[number].length) for number in (*s.path, own)] for own, s in enumerate(found)]
    widths = [segment.end for segment in found]
    batch["position_ids"] = torch.cat([torch.arange(s.begin, s.end) for s in found]).unsqueeze(0)
    batch["cu_seq_lens_k"] = torch.tensor([0, *accumulate(widths)], dtype=torch.int32)
    batch["max_length_k"] = max(widths)
    batch["key_runs"] = tuple(run for runs in keys for run in runs)
    return batch


def collate_padded(
    rows: Sequence[Row], pad_id: int, pad_to_multiple_of: int | None = None, learns_padding: bool = False
) -> Batch:
    """Make one row per sequence, padded on the right. Packs are split into their sequences.

    Returns:
        input_ids, labels: (S, T); labels of padding are ``IGNORE_INDEX``, or ``pad_id`` under ``learns_padding``.
        attention_mask: (S, T) 1 for a token, 0 for padding.
        loss_weights: (S, T) float32, sequence: (S, T), only where a row has them.
    """
    sequences = [sequence for row in rows for sequence in sequences_of(row)]
    multiple = pad_to_multiple_of or 1
    width = -(-max(len(sequence["input_ids"]) for sequence in sequences) // multiple) * multiple

    def filled(lists: Iterable[Sequence[Any]], filler: float) -> torch.Tensor:
        return torch.tensor([[*values, *[filler] * (width - len(values))] for values in lists])

    batch: Batch = {
        "input_ids": filled((sequence["input_ids"] for sequence in sequences), pad_id),
        "attention_mask": filled(([1] * len(sequence["input_ids"]) for sequence in sequences), 0),
        "labels": filled((s["labels"] for s in sequences), pad_id if learns_padding else IGNORE_INDEX),
    }
    for name in _columns_of_tokens(rows):
        batch[name] = filled((_column(sequence, name) for sequence in sequences), TOKEN_COLUMNS[name])
    return batch


def lengths_of(row: Mapping[str, Any]) -> list[int]:
    """Tokens of each sequence in a row: of the only one, of all that are packed into it, or of a pair's answers."""
    ids = [values for name, values in row.items() if name.endswith("input_ids")]
    return list(row.get("seq_lengths") or map(len, ids))


def answers_of(row: Mapping[str, Any]) -> dict[str, Row]:
    """The sequences of a row by what they are: "chosen" and "rejected" of a pair, "" and "kl" of a verdict, else ""."""
    prefixes = [name.removesuffix("input_ids") for name in row if name.endswith("input_ids")]
    return {
        prefix.rstrip("_"): {"input_ids": ids, "labels": row.get(f"{prefix}labels") or [IGNORE_INDEX] * len(ids)}
        for prefix in prefixes
        for ids in [row[f"{prefix}input_ids"]]
    }


def sequences_of(row: Row) -> list[Row]:
    """The rows in a pack; the row itself where it is no pack."""
    if not row.get("seq_lengths"):
        return [row]
    ends = list(accumulate(row["seq_lengths"]))
    return [_slice(row, end - length, end) for length, end in zip(row["seq_lengths"], ends, strict=True)]


def _slice(row: Row, begin: int, end: int) -> Row:
    part: Row = {"input_ids": row["input_ids"][begin:end], "labels": row["labels"][begin:end]}
    for name in TOKEN_COLUMNS.keys() & row.keys():
        part[name] = row[name][begin:end]
    if images := _shifted(row, -begin, begin, end):
        part["images"] = images
    return part


def _shifted(row: Row, by: int, begin: int = 0, end: int | None = None) -> list[dict[str, Any]]:
    """The images of the tokens from ``begin`` to ``end``, ``by`` tokens further on.

    Raises:
        UserError: where these bounds cut through an image.
    """
    end = len(row["input_ids"]) if end is None else end
    images = [one for one in row.get("images", ()) if one["end"] > begin and one["begin"] < end]
    if any(one["begin"] < begin or one["end"] > end for one in images):
        what = f"packing cuts through an image of {images[0]['path']}."
        raise UserError(what, remedy="Set packing_strategy: bfd, which keeps rows whole.", option="packing_strategy")
    return [{**one, "begin": one["begin"] + by, "end": one["end"] + by} for one in images]


def _concatenated(rows: Sequence[Row], name: str) -> list[int]:
    return [value for row in rows for value in row[name]]


def _columns_of_tokens(rows: Sequence[Row]) -> list[str]:
    return [name for name in TOKEN_COLUMNS if any(name in row for row in rows)]


def _column(row: Row, name: str) -> Sequence[float]:
    values: Any = row.get(name)
    return values or [TOKEN_COLUMNS[name]] * len(row["input_ids"])


# --- rows -> packs ----------------------------------------------------------------------------------------------------


def pack(rows: Sequence[Row], capacity: int, strategy: str = "bfd", drop_incomplete: bool = False) -> list[Row]:
    """Pack rows into packs of at most ``capacity`` tokens; each pack holds the lengths of its rows.

    Args:
        strategy: "bfd" keeps rows whole, best fit decreasing; "bfd_split" first splits those that are longer than a
            pack; "wrapped" concatenates all rows in their order and splits the result every ``capacity`` tokens.
        drop_incomplete: with "wrapped", leave out the last block where it is not full.
    Raises:
        ValueError: where a row is longer than a pack, under "bfd".
    """
    if strategy == "wrapped":
        return list(_blocks(rows, capacity, drop_incomplete))
    if strategy == "bfd_split":
        rows = [part for row in rows for part in _split(row, capacity)]
    plan = pack_best_fit([len(row["input_ids"]) for row in rows], capacity)
    return [_joined([rows[index] for index in chosen]) for chosen in plan]


def pack_best_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Assign rows to packs: best-fit decreasing over the whole set.

    From the longest row to the shortest, each goes into the fullest pack that still has room for it. The number of
    packs is at most 11/9 of the best possible number, plus 4 (Johnson et al. 1974, https://doi.org/10.1137/0203025).
    Sorting costs n log n. The fullest pack with room is found in an integer with a bit for each amount of free room: it
    is the lowest bit that is set, from the row's length on.

    Returns:
        Indices into ``lengths``, a list per pack, in an order that depends on the lengths alone.
    """
    packs: list[list[int]] = []
    # Free room -> the packs that have it, oldest first.
    with_room: list[deque[int]] = [deque() for _ in range(capacity + 1)]
    rooms = 0  # bit r is set where some pack has r tokens free
    for index in sorted(range(len(lengths)), key=lambda i: lengths[i], reverse=True):
        length = lengths[index]
        if length > capacity:
            raise ValueError(f"A row of {length} tokens does not fit in a pack of {capacity} tokens.")
        fitting = rooms >> length
        room = length + (fitting & -fitting).bit_length() - 1 if fitting else capacity
        if fitting:
            chosen = with_room[room].popleft()  # the oldest of equals, as TRL's bfd takes it
            rooms &= ~(0 if with_room[room] else 1 << room)
        else:
            chosen = len(packs)
            packs.append([])
        packs[chosen].append(index)
        with_room[room - length].append(chosen)
        rooms |= 1 << (room - length)
    return packs


def _blocks(rows: Sequence[Row], capacity: int, drop_incomplete: bool) -> Iterator[Row]:
    """Concatenate all rows and split the result every ``capacity`` tokens; a block holds the lengths of its parts."""
    parts: list[Row] = []
    free = capacity
    for row in rows:
        begin, length = 0, len(row["input_ids"])
        while begin < length:
            end = min(begin + free, length)
            parts.append(_slice(row, begin, end))
            free -= end - begin
            begin = end
            if free == 0:
                yield _joined(parts)
                parts, free = [], capacity
    if parts and not drop_incomplete:
        yield _joined(parts)


def _split(row: Row, capacity: int) -> Iterator[Row]:
    length = len(row["input_ids"])
    return (_slice(row, begin, min(begin + capacity, length)) for begin in range(0, length, capacity))


def _joined(rows: Sequence[Row]) -> Row:
    joined: Row = {
        "input_ids": _concatenated(rows, "input_ids"),
        "labels": _concatenated(rows, "labels"),
        "seq_lengths": [len(row["input_ids"]) for row in rows],
    }
    for name in _columns_of_tokens(rows):
        joined[name] = [value for row in rows for value in _column(row, name)]
    begins = accumulate(joined["seq_lengths"], initial=0)
    if images := [one for row, begin in zip(rows, begins, strict=False) for one in _shifted(row, begin)]:
        joined["images"] = images
    return joined
