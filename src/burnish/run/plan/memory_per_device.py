"""Memory per device of a distributed run, for any backend and number of processes.

The terms of a run on one device (``memory.py``) are divided according to the backend. Terms that the backend needs in
addition, and the peaks while loading a model and while writing a checkpoint, are added. None of this has been measured
on several GPUs; on CPUs a test compares it with the peak of each process.
"""

# N processes that share memory, P parameters, L layers

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from burnish.parallel.deepspeed.settings import raw_settings, zero_stage
from burnish.parallel.fsdp.settings import fsdp_settings
from burnish.parallel.process_counts import num_machines
from burnish.parallel.selection import device_of, parallel_name
from burnish.run.plan.memory import DecoderShape, Formats, Term
from burnish.run.plan.options import RunOptions


@dataclass(frozen=True)
class Sharing:
    """How processes share the memory of a run.

    Args:
        engine: "single", "ddp", "fsdp" or "deepspeed".
        num_processes: number of processes that share one sharded copy.
        stage: ZeRO stage: 1 shards optimizer states, 2 also gradients, 3 also weights. FSDP is 3.
        keeps_gathered: weights gathered for the forward pass are kept for the backward pass.
        offloads_states: optimizer states are in CPU memory.
        offloads_weights: weights are in CPU memory.
        live: number of weights that ZeRO-3 keeps gathered within a step because they are needed again soon.
        bucket: numbers in the gradient communication buffers; None for the square of the hidden size. ZeRO allocates
            them at the start on a GPU; on a CPU they grow with the gradients.
        is_on_cpu: whether the device is a CPU.
    """

    engine: str = "single"
    num_processes: int = 1
    stage: int = 0
    keeps_gathered: bool = False
    offloads_states: bool = False
    offloads_weights: bool = False
    live: int = 0
    bucket: int | None = 0
    is_on_cpu: bool = False


# DeepSpeed's defaults (runtime/zero/config.py).
_LIVE, _BUCKET = 10**9, 5 * 10**8


