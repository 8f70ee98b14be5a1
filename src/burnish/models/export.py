"""What leaves for use elsewhere: the options of ``burnish export``, and the way to the hub.

In:  options, a folder that holds a whole model. Out: a repository on the Hugging Face hub.
Refuses: a folder that holds something already, and one that is read from.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from burnish.core.errors import Problem
from burnish.core.options import option


@dataclass
class ExportOptions:
    """What ``burnish export`` writes."""

    export_dir: str | None = option(None, "The folder that burnish export writes the whole model into.")
    export_size: int = option(5, "The largest file of weights.", unit="GB", ge=1)
    export_device: str = option(
        "cpu", "Where adapters are merged; auto takes a GPU if there is one.", choices=("cpu", "auto")
    )
    infer_dtype: str = option(
        "auto", "The format of the weights that are exported; auto for that of the base model's files.",
        choices=("auto", "float16", "bfloat16", "float32"), aliases=("export_dtype",),
    )  # fmt: skip
    export_hub_model_id: str | None = option(None, "The repository on the hub that the exported folder is uploaded to.")


def export_notes(options: Any) -> list[str]:
    if options.export_dir is None:
        return []
    return ['"export_dir" has no effect on training: burnish export reads it.']


def problems_of_export(options: Any, others: list[Path]) -> list[Problem]:
    """What is wrong with where the export goes and what it is made of.

    Args:
        others: the folders of the model and its adapters.
    """
    if not options.export_dir:
        return [
            Problem("export_dir is missing.", remedy="Name a new folder for the whole model: export_dir: models/first")
        ]
    folder = Path(options.export_dir)
    if folder.exists() and not folder.is_dir():
        return [Problem(f'export_dir must be a folder. "{folder}" is a file.')]
    if any(folder.resolve() == other.resolve() for other in others):
        return [
            Problem(
                f'export_dir "{folder}" is the folder that is read from; it would be written over.',
                remedy="Name another export_dir.",
            )
        ]
    inside = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    if not inside or options.overwrite_output_dir:
        return []
    return [
        Problem(
            f'export_dir "{folder}" is not empty: {", ".join(inside[:3])}{", ..." if len(inside) > 3 else ""}.',
            remedy="Name another export_dir, or set overwrite_output_dir: true to write over what is there.",
        )
    ]


def inference_dtype(options: Any) -> torch.dtype | None:
    """The format that is asked for, or None for that of the files."""
    return None if options.infer_dtype == "auto" else getattr(torch, options.infer_dtype)


def upload(folder: Path, options: Any) -> str:
    """Put ``folder`` on the hub, as a private repository where there is none yet. Returns its address."""
    from huggingface_hub import HfApi

    hub = HfApi(token=options.hf_hub_token)
    repository = hub.create_repo(options.export_hub_model_id, private=True, exist_ok=True)
    hub.upload_folder(repo_id=repository.repo_id, folder_path=folder, commit_message="Upload the exported model")
    return str(repository)
