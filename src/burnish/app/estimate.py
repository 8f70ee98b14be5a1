"""How much memory a run will need on each device, from sizes alone; and how much disk.

In: counts of parameters, the shape of the model, the tokens of a micro-batch. Out: bytes, term by term, each with the
sentence that explains it. These are estimates: what is counted is counted right, and what is not counted (buffers of
libraries, fragmentation) is usually below a fifth.
"""

# P parameters, N of them trained, L layers, H hidden size, F intermediate size, K size of all keys of a token,
# V vocabulary, T tokens in a micro-batch, b bytes of a number

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

GIB = 2**30


@dataclass(frozen=True)
class Shape:
    """The sizes of a decoder that the estimate needs."""

    layers: int
    hidden: int
    intermediate: int
    keys: int  # key heads times head size
    vocabulary: int

    @classmethod
    def of(cls, config: object) -> Shape:
        """From a transformers configuration, whose attribute map gives every family the same names."""
        hidden, heads = int(getattr(config, "hidden_size", 0)), int(getattr(config, "num_attention_heads", 1) or 1)
        key_heads = int(getattr(config, "num_key_value_heads", None) or heads)
        head_size = int(getattr(config, "head_dim", None) or hidden // heads)
        return cls(
            layers=int(getattr(config, "num_hidden_layers", 0)),
            hidden=hidden,
            intermediate=int(getattr(config, "intermediate_size", None) or 4 * hidden),
            keys=key_heads * head_size,
            vocabulary=int(getattr(config, "vocab_size", 0)),
        )


@dataclass(frozen=True)
class Term:
    """One part of the memory."""

    name: str
    num_bytes: int
    reason: str


@dataclass(frozen=True)
class Memory:
    """What a run needs on each device."""

    terms: tuple[Term, ...]

    @property
    def total(self) -> int:
        return sum(term.num_bytes for term in self.terms)


def estimate_memory(
    *, params: int, trained: int, shape: Shape, tokens: int, loss_tokens: int, weight_bytes: int, compute_bytes: int,
    moment_bytes: int, recompute: bool,
) -> Memory:  # fmt: skip
    """Args:
    params: P. trained: N. tokens: T, padding included. loss_tokens: positions whose logits exist at one time.
    weight_bytes: b of a weight and of its gradient. compute_bytes: b of an activation.
    moment_bytes: bytes the optimizer keeps per trained parameter.
    recompute: activation checkpointing is on.
    """
    terms = [
        Term("weights", params * weight_bytes, f"{_count(params)} parameters x {weight_bytes} bytes"),
        Term("gradients", trained * weight_bytes, f"{_count(trained)} trained parameters x {weight_bytes} bytes"),
        Term("optimizer", trained * moment_bytes, f"{_count(trained)} trained parameters x {moment_bytes} bytes"),
        _activations(shape, tokens, compute_bytes, recompute),
        Term(
            "logits",
            2 * loss_tokens * shape.vocabulary * 4,
            f"{loss_tokens} positions x {shape.vocabulary} tokens of the vocabulary x 4 bytes, and their gradient",
        ),
    ]
    if compute_bytes < weight_bytes:
        reason = f"weights cast to {compute_bytes} bytes for the forward pass"
        terms.insert(1, Term("cast weights", params * compute_bytes, reason))
    return Memory(tuple(terms))


def _activations(shape: Shape, tokens: int, compute_bytes: int, recompute: bool) -> Term:
    """What autograd keeps for the backward pass.

    Counted from the tensors that autograd saves in a pre-norm layer with a gated MLP and fused attention (Llama, Qwen
    and their kin; measured with ``torch.autograd.graph.saved_tensors_hooks``, torch 2.13): the queries, the attention
    output, the inputs of four linear layers and of both norms (those in float32), keys and values, and four tensors of
    the MLP. Checkpointing keeps the input of each layer, and one layer in full while it is computed again.
    """
    in_a_layer = (6 * shape.hidden + 2 * shape.keys + 4 * shape.intermediate) * compute_bytes + 2 * shape.hidden * 4
    if recompute:
        per_token = shape.layers * shape.hidden * compute_bytes + in_a_layer
        how = "the input of each layer, and one layer in full"
    else:
        per_token = shape.layers * in_a_layer
        how = f"{shape.layers} layers x {in_a_layer / 1024:.0f} KiB"
    return Term("activations", tokens * per_token, f"{tokens} tokens x ({how})")


def disk_bytes(
    *, saved_bytes: int, moment_bytes: int, trained: int, checkpoints: int | None, only_model: bool
) -> int:  # fmt: skip
    """What ``output_dir`` will hold at once: the final model, the checkpoints kept, and one being written.

    Args:
        saved_bytes: of one copy of what is saved (the model, or the adapter).
        checkpoints: how many are kept; 0 where none is written.
    """
    one = saved_bytes + (0 if only_model else trained * moment_bytes)
    return saved_bytes + (one * ((checkpoints or 0) + 1) if checkpoints else 0)


def shown_bytes(num_bytes: float) -> str:
    """``1.5 GiB``: three significant digits at most."""
    for unit, size in (("GiB", GIB), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= size:
            value = num_bytes / size
            return f"{value:.0f} {unit}" if value >= 100 else f"{value:.1f} {unit}"
    return f"{num_bytes:.0f} bytes"


def _count(number: int) -> str:
    return f"{number:,}".replace(",", " ")


def terms_of(memory: Memory) -> Iterator[tuple[str, str, str]]:
    """Name, size and reason of each part that is there, ready to print."""
    return ((term.name, shown_bytes(term.num_bytes), term.reason) for term in memory.terms if term.num_bytes)