def sharing_of(options: RunOptions, world_size: int) -> Sharing:
    """Return the sharing that follows from the options and the number of processes."""
    name = parallel_name(options, world_size)
    if name == "fsdp":
        settings = fsdp_settings(options)
        copies = num_machines() if settings.copies == 0 else settings.copies or 1
        return Sharing(
            name, max(1, world_size // copies), 3, not settings.reshards, settings.offloads, settings.offloads
        )
    if name == "deepspeed":
        zero = raw_settings(options).get("zero_optimization", {})
        states, weights = (
            (zero.get(key) or {}).get("device") == "cpu" for key in ("offload_optimizer", "offload_param")
        )
        stage, on_cpu = zero_stage(options), device_of(options).type == "cpu"
        live = min(_number(zero, name, _LIVE) for name in ("stage3_max_live_parameters", "stage3_max_reuse_distance"))
        bucket = None if zero.get("reduce_bucket_size") == "auto" else _number(zero, "reduce_bucket_size", _BUCKET)
        if stage in (1, 2) and bucket is not None and zero.get("overlap_comm") and not on_cpu:
            bucket *= 2
        return Sharing(name, world_size, stage, False, states, weights, live if stage == 3 else 0, bucket, on_cpu)
    return Sharing(name, world_size)


def _number(settings: Mapping[str, object], name: str, default: int) -> int:
    value = settings.get(name, default)
    return int(value) if isinstance(value, int | float) else default


def terms_per_device(
    terms: Sequence[Term], sharing: Sharing, shape: DecoderShape, formats: Formats, params: int, trained: int
) -> list[Term]:
    """Return the terms for one device.

    Args:
        terms: terms of the whole run.
        sharing: how processes share memory.
        shape: sizes of the model.
        formats: bytes per number.
        params: P.
        trained: number of trained parameters.
    """
    if sharing.stage == 0:
        return list(terms)
    per_device = [_sharded_term(term, sharing) for term in terms if term.name != "cast weights"]
    if sharing.engine == "deepspeed" and trained:
        # DeepSpeed keeps weights and gradients in the compute dtype. ZeRO updates float32 copies of the weights, even
        # if they are float32, from float32 copies of the gradients.
        per_device = [_in_compute_dtype(term, formats) for term in per_device]
        copies = Term("optimizer", 2 * trained * 4, f"{trained:,} weights and their gradients x 4 bytes")
        per_device = [
            *per_device[:2],
            _sharded_term(copies, sharing, "float32 copies"),
            *per_device[2:],
            _bucket(sharing, shape, formats, trained),
        ]
    if sharing.stage == 3:
        per_device.insert(1, _gathered_term(sharing, shape, formats, params, trained))
    return [term for term in per_device if term.num_bytes]


_SHARDED_FROM_ZERO_STAGE = {"optimizer": 1, "gradients": 2, "weights": 3}


def _sharded_term(term: Term, sharing: Sharing, name_on_device: str = "") -> Term:
    name = name_on_device or term.name
    if term.name not in _SHARDED_FROM_ZERO_STAGE or sharing.stage < _SHARDED_FROM_ZERO_STAGE[term.name]:
        return replace(term, name=name)
    is_away = sharing.offloads_weights if term.name == "weights" else sharing.offloads_states
    if is_away:
        return Term(name, 0, "offloaded to CPU memory")
    reason = f"({term.reason}) / {sharing.num_processes} processes"
    return Term(name, -(-term.num_bytes // sharing.num_processes), reason)


def _in_compute_dtype(term: Term, formats: Formats) -> Term:
    """Return a term counted in the compute dtype instead of the dtype of the trained weights."""
    if term.name not in ("weights", "gradients") or formats.trained <= formats.compute:
        return term
    factor = formats.compute / formats.trained
    return replace(
        term, num_bytes=round(term.num_bytes * factor), reason=f"{term.reason}, {formats.compute} bytes each"
    )


def _gathered_term(sharing: Sharing, shape: DecoderShape, formats: Formats, params: int, trained: int) -> Term:
    """Return the term of gathered weights: embeddings and head, the current layer and the next one; and the full
    gradient of one layer before it is reduced."""
    ends = 2 * shape.vocabulary * shape.hidden
    ends = min(ends, params // 2)
    layer = (params - ends) // max(1, shape.layers)
    layers = shape.layers if sharing.keeps_gathered else min(2, shape.layers)
    gradient = round(layer * trained / max(1, params)) * (formats.compute + 4)
    if sharing.live:
        live = min(params, max(sharing.live, ends + layers * layer))
        reason = f"{live:,} x {formats.compute} bytes (stage3_max_live_parameters), plus the gradient of one layer"
        return Term("gathered", live * formats.compute + gradient, reason)
    num_bytes = (ends + layers * layer) * formats.compute + gradient
    what = "all layers" if sharing.keeps_gathered else f"{layers} of {shape.layers} layers"
    reason = f"embeddings, LM head and {what}, {formats.compute} bytes per weight, plus the gradient of one layer"
    return Term("gathered", num_bytes, reason)


def _bucket(sharing: Sharing, shape: DecoderShape, formats: Formats, trained: int) -> Term:
    numbers = shape.hidden**2 if sharing.bucket is None else sharing.bucket
    filled = min(numbers, trained) if sharing.is_on_cpu else numbers
    return Term(
        "buckets", filled * formats.compute, f"{filled:,} gradients x {formats.compute} bytes (reduce_bucket_size)"
    )


def peaks(sharing: Sharing, params: int, trained: int, formats: Formats, loaded_bytes: int) -> list[Term]:
    """Return the peaks in CPU memory of each process, while loading and while saving.

    Args:
        sharing: how processes share memory.
        params: P.
        trained: number of trained parameters.
        formats: bytes per number.
        loaded_bytes: bytes per number in the model's files.
    """
    num = sharing.num_processes if sharing.stage == 3 else 1
    shard = -(-(trained * formats.trained + (params - trained) * loaded_bytes) // num)
    states = round(trained * formats.moments / (sharing.num_processes if sharing.stage else 1))
    loading = "memory-mapped files, shared by the processes of a machine, plus this process's shard" if num > 1 else (
        "memory-mapped files, plus the trainable weights in their training dtype"
    )  # fmt: skip
    return [
        Term("while loading", shard, loading),
        Term("while saving", shard + states, "a copy of what this process saves, while training continues"),
    ]
