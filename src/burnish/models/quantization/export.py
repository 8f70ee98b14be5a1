"""Export quantized weights as GPTQ (Frantar et al. 2022, https://arxiv.org/abs/2210.17323) or AWQ (Lin et al. 2023,
https://arxiv.org/abs/2306.00978) files, with the library gptqmodel.

In:  a folder in full precision, rows for calibration, rows for evaluation. Out: a folder for transformers, vLLM and
SGLang, and the perplexity of both folders on the same rows.
Refuses: a missing library; layer widths that the method cannot divide into groups.

gptqmodel patches transformers at import, prints, and writes logs to the working directory. So it runs in a separate
process and folder. The process executes this file, too. Tested with gptqmodel 7.7, optimum 2.3, transformers 5.23 and
torch 2.13 on a CPU; not tested on a GPU.
"""

# I inputs and O outputs of a linear layer

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import chdir
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, cast

import torch
from torch import nn
from torch.nn import functional

from burnish.config.checks import notes
from burnish.config.errors import MissingExtraError, Problem
from burnish.config.options import ineffective_option_notes, option
from burnish.loop.types import IGNORE_INDEX, Row
from burnish.models.quantization.quantize import LIBRARY_OF, quantization_method_of, use_kernels_that_train
from burnish.utils.work import progress

EXTRA = "gptq"
GROUPS: Final = (128, 64, 32)
"""Group sizes that kernels support. The largest that divides the inputs of every layer is used."""
_AWQ_OUTPUTS = 64  # gptqmodel 7.7 searches for the best clipping in batches of this many outputs
_PACKED_WORD_BITS = 32  # bits of a packed word, along inputs and along outputs


@dataclass
class QuantizedExportOptions:
    """Quantized export."""

    export_quantization_bit: int | None = option(
        None,
        "Number of bits to quantize the exported linear layers to, with gptqmodel.",
        choices=(2, 3, 4, 8),
        unit="bits",
    )
    export_quantization_method: str = option(
        "gptq", "Quantization method of the export. awq supports 4 bits only.", choices=("gptq", "awq")
    )
    export_quantization_dataset: str | None = option(
        None,
        "Calibration dataset, named as in dataset. Default: the training dataset.",
        names_place=True,
    )
    export_quantization_nsamples: int = option(128, "Number of calibration examples.", unit="examples", ge=1)
    export_quantization_maxlen: int = option(
        1024, "Maximum length of a calibration example, in tokens.", unit="tokens", ge=1
    )


def without_bits(options: QuantizedExportOptions) -> list[str]:
    """A sentence for each quantized export option that has no effect, because the export is not quantized."""
    parts = ("method", "dataset", "nsamples", "maxlen")
    return ineffective_option_notes(
        options, {f"export_quantization_{part}": "export_quantization_bit" for part in parts}
    )


@notes
def quantized_export_notes(options: QuantizedExportOptions) -> Iterator[str]:
    if options.export_quantization_bit is None:
        yield from without_bits(options)
        return
    yield '"export_quantization_bit" has no effect on training: it is used by burnish export only.'


@dataclass(frozen=True)
class QuantizationJob:
    """The input of the quantization process.

    Args:
        group: number of inputs that share a scale; -1 for all inputs of an output.
        rows: token ids for calibration.
        held_out: rows with labels for evaluation.
        device: "cpu" or "cuda".
    """

    source: str
    target: str
    method: str
    bits: int
    group: int
    rows: Sequence[Sequence[int]]
    held_out: Sequence[Row]
    max_shard_size: str
    trust_remote_code: bool
    device: str


def check_quantized_export(options: QuantizedExportOptions, shapes: nn.Module) -> Iterator[Problem]:
    """Yield problems that prevent the export of a quantized model. ``shapes`` is the model, possibly without
    weights."""
    method, bits = options.export_quantization_method, options.export_quantization_bit
    missing = [name for name in LIBRARY_OF[method] if find_spec(name) is None]
    if missing:  # the extra installs all of them
        needed_for = '"export_quantization_bit"'
        yield from MissingExtraError(missing[0], needed_for, EXTRA, option="export_quantization_bit").problems
    if method == "awq" and bits != 4:
        what = f'"export_quantization_method" awq supports 4 bits only. Received: "export_quantization_bit" {bits}.'
        yield Problem(
            what,
            remedy="Set export_quantization_bit: 4, or export_quantization_method: gptq.",
            option=("export_quantization_method", "export_quantization_bit"),
        )
    if not _layers(shapes):  # GPT-2 has none
        what = f"{type(shapes).__name__} has no torch.nn.Linear layers, and only those can be quantized."
        yield Problem(what, remedy="Remove export_quantization_bit.")
    inputs = _PACKED_WORD_BITS // math.gcd(_PACKED_WORD_BITS, bits or _PACKED_WORD_BITS)
    outputs = _AWQ_OUTPUTS if method == "awq" else inputs
    for name, layer in _layers(shapes):
        if layer.in_features % inputs or layer.out_features % outputs:
            what = (
                f"{method} with {bits} bits requires layers whose in_features is a multiple of {inputs} and whose "
                f"out_features is a multiple of {outputs}. "
                f"{name} has {layer.in_features} and {layer.out_features}."
            )
            other = (
                ", or export_quantization_method: gptq" if method == "awq" else ", or set export_quantization_bit: 8"
            )
            yield Problem(what, remedy=f"Remove export_quantization_bit{other}.")
            break


