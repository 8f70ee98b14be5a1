"""Memory per device: the part of a run's memory that one device holds, for any engine and number of processes.

In: the parts of the memory of a run on one device (``estimate``), and how they are shared. Out: the same parts for one
device of several, what an engine needs beside them, and the peaks while a model is loaded and while a checkpoint is
written. Nothing of it has been measured on a GPU; on CPUs it is held against the counts of a run by a test.
"""

# N processes that share, P parameters, L layers

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from burnish.app.estimate import Formats, Shape, Term
from burnish.app.options import RunOptions
from burnish.engine.deepspeed_settings import raw_settings, zero_stage
from burnish.engine.fsdp_settings import fsdp_settings
from burnish.engine.options import engine_name


@dataclass(frozen=True)
class Sharing:
    """Description of how processes share the memory of a run.

    Args:
        engine: "single", "ddp", "fsdp", "deepspeed".
        num_processes: that share one copy of what is sharded.
        stage: of ZeRO: 1 shares optimizer states, 2 gradients too, 3 weights too. FSDP is 3.
        keeps_gathered: weights that were gathered for a forward pass stay for the backward pass.
        offloads_states, offloads_weights: they lie in the memory of the machine.
    """

    engine: str = "single"
    num_processes: int = 1
    stage: int = 0
    keeps_gathered: bool = False
    offloads_states: bool = False
    offloads_weights: bool = False


def sharing_of(options: RunOptions, world_size: int) -> Sharing:
    """As the options and the number of processes say."""
    name = engine_name(options, world_size)
    if name == "fsdp":
        settings = fsdp_settings(options)
        copies = max(1, settings.copies or 1)
        return Sharing(
            name, max(1, world_size // copies), 3, not settings.reshards, settings.offloads, settings.offloads
        )
    if name == "deepspeed":
        zero = raw_settings(options).get("zero_optimization") or {}
        states, weights = (
            (zero.get(key) or {}).get("device") == "cpu" for key in ("offload_optimizer", "offload_param")
        )
        return Sharing(name, world_size, zero_stage(options), False, states, weights)
    return Sharing(name, world_size)


def shared(
    terms: Sequence[Term], sharing: Sharing, shape: Shape, formats: Formats, params: int, trained: int
) -> list[Term]:
    """The parts on one device.

    Args:
        params: P. trained: of them.
    """
    if sharing.stage == 0:
        return list(terms)
    found = [_shared(term, sharing) for term in terms if term.name != "cast weights"]
    if sharing.engine == "deepspeed" and trained and formats.compute < 4:
        # Weights and gradients are in half precision there, and the float32 copies are a part of the optimizer's.
        found = [_halved(term, formats) for term in found]
        copies = Term("float32 copies", trained * 4, f"{trained:,} x 4 bytes")
        found.insert(2, _shared(replace(copies, name="optimizer"), sharing, "float32 copies"))
    if sharing.stage == 3:
        found.insert(1, _gathered(sharing, shape, formats, params, trained))
    return [term for term in found if term.num_bytes]


_FROM_STAGE = {"optimizer": 1, "gradients": 2, "weights": 3}


def _shared(term: Term, sharing: Sharing, called: str = "") -> Term:
    name = called or term.name
    if term.name not in _FROM_STAGE or sharing.stage < _FROM_STAGE[term.name]:
        return replace(term, name=name)
    is_away = sharing.offloads_weights if term.name == "weights" else sharing.offloads_states
    if is_away:
        return Term(name, 0, "in the memory of the machine")
    reason = f"({term.reason}) / {sharing.num_processes} processes"
    return Term(name, -(-term.num_bytes // sharing.num_processes), reason)


def _halved(term: Term, formats: Formats) -> Term:
    """The term, counted in the format of the forward pass instead of the four bytes of what trains."""
    if term.name not in ("weights", "gradients") or formats.trained <= formats.compute:
        return term
    factor = formats.compute / formats.trained
    return replace(term, num_bytes=round(term.num_bytes * factor), reason=f"{term.reason}, in {formats.compute} bytes")


def _gathered(sharing: Sharing, shape: Shape, formats: Formats, params: int, trained: int) -> Term:
    """Whole weights for the time of their use: embeddings and head, the layer under way and the next one; and the whole
    gradient of a layer before it is shared out."""
    ends = 2 * shape.vocabulary * shape.hidden
    ends = min(ends, params // 2)
    layer = (params - ends) // max(1, shape.layers)
    layers = shape.layers if sharing.keeps_gathered else min(2, shape.layers)
    gradient = round(layer * trained / max(1, params)) * (formats.compute + 4)
    num_bytes = (ends + layers * layer) * formats.compute + gradient
    what = "all layers" if sharing.keeps_gathered else f"{layers} of {shape.layers} layers"
    return Term("gathered", num_bytes, f"embeddings, head and {what} whole, in {formats.compute} bytes; one gradient")


def peaks(sharing: Sharing, params: int, trained: int, formats: Formats, loaded_bytes: int) -> list[Term]:
    """Beside the steps: in the memory of the machine, for each process.

    Args:
        loaded_bytes: of one number of the model's files.
    """
    num = sharing.num_processes if sharing.stage == 3 else 1
    own = -(-(trained * formats.trained + (params - trained) * loaded_bytes) // num)
    states = round(trained * formats.moments / (sharing.num_processes if sharing.stage else 1))
    loading = "views of the files, which all processes of a machine share, and this process's part" if num > 1 else (
        "views of the files, and the weights that train in the format in which they do"
    )  # fmt: skip
    return [
        Term("while loading", own, loading),
        Term("while saving", own + states, "a copy of what this process writes, while the training goes on"),
    ]
