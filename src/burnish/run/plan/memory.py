"""Estimates, from sizes alone, of the memory that a run needs on each device, and of the disk space.

In: counts of parameters, the shape of the model, the tokens of a micro-batch. Out: bytes, term by term, each with the
sentence that explains it. The terms are exact; what is not counted (buffers of libraries, fragmentation) is usually
less than a fifth.
"""

# P parameters, N of them trained, L layers, H hidden size, F intermediate size, K size of all keys of a token,
# V vocabulary, T tokens in a micro-batch

from __future__ import annotations

from dataclasses import dataclass

GIB = 2**30


@dataclass(frozen=True)
class DecoderShape:
    """Sizes of a decoder for the estimate."""

    layers: int
    hidden: int
    intermediate: int
    keys: int  # key heads times head size
    vocabulary: int

    @classmethod
    def of(cls, config: object) -> DecoderShape:
        """Read a transformers config, whose attribute map gives all model families the same names."""
        hidden, heads = _size(config, "hidden_size"), _size(config, "num_attention_heads") or 1
        head_size = _size(config, "head_dim") or hidden // heads
        return cls(
            layers=_size(config, "num_hidden_layers"),
            hidden=hidden,
            intermediate=_size(config, "intermediate_size") or 4 * hidden,
            keys=(_size(config, "num_key_value_heads") or heads) * head_size,
            vocabulary=_size(config, "vocab_size"),
        )


def _size(config: object, name: str) -> int:
    value = getattr(config, name, None)
    return value if isinstance(value, int) else 0


@dataclass(frozen=True)
class Formats:
    """Bytes of one number.

    Args:
        frozen, trained: of a frozen weight, and of a trained one; its gradient has the same.
        compute: of an activation.
        moments: of the optimizer's state per trained parameter, all tensors together.
    """

    frozen: float
    trained: int
    compute: int
    moments: float


@dataclass(frozen=True)
class Term:
    """One part of the memory."""

    name: str
    num_bytes: int
    reason: str


def memory_terms(
    params: int, trained: int, shape: DecoderShape, formats: Formats, tokens: int, logits: Term | None = None, *,
    learns: bool = True, copies: bool = True, recompute: bool = False, selective: bool = False, offload: bool = False,
    adapter: Term | None = None,
) -> list[Term]:  # fmt: skip
    """The parts of the memory that a run needs on a device.

    Args:
        params: P. trained: N. tokens: T, padding included.
        logits: those that are in memory at a time.
        learns: activations are kept for a backward pass.
        copies: autocast's copies of weights are kept for it.
        recompute: activation checkpointing is on; ``selective``: it keeps the results of products and attention.
        offload: activations are moved to the memory of the machine.
        adapter: what a method keeps for the backward pass besides.
    """
    frozen = params - trained
    weights = round(frozen * formats.frozen) + trained * formats.trained
    kinds = [(frozen, formats.frozen), (trained, formats.trained)]
    of_weights = " + ".join(f"{count:,} x {size:g} bytes" for count, size in kinds if count)
    terms = [
        Term("weights", weights, of_weights),
        Term("gradients", trained * formats.trained, f"{trained:,} x {formats.trained} bytes"),
        Term("optimizer", round(trained * formats.moments), f"{trained:,} x {formats.moments:g} bytes"),
        _activations(shape, tokens, formats.compute, recompute, selective, offload)
        if learns
        else Term(
            "activations", tokens * layer_bytes_per_token(shape, formats.compute), f"{tokens:,} tokens x one layer"
        ),
        *(term for term in (adapter if learns else None, logits) if term),
    ]
    if copies and formats.compute < formats.trained:
        cast = Term(
            "cast weights", trained * formats.compute, f"copies that autocast keeps, {formats.compute} bytes each"
        )
        terms.insert(1, cast)
    return [term for term in terms if term.num_bytes]


def _activations(
    shape: DecoderShape, tokens: int, compute_bytes: int, recompute: bool, selective: bool, offload: bool
) -> Term:
    """Activations that autograd keeps for the backward pass.

    Counted from the tensors that autograd saves in a pre-norm layer with a gated MLP and fused attention (Llama, Qwen
    and similar; ``torch.autograd.graph.saved_tensors_hooks``, torch 2.13, held by a test): the queries, the attention
    output, the inputs of four linear layers and of both norms (those in float32), keys and values, and four tensors of
    the MLP. Checkpointing keeps the input of each layer, and one layer in full while it is computed again. Offloading
    leaves one layer's share on the device, while it is on its way.
    """
    in_a_layer = layer_bytes_per_token(shape, compute_bytes)
    if not recompute:
        kept, once, how = in_a_layer, 0, f"{in_a_layer / 1024:.1f} KiB"
    elif selective:
        kept, once = products_bytes_per_token(shape, compute_bytes), in_a_layer
        how = "the input, linear outputs and attention output of each layer, plus one full layer"
    else:
        kept, once, how = shape.hidden * compute_bytes, in_a_layer, "the input of each layer, plus one full layer"
    layers = f"{shape.layers} layer{'s' * (shape.layers != 1)} x " if not recompute else ""
    if offload:
        reason = f"{tokens:,} tokens x {how}, for one layer; the rest is offloaded to CPU memory"
        return Term("activations", tokens * (kept + once), reason)
    return Term("activations", tokens * (shape.layers * kept + once), f"{tokens:,} tokens x {layers}{how}")


def dora_term(shape: DecoderShape, tokens: int, compute_bytes: int) -> Term:
    """DoRA's own: two results of each of the seven products of a layer, and the weights that it measures, whole."""
    of_a_token = 2 * (3 * shape.hidden + 2 * shape.keys + 2 * shape.intermediate)
    of_weights = shape.hidden * (2 * shape.hidden + 2 * shape.keys + 3 * shape.intermediate)
    reason = f"{tokens:,} tokens x two outputs of each linear layer, plus {shape.layers * of_weights:,} merged weights"
    return Term("DoRA", shape.layers * (tokens * of_a_token + of_weights) * compute_bytes, reason)


def products_bytes_per_token(shape: DecoderShape, compute_bytes: int) -> int:
    """A layer's input, the results of its seven products and of its attention: 5 H + 2 K + 2 F numbers."""
    return (5 * shape.hidden + 2 * shape.keys + 2 * shape.intermediate) * compute_bytes


def layer_bytes_per_token(shape: DecoderShape, compute_bytes: int) -> int:
    """6 H + 2 K + 4 F numbers in the format of the forward pass, and 2 H in float32."""
    return (6 * shape.hidden + 2 * shape.keys + 4 * shape.intermediate) * compute_bytes + 2 * shape.hidden * 4


def disk_bytes(model_bytes: int, checkpoint_bytes: int, checkpoints: int) -> int:
    """The most bytes in ``output_dir`` at a time: the final model, the checkpoints kept, and one being written.

    Args:
        model_bytes: of what is saved at the end, the model or the adapter.
        checkpoint_bytes: of one checkpoint: the weights in their training dtype, and the optimizer's state.
        checkpoints: how many are kept; 0 where none is written.
    """
    return model_bytes + (checkpoint_bytes * (checkpoints + 1) if checkpoints else 0)


def shown_bytes(num_bytes: float) -> str:
    """``1.5 GiB``: two or three significant digits."""
    for unit, size in (("GiB", GIB), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= size:
            value = num_bytes / size
            return f"{value:.0f} {unit}" if value >= 100 else f"{value:.1f} {unit}"
    return f"{num_bytes:.0f} bytes"