def group_of(shapes: nn.Module) -> int:
    """Number of inputs that share a scale: the largest that divides every layer; -1 (all) if there is none."""
    widths = [layer.in_features for _, layer in _layers(shapes)]
    return next((group for group in GROUPS if all(width % group == 0 for width in widths)), -1)


def _layers(model: nn.Module) -> list[tuple[str, nn.Linear]]:
    """The linear layers that are quantized: all except the head."""
    head = model.get_output_embeddings()  # type: ignore[operator]
    return [(name, each) for name, each in model.named_modules() if isinstance(each, nn.Linear) and each is not head]


def quantize(job: QuantizationJob, folder: Path) -> tuple[float, float]:
    """Write ``job.target`` in a separate process.

    Args:
        job: what to quantize.
        folder: folder for the files of the process: task, log, result.

    Returns:
        Perplexity on the held-out rows before and after.

    Raises:
        RuntimeError: if the library fails, with its last output.
    """
    task, log = folder / "task.json", folder / "log.txt"
    task.write_text(json.dumps(asdict(job)), encoding="utf-8")
    with progress(f"Quantizing with {job.method}"), log.open("wb") as log_file:
        done = subprocess.run(  # noqa: S603 (an argument list)
            [sys.executable, "-P", "-m", __name__, str(task.resolve())], stdin=subprocess.DEVNULL, stdout=log_file,
            stderr=subprocess.STDOUT, env=_process_environment(job), check=False,
        )  # fmt: skip
    if done.returncode:
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-8:]
        last = lines[-1] if lines else f"exit status {done.returncode}"
        raise RuntimeError(f"the model could not be quantized with gptqmodel: {last}\n  " + "\n  ".join(lines))
    result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    return result["before"], result["after"]


def _process_environment(job: QuantizationJob) -> dict[str, str]:
    """The environment of the process. On few cores gptqmodel 7.7 requests more workers than it creates
    (utils/threadx.py), and torch would compile a kernel for a few rows.
    """
    own = {"GPTQMODEL_CPU_WORKERS": str(max(2, (os.cpu_count() or 1) // 2)), "TORCHDYNAMO_DISABLE": "1"}
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if job.device == "cpu" else {}
    return {**own, **os.environ, **hidden}


# --- in the process that quantizes ------------------------------------------------------------------------------------


def main(task: Path) -> None:
    job = QuantizationJob(**json.loads(task.read_text(encoding="utf-8")))
    sys.path[:] = map(os.path.abspath, sys.path)
    with chdir(task.parent):
        before = _perplexity_of(job.source, job)
        _write(job)
        after = _perplexity_of(job.target, job)
    (task.parent / "result.json").write_text(json.dumps({"before": before, "after": after}), encoding="utf-8")


def _write(job: QuantizationJob) -> None:
    from gptqmodel import GPTQModel
    from gptqmodel.quantization.config import AWQConfig, GPTQConfig

    shape: dict[str, Any] = {"bits": job.bits, "group_size": job.group, "offload_to_disk": False}
    if job.method == "gptq":
        config = GPTQConfig(**shape, act_group_aware=job.group > 0)  # orders groups
    else:
        config = AWQConfig(**shape, sym=False)  # with zero points, as published by its authors
    model = GPTQModel.load(job.source, config, device=job.device, trust_remote_code=job.trust_remote_code)
    rows = [{"input_ids": list(row), "attention_mask": [1] * len(row)} for row in job.rows]
    model.quantize(rows, calibration_data_min_length=1)
    model.save(job.target, max_shard_size=job.max_shard_size)


def _perplexity_of(folder: str, job: QuantizationJob) -> float:
    from transformers import AutoConfig, AutoModelForCausalLM

    trust = {"trust_remote_code": job.trust_remote_code}
    config = AutoConfig.from_pretrained(folder, **trust)
    if quantization_method_of(config):
        use_kernels_that_train(config, job.device)
    model = AutoModelForCausalLM.from_pretrained(folder, config=config, dtype="auto", **trust)
    return perplexity(cast(Any, model).to(job.device).eval(), job.held_out)


@torch.no_grad()
def perplexity(model: nn.Module, rows: Sequence[Mapping[str, Any]]) -> float:
    """Exponential of the mean loss, in nats, of the trained tokens of ``rows``."""
    device, total, count = next(model.parameters()).device, 0.0, 0
    for row in rows:
        ids = torch.tensor([row["input_ids"]], device=device)
        labels = torch.tensor(row["labels"][1:], device=device)
        logits = model(input_ids=ids, use_cache=False).logits[0, :-1].float()
        total += functional.cross_entropy(logits, labels, ignore_index=IGNORE_INDEX, reduction="sum").item()
        count += int((labels != IGNORE_INDEX).sum())
    return math.exp(total / count)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
