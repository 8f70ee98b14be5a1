"""Collate rows into micro-batches (padding-free or padded), and pack rows.

A row has ``input_ids`` and ``labels`` as lists; a pack also has the lengths of its rows in ``seq_lengths``. A ``Batch``
holds tensors on the CPU.

A padding-free batch concatenates the sequences of a micro-batch into one row. Linear layers then process no padding,
and ``cu_seq_lens_q`` tells attention where each sequence begins. Padding is used for models that cannot separate the
sequences of a row. In a pack, a document never attends to another one; for models that cannot run padding-free, packs
are split into their rows again. (LLaMA-Factory's plain ``packing`` allows attention between documents.)
"""

# R rows of a micro-batch, S sequences in it (S > R with packs), T tokens

from __future__ import annotations

from array import array
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any

import torch

from burnish.config.checks import check
from burnish.config.errors import Problem, UserError
from burnish.config.options import option
from burnish.data.batches.prefix_sharing import segments
from burnish.data.options import DataOptions
from burnish.loop.types import IGNORE_INDEX, INPUT_COLUMNS, TOKEN_COLUMNS, Batch, Row


@dataclass
class BatchingOptions:
    """Batching, packing and padding."""

    padding_free: bool = option(True, "Concatenate the sequences of a micro-batch instead of padding them.")
    needed_tokens_only: bool | None = option(
        None,
        "Compute shared prefixes once and skip tokens that do not affect the loss. Default: on for CPUs with "
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
    eval_packing: bool | None = option(None, "Pack the examples of the evaluation set. Default: same as packing.")
    drop_incomplete_block: bool = option(
        False, "With packing_strategy: wrapped, drop the last block if it is not full, as LLaMA-Factory does."
    )
    pad_to_multiple_of: int | None = option(
        None, "Pad sequences to a multiple of this value. No effect on padding-free batches.", unit="tokens", ge=1
    )
    ignore_pad_token_for_loss: bool = option(True, "Exclude padding tokens from the loss.")


@check
def check_batching(options: BatchingOptions) -> Iterator[Problem]:
    if not options.ignore_pad_token_for_loss and options.padding_free:
        what = '"ignore_pad_token_for_loss": false requires padding, but padding_free batches have none.'
        yield Problem(
            what,
            remedy="Set padding_free: false as well, or remove ignore_pad_token_for_loss.",
            option=("ignore_pad_token_for_loss", "padding_free"),
        )
    if options.neat_packing and options.packing is False:
        yield Problem(
            '"neat_packing": true and "packing": false cannot be combined.',
            remedy="Remove one of them.",
            option=("neat_packing", "packing"),
        )


class PackingChoices(BatchingOptions, DataOptions):
    """Options that control packing."""


def packs_rows(options: PackingChoices, default: str | None, is_eval: bool = False) -> bool:
    """Return whether rows are packed. ``default`` is the objective's strategy (``default_packing``), or None."""
    if is_eval and options.eval_packing is not None:
        return bool(options.eval_packing)
    if options.packing is None:
        return bool(options.neat_packing or (default and not options.streaming))
    return bool(options.packing)


def splits_rows(options: PackingChoices, default: str | None, is_eval: bool = False) -> bool:
    """Return whether the packing strategy splits long rows itself, so that rows need no truncation."""
    return packs_rows(options, default, is_eval) and packing_strategy_of(options, default) != "bfd"


def packing_strategy_of(options: PackingChoices, default: str | None) -> str:
    return options.packing_strategy or default or "bfd"


# --- rows -> batch ----------------------------------------------------------------------------------------------------


def collator(
    options: BatchingOptions, pad_id: int, is_padding_free: bool, shares_prefixes: bool = False
) -> Callable[[Sequence[Row]], Batch]:
    """Return the function that collates rows into a micro-batch.

    Args:
        options: batching options.
        pad_id: padding token id.
        is_padding_free: make padding-free batches. Requires ``padding_free`` or packing, and a model that separates
            the sequences of a row (``models.attention.make_padding_free``).
        shares_prefixes: compute common prefixes of padding-free rows once, and drop tokens after the last one that
            affects the loss (``kernels.probe.shares_prefixes``).
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

    Args:
        rows: R rows or packs, S sequences in total.
    Returns:
        input_ids, labels: (1, T); the first label of each sequence is ``IGNORE_INDEX``, since nothing predicts it.
        position_ids: (1, T), starting from 0 in each sequence.
        cu_seq_lens_q, cu_seq_lens_k: (S + 1,) int32, start of each sequence, and T.
        max_length_q, max_length_k: int, tokens of the longest sequence.
        loss_weights: (1, T) float32, and sequence: (1, T), only if a row has them.
    """
    lengths = [length for row in rows for length in lengths_of(row)]
    begins = list(accumulate(lengths, initial=0))
    labels = _concatenate(rows, "labels")
    for begin in begins[:-1]:
        labels[begin] = IGNORE_INDEX
    cu_seq_lens = torch.tensor(begins, dtype=torch.int32)
    batch: Batch = {
        "input_ids": torch.tensor([_concatenate(rows, "input_ids")]),
        "labels": torch.tensor([labels]),
        "position_ids": torch.cat([torch.arange(length) for length in lengths]).unsqueeze(0),
        "cu_seq_lens_q": cu_seq_lens,
        "cu_seq_lens_k": cu_seq_lens,
        "max_length_q": max(lengths),
        "max_length_k": max(lengths),
    }
    for name in _token_columns_in(rows):
        batch[name] = torch.tensor([[value for row in rows for value in _column(row, name)]])
    return batch


def collate_prefix_sharing(rows: Sequence[Row]) -> Batch:
    """Like ``collate_padding_free``, but with the tokens that affect the loss only (``prefix_sharing.py``).

    The last token of a row predicts a token that is dropped. The label of that token is stored in the first label of
    the next sequence, which a padding-free batch does not use. After the last row, the token itself is kept.

    Returns:
        The same as ``collate_padding_free``, with S the number of segments, and in addition:
        position_ids: (1, T), position of each token in its own sequence.
        key_runs: tokens that each segment attends to, as runs (begin, length), segment by segment.
        cu_seq_lens_k: (S + 1,) int32, start of each segment's keys; max_length_k: int, the largest number of keys.
        num_tokens: int, tokens of the rows.
        If no segment continues another, the keys are the segment's own, as in ``collate_padding_free``.
    """
    sequences = [sequence for row in rows for sequence in sequences_of(row)]
    nodes = segments(sequences)
    if not nodes:
        return collate_padding_free(rows)
    nodes[-1] = replace(nodes[-1], end=nodes[-1].end + 1)
    parts = [_slice(sequences[segment.sequence], segment.begin, segment.end) for segment in nodes]
    batch = collate_padding_free(parts)
    begins = list(accumulate((segment.length for segment in nodes), initial=0))
    for segment, end in zip(nodes[:-1], begins[1:], strict=False):
        if segment.is_last:
            predicted = sequences[segment.sequence]
            batch["labels"][0, end] = predicted["labels"][segment.end]
            for name in set(_token_columns_in(rows)) - INPUT_COLUMNS.keys():
                batch[name][0, end] = _column(predicted, name)[segment.end]
    batch["num_tokens"] = sum(len(sequence["input_ids"]) for sequence in sequences)
    if not any(segment.path for segment in nodes):
        return batch
    keys = [[(begins[number], nodes[number].length) for number in (*s.path, own)] for own, s in enumerate(nodes)]
    widths = [segment.end for segment in nodes]
    batch["position_ids"] = torch.cat([torch.arange(s.begin, s.end) for s in nodes]).unsqueeze(0)
    batch["cu_seq_lens_k"] = torch.tensor([0, *accumulate(widths)], dtype=torch.int32)
    batch["max_length_k"] = max(widths)
    batch["key_runs"] = tuple(run for runs in keys for run in runs)
    return batch


def collate_padded(
    rows: Sequence[Row], pad_id: int, pad_to_multiple_of: int | None = None, learns_padding: bool = False
) -> Batch:
    """Collate one padded row per sequence (right padding). Packs are split into their sequences.

    Returns:
        input_ids, labels: (S, T); labels of padding are ``IGNORE_INDEX``, or ``pad_id`` with ``learns_padding``.
        attention_mask: (S, T), 1 for a token, 0 for padding.
        loss_weights: (S, T) float32, and sequence: (S, T), only if a row has them.
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
    for name in _token_columns_in(rows):
        batch[name] = filled((_column(sequence, name) for sequence in sequences), TOKEN_COLUMNS[name])
    return batch


def lengths_of(row: Mapping[str, Any]) -> list[int]:
    """Return the number of tokens of each sequence in a row: one, those of a pack, or the responses of a pair."""
    ids = [values for name, values in row.items() if name.endswith("input_ids")]
    return list(row.get("seq_lengths") or map(len, ids))


def sequences_by_name(row: Mapping[str, Any]) -> dict[str, Row]:
    """Return the sequences of a row by name: "chosen" and "rejected", "" and "kl" with a KTO label, else ""."""
    prefixes = [name.removesuffix("input_ids") for name in row if name.endswith("input_ids")]
    return {
        prefix.rstrip("_"): {"input_ids": ids, "labels": row.get(f"{prefix}labels") or [IGNORE_INDEX] * len(ids)}
        for prefix in prefixes
        for ids in [row[f"{prefix}input_ids"]]
    }


def sequences_of(row: Row) -> list[Row]:
    """Return the rows of a pack, or the row itself if it is not a pack."""
    if not row.get("seq_lengths"):
        return [row]
    ends = list(accumulate(row["seq_lengths"]))
    return [_slice(row, end - length, end) for length, end in zip(row["seq_lengths"], ends, strict=True)]


def _slice(row: Row, begin: int, end: int) -> Row:
    part: Row = {"input_ids": row["input_ids"][begin:end], "labels": row["labels"][begin:end]}
    for name in TOKEN_COLUMNS.keys() & row.keys():
        part[name] = row[name][begin:end]
    if images := _shifted_images(row, -begin, begin, end):
        part["images"] = images
    return part


def _shifted_images(row: Row, by: int, begin: int = 0, end: int | None = None) -> list[dict[str, Any]]:
    """Return the images within the tokens ``begin`` to ``end``, with positions moved by ``by`` tokens.

    Raises:
        UserError: if the slice would split an image.
    """
    end = len(row["input_ids"]) if end is None else end
    images = [one for one in row.get("images", ()) if one["end"] > begin and one["begin"] < end]
    if any(one["begin"] < begin or one["end"] > end for one in images):
        what = f"packing would split the tokens of the image {images[0]['path']}."
        raise UserError(
            what, remedy="Set packing_strategy: bfd, which does not split examples.", option="packing_strategy"
        )
    return [{**one, "begin": one["begin"] + by, "end": one["end"] + by} for one in images]


def _concatenate(rows: Sequence[Row], name: str) -> list[int]:
    return [value for row in rows for value in row[name]]


def _token_columns_in(rows: Sequence[Row]) -> list[str]:
    return [name for name in TOKEN_COLUMNS if any(name in row for row in rows)]


def _column(row: Row, name: str) -> Sequence[float]:
    values: Any = row.get(name)
    return values or [TOKEN_COLUMNS[name]] * len(row["input_ids"])


# --- rows -> packs ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PackPlan:
    """The pieces of each pack. A piece is a row or a part of one.

    Args:
        rows: (P,) int64, row of each piece, in the order of the packs.
        begins, ends: (P,) int64, tokens of the row that are in the piece.
        splits: (number of packs + 1,) int64, first piece of each pack, and P.
    """

    rows: array[int]
    begins: array[int]
    ends: array[int]
    splits: array[int]

    def __len__(self) -> int:
        return len(self.splits) - 1

    def pieces(self, index: int) -> list[tuple[int, int, int]]:
        """Return (row, begin, end) of each piece of a pack."""
        chosen = slice(self.splits[index], self.splits[index + 1])
        return list(zip(self.rows[chosen], self.begins[chosen], self.ends[chosen], strict=True))

    def assemble(self, rows: Sequence[Row], index: int) -> Row:
        """Return a pack of ``rows``.

        Raises:
            UserError: if a piece would split an image.
        """
        return _concatenated_row([_piece(rows[row], begin, end) for row, begin, end in self.pieces(index)])


def plan_packs(lengths: Sequence[int], capacity: int, strategy: str = "bfd", drop_incomplete: bool = False) -> PackPlan:
    """Assign rows to packs of at most ``capacity`` tokens.

    Args:
        lengths: tokens of each row.
        capacity: tokens of a full pack.
        strategy: "bfd": best-fit decreasing, rows stay whole. "bfd_split": the same, after splitting rows that are
            longer than a pack. "wrapped": concatenate all rows in order and split every ``capacity`` tokens.
        drop_incomplete: with "wrapped", drop the last block if it is not full.
    Raises:
        ValueError: if a row is longer than a pack, with "bfd".
    """
    pieces: Iterable[tuple[int, int, int, int]]  # row, begin, end, pack
    if strategy == "wrapped":
        pieces = _blocks(lengths, capacity, drop_incomplete)
    else:
        parts = [(row, 0, length) for row, length in enumerate(lengths)]
        if strategy == "bfd_split":
            parts = [
                (row, begin, min(begin + capacity, end)) for row, _, end in parts for begin in range(0, end, capacity)
            ]
        packs = pack_best_fit([end - begin for _, begin, end in parts], capacity)
        pieces = ((*parts[part], number) for number, chosen in enumerate(packs) for part in chosen)
    rows, begins, ends, splits = (array("q") for _ in range(4))
    for place, (row, begin, end, number) in enumerate(pieces):
        if number == len(splits):
            splits.append(place)
        rows.append(row)
        begins.append(begin)
        ends.append(end)
    splits.append(len(rows))
    return PackPlan(rows, begins, ends, splits)


def pack(rows: Sequence[Row], capacity: int, strategy: str = "bfd", drop_incomplete: bool = False) -> list[Row]:
    """Return the packs of ``plan_packs``. Each pack stores the lengths of its pieces."""
    plan = plan_packs([len(row["input_ids"]) for row in rows], capacity, strategy, drop_incomplete)
    return [plan.assemble(rows, index) for index in range(len(plan))]


def pack_best_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Assign rows to packs with best-fit decreasing over the whole dataset.

    From longest to shortest, each row goes into the fullest pack that still has room for it. The number of packs is at
    most 11/9 of the optimum plus 4 (Johnson et al. 1974, https://doi.org/10.1137/0203025). Sorting takes O(n log n).
    The fullest pack with room is found in an integer with a bit for each amount of free room: it is the lowest set bit
    from the row's length on.

    Returns:
        Indices into ``lengths``, one list per pack. The order depends on the lengths only.
    """
    packs: list[list[int]] = []
    capacity = min(capacity, sum(lengths))  # a larger one needs more memory for the same packs
    with_room: defaultdict[int, deque[int]] = defaultdict(deque)  # free room -> packs with that room, oldest first
    rooms = 0  # bit r is set if a pack has r free tokens
    for index in sorted(range(len(lengths)), key=lambda i: lengths[i], reverse=True):
        length = lengths[index]
        if length > capacity:
            raise ValueError(f"An example of {length} tokens does not fit in a packed sequence of {capacity} tokens.")
        fitting = rooms >> length
        room = length + (fitting & -fitting).bit_length() - 1 if fitting else capacity
        if fitting:
            chosen = with_room[room].popleft()  # the oldest of equally full packs, like TRL's bfd
            rooms &= ~(0 if with_room[room] else 1 << room)
        else:
            chosen = len(packs)
            packs.append([])
        packs[chosen].append(index)
        with_room[room - length].append(chosen)
        rooms |= 1 << (room - length)
    return packs


def _blocks(lengths: Sequence[int], capacity: int, drop_incomplete: bool) -> Iterator[tuple[int, int, int, int]]:
    """Split the concatenated rows every ``capacity`` tokens. Yields (row, begin, end, block) of each piece."""
    num_blocks = sum(lengths) // capacity if drop_incomplete else None
    place = 0  # in the concatenated rows
    for row, length in enumerate(lengths):
        begin = 0
        while begin < length:
            end = min(begin + capacity - place % capacity, length)
            if place // capacity == num_blocks:
                return
            yield row, begin, end, place // capacity
            place += end - begin
            begin = end


def _piece(row: Row, begin: int, end: int) -> Row:
    return row if end - begin == len(row["input_ids"]) else _slice(row, begin, end)


def _concatenated_row(rows: Sequence[Row]) -> Row:
    joined: Row = {
        "input_ids": _concatenate(rows, "input_ids"),
        "labels": _concatenate(rows, "labels"),
        "seq_lengths": [len(row["input_ids"]) for row in rows],
    }
    for name in _token_columns_in(rows):
        joined[name] = [value for row in rows for value in _column(row, name)]
    begins = accumulate(joined["seq_lengths"], initial=0)
    if images := [one for row, begin in zip(rows, begins, strict=False) for one in _shifted_images(row, begin)]:
        joined["images"] = images
    return joined
