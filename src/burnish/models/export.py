"""Options of ``burnish export``, and the upload to the hub.

In:  options, the folder of a full model. Out: a repository on the Hugging Face hub. Refuses: a folder that is not
empty, or that the export reads from.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from burnish.checkpoint.checkpoint import CheckpointOptions
from burnish.config.checks import notes
from burnish.config.errors import NotSavedError, Problem, first_line
from burnish.config.options import ineffective_option_notes, option
from burnish.models.options import ModelOptions
from burnish.models.source import is_hub_id
from burnish.utils.files import problems_of_folder


@dataclass
class ExportOptions:
    """Export."""

    export_dir: str | None = option(None, "Output folder of burnish export.", names_place=True)
    export_size: int = option(5, "Maximum size of a weight file.", unit="GB", ge=1)
    export_device: str = option(
        "cpu", "Device on which adapters are merged. auto or cuda: a GPU if available.", choices=("cpu", "auto", "cuda")
    )
    infer_dtype: str = option(
        "auto", "Dtype of the weights for export and inference. auto: the dtype of the base model's files.",
        choices=("auto", "float16", "bfloat16", "float32"), aliases=("export_dtype",),
    )  # fmt: skip
    export_format: str = option(
        "safetensors", "Format of the export: safetensors, or safetensors and a GGUF file for llama.cpp and Ollama.",
        choices=("safetensors", "gguf"),
    )  # fmt: skip
    export_gguf_type: str = option(
        "f16",
        "Type of the weights in the GGUF file: f32, f16, bf16, q8_0, q4_0, q4_1, q5_0, q5_1; any type of "
        "llama-quantize, such as q4_k_m, with the library llama-cpp-python or with llama_cpp.",
    )  # fmt: skip
    llama_cpp: str | None = option(
        None,
        "Path of a llama.cpp checkout or installation whose converter and quantizer write the GGUF file.",
        names_place=True,
        risky="it runs programs in that folder",
    )
    export_image_limits: bool = option(
        False,
        "Write image_max_pixels and image_min_pixels into the processor files of the exported model (Qwen, GLM, "
        "Pixtral). By default they are those of the base model.",
    )
    export_hub_model_id: str | None = option(
        None,
        "Hub repository to upload the exported model to.",
        risky="it uploads to the Hub with the credentials of the user who started the web UI",
    )


def without_gguf(options: ExportOptions) -> list[str]:
    """A sentence for each GGUF option that has no effect, because the export has another format."""
    return ineffective_option_notes(options, {"export_gguf_type": "export_format", "llama_cpp": "export_format"})


@notes
def export_notes(options: ExportOptions) -> list[str]:
    found = without_gguf(options) if options.export_dir is None else []
    if options.export_dir is not None:
        found.append('"export_dir" has no effect on training: it is used by burnish export only.')
    if options.infer_dtype != "auto":
        found.append(
            '"infer_dtype" has no effect on training, evaluation and predictions. bf16 and fp16 select their compute '
            "dtype; with bf16: false and fp16: false it is float32."
        )
    return found


class ExportChoices(ModelOptions, ExportOptions, CheckpointOptions):
    """Options of the export's destination."""


RUN_FILES = ("adapter_config.json", "trainer_state.json", "launch.json", "checkpoint-*")
"""Files that identify the folder of an adapter or of a finished or running training."""


def problems_of_export(
    options: ExportChoices, others: list[Path], left_over: Collection[str] = ()
) -> Iterator[Problem]:
    """Yield problems with the destination folder.

    Args:
        options: the options of the export.
        others: the folders of the model and its adapters.
        left_over: names of files that an interrupted export left in the folder. They are overwritten.
    """
    if not options.export_dir:
        yield Problem(
            "export_dir is missing.",
            remedy="Set it to a new folder for the full model: export_dir: models/first",
            option="export_dir",
        )
        return
    name = options.export_hub_model_id
    if name and not is_hub_id(name):
        what = f'"export_hub_model_id" must be the ID of a repository. Received: "{name}".'
        yield Problem(what, remedy="For example: me/my-model.", option="export_hub_model_id")
        return
    folder = Path(options.export_dir)
    if problems := problems_of_folder(folder, "export_dir"):
        yield from problems
        return
    if any(folder.resolve() == other.resolve() for other in others):
        what = f'export_dir "{folder}" is the input folder; it would be overwritten.'
        yield Problem(what, remedy="Set a different export_dir.", option="export_dir")
        return
    if existing := [path.name for name in RUN_FILES for path in folder.glob(name)]:
        what = f'export_dir "{folder}" contains a training run ({existing[0]}).'
        yield Problem(what, remedy="Set a different export_dir.", option="export_dir")
        return
    inside = sorted({path.name for path in folder.iterdir()} - {*left_over}) if folder.is_dir() else []
    if not inside or options.overwrite_output_dir:
        return
    what = f'export_dir "{folder}" is not empty: {", ".join(inside[:3])}{", ..." if len(inside) > 3 else ""}.'
    yield Problem(
        what,
        remedy="Set a different export_dir, or set overwrite_output_dir: true to overwrite its contents.",
        option="export_dir",
    )


def inference_dtype(options: ExportOptions) -> torch.dtype | None:
    """The requested dtype, or None for that of the files."""
    return None if options.infer_dtype == "auto" else getattr(torch, options.infer_dtype)


def upload(folder: Path, options: ExportChoices) -> str:
    """Upload ``folder`` to the hub, to a private repository if it does not exist yet. Returns its URL.

    Raises:
        NotSavedError: if the upload fails. The exported files remain.
    """
    from huggingface_hub import HfApi

    hub, name = HfApi(token=options.hf_hub_token), options.export_hub_model_id or ""
    try:
        repository = hub.create_repo(name, private=True, exist_ok=True)
        hub.upload_folder(repo_id=repository.repo_id, folder_path=folder, commit_message="Upload the exported model")
    except hub_errors() as error:
        what = f"{folder} was written but could not be uploaded to {name}: {first_line(error).rstrip('.')}."
        remedy = f"After fixing that, run: hf upload {name} {folder}"
        raise NotSavedError(Problem(what, remedy=remedy)) from error
    return str(repository)


def hub_errors() -> tuple[type[BaseException], ...]:
    """Exceptions of the hub's library when the hub or the network fails, including those of its HTTP client."""
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    return (OSError, HFValidationError, *HfHubHTTPError.__bases__)
