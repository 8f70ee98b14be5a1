"""Estimate memory per device and disk space of a run from sizes alone.

The estimate is a list of terms in bytes, each with an explanation. The terms are exact. Buffers of libraries and
fragmentation are not counted; they usually take less than a fifth.
"""

# P parameters, N trained parameters, L layers, H hidden size, F intermediate size, K size of all keys of a token,
# V vocabulary size, T tokens of a micro-batch

from __future__ import annotations

from dataclasses import dataclass

from burnish.models.load import largest_over_layers

GIB = 2**30


@dataclass(frozen=True)
class DecoderShape:
    """Sizes of a decoder, for the estimate."""

    layers: int
    hidden: int
    intermediate: int
    keys: int  # key heads times head size
    vocabulary: int

    @classmethod
    def of(cls, config: object) -> DecoderShape:
        """Create from a transformers config, whose attribute map unifies the names of model families."""
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
    return largest_over_layers(config, name) or 0


@dataclass(frozen=True)
class Formats:
    """Bytes per number.

    Args:
        frozen: per frozen weight.
        trained: per trained weight, and per element of its gradient.
        compute: per activation.
        moments: optimizer state per trained parameter, over all tensors.
    """

    frozen: float
    trained: int
    compute: int
    moments: float


@dataclass(frozen=True)
class Term:
    """One term of the memory estimate."""

    name: str
    num_bytes: int
    reason: str


def memory_terms(
    params: int, trained: int, shape: DecoderShape, formats: Formats, tokens: int, logits: Term | None = None, *,
    learns: bool = True, copies: bool = True, recompute: bool = False, selective: bool = False, offload: bool = False,
    adapter: Term | None = None,
) -> list[Term]:  # fmt: skip
    """Return the terms of a run's memory on a device.

    Args:
        params: P.
        trained: N.
        shape: sizes of the model.
        formats: bytes per number.
        tokens: T, including padding.
        logits: term of the logits that are in memory at a time.
        learns: whether activations are kept for a backward pass.
        copies: whether autocast keeps cast copies of weights for the backward pass.
        recompute: whether activation checkpointing is on.
        selective: whether checkpointing keeps the outputs of linear layers and attention.
        offload: whether activations are offloaded to CPU memory.
        adapter: additional term of an adapter method for the backward pass.
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
            "cast weights",
            trained * formats.compute,
            f"autocast copies of the trained weights, {formats.compute} bytes each",
        )
        terms.insert(1, cast)
    return [term for term in terms if term.num_bytes]


def _activations(
    shape: DecoderShape, tokens: int, compute_bytes: int, recompute: bool, selective: bool, offload: bool
) -> Term:
    """Return the term of activations that autograd keeps for the backward pass.

    Counted from the tensors that autograd saves in a pre-norm layer with a gated MLP and fused attention (Llama, Qwen
    and similar; ``torch.autograd.graph.saved_tensors_hooks``, torch 2.13, verified by a test): queries, attention
    output, inputs of four linear layers, inputs of both norms (in float32), keys and values, and four tensors of the
    MLP. Checkpointing keeps the input of each layer, and one full layer while it is recomputed. Offloading keeps one
    layer's share on the device while it is copied.
    """
    in_a_layer = layer_bytes_per_token(shape, compute_bytes)
    if not recompute:
        per_layer, peak, how = in_a_layer, 0, f"{in_a_layer / 1024:.1f} KiB"
    elif selective:
        per_layer, peak = products_bytes_per_token(shape, compute_bytes), in_a_layer
        how = "the input, linear outputs and attention output of each layer, plus one full layer"
    else:
        per_layer, peak, how = shape.hidden * compute_bytes, in_a_layer, "the input of each layer, plus one full layer"
    layers = f"{shape.layers} layer{'s' * (shape.layers != 1)} x " if not recompute else ""
    if offload:
        reason = f"{tokens:,} tokens x {how}, for one layer; the rest is offloaded to CPU memory"
        return Term("activations", tokens * (per_layer + peak), reason)
    return Term("activations", tokens * (shape.layers * per_layer + peak), f"{tokens:,} tokens x {layers}{how}")


def dora_term(shape: DecoderShape, tokens: int, compute_bytes: int) -> Term:
    """Return DoRA's additional term: two outputs of each of a layer's seven linear layers, and the merged weights."""
    of_a_token = 2 * (3 * shape.hidden + 2 * shape.keys + 2 * shape.intermediate)
    of_weights = shape.hidden * (2 * shape.hidden + 2 * shape.keys + 3 * shape.intermediate)
    reason = f"{tokens:,} tokens x two outputs of each linear layer, plus {shape.layers * of_weights:,} merged weights"
    return Term("DoRA", shape.layers * (tokens * of_a_token + of_weights) * compute_bytes, reason)


def tower_term(vision: object, patches: int, compute_bytes: int, is_trained: bool) -> Term:
    """Return the memory of the vision tower for the images of a micro-batch: pixels and activations.

    A frozen tower keeps no activations for a backward pass, so only those of one layer are in memory.

    Args:
        vision: config of the tower. patches: number of image patches of the micro-batch.
    """
    hidden = _size(vision, "embed_dim") or _size(vision, "hidden_size")  # Qwen2-VL's hidden size is that of the text
    wide = _size(vision, "intermediate_size") or round(getattr(vision, "mlp_ratio", 4) * hidden)
    layers = _size(vision, "depth") or _size(vision, "num_hidden_layers")
    of_layer = layer_bytes_per_token(DecoderShape(layers, hidden, wide, hidden, 0), compute_bytes)
    side = getattr(vision, "patch_size", 0)
    side = side if isinstance(side, int) else side[0]
    pixels = 4 * 3 * side * side * max(1, _size(vision, "temporal_patch_size"))
    kept_layers = layers if is_trained else 1
    reason = f"{patches:,} patches x ({pixels / 1024:.1f} KiB of pixels + {kept_layers} x {of_layer / 1024:.1f} KiB)"
    return Term("vision tower", patches * (pixels + kept_layers * of_layer), reason)


def products_bytes_per_token(shape: DecoderShape, compute_bytes: int) -> int:
    """Return the bytes of a layer's input and the outputs of its linear layers and attention: 5 H + 2 K + 2 F
    numbers."""
    return (5 * shape.hidden + 2 * shape.keys + 2 * shape.intermediate) * compute_bytes


def layer_bytes_per_token(shape: DecoderShape, compute_bytes: int) -> int:
    """Return the bytes of 6 H + 2 K + 4 F numbers in the compute dtype and 2 H in float32."""
    return (6 * shape.hidden + 2 * shape.keys + 4 * shape.intermediate) * compute_bytes + 2 * shape.hidden * 4


def disk_bytes(model_bytes: int, checkpoint_bytes: int, checkpoints: int) -> int:
    """Return the maximum bytes in ``output_dir``: the final model, the kept checkpoints, and one being written.

    Args:
        model_bytes: size of the final model or adapter.
        checkpoint_bytes: size of a checkpoint: weights in their training dtype, and optimizer state.
        checkpoints: number of kept checkpoints; 0 if none is written.
    """
    return model_bytes + (checkpoint_bytes * (checkpoints + 1) if checkpoints else 0)


def shown_bytes(num_bytes: float) -> str:
    """Format bytes with two or three significant digits: ``1.5 GiB``."""
    for unit, size in (("GiB", GIB), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= size:
            value = num_bytes / size
            return f"{value:.0f} {unit}" if value >= 100 else f"{value:.1f} {unit}"
    return f"{num_bytes:.0f} bytes"
