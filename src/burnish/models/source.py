"""Where a model lies: in a local folder, in the hub's cache, or on the hub, and what to say where it is nowhere.

In:  a name, and the options that say how the hub is asked. Out: a ``Source``. The hub is Hugging Face's; ModelScope's
     where USE_MODELSCOPE_HUB is set. Transformers fetches from the first as it loads; of the second the folder without
     its weights is fetched when the model is first looked for, the weights when they are wanted, pickles never.
Refuses: a folder that is not there, an id that is neither cached nor reachable; within seconds, without retries.
"""

from __future__ import annotations

import os
import re
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

from burnish.core.errors import MissingExtraError, Problem, UserError
from burnish.core.hubs import is_offline, uses_modelscope
from burnish.core.tensor_files import read_json

CONNECT_TIMEOUT_S = 5.0
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?$")
_PICKLES = ["*.bin", "*.pt", "*.pth", "*.ckpt"]


@dataclass(frozen=True)
class Source:
    """A model that was found.

    Args:
        name: what transformers is given: a folder, or an id.
        folder: where its files are on this machine; None where they have to be fetched.
        has_weights: false where all files are there but the weights.
    """

    name: str
    folder: Path | None
    has_weights: bool = True


def find_source(
    name: str | None, options: Any, option_name: str = "model_name_or_path", with_weights: bool = False
) -> Source:
    """Where ``name`` is.

    Args:
        options: read for ``cache_dir``, ``model_revision``, ``hf_hub_token`` and ``ms_hub_token``.
        with_weights: whether they are wanted too, for which ModelScope is asked here.
    Raises:
        UserError: where it is nowhere, with what is near.
    """
    if not name or not name.strip():
        raise UserError(_no_name(option_name))
    path = Path(name).expanduser()
    if path.is_dir():
        return Source(str(path), path)
    if path.exists():
        raise UserError(Problem(f'{option_name} "{name}" is a file.', remedy="Give the folder that holds it."))
    if not _may_be_hub_id(name):
        raise UserError(_no_folder(name, option_name))
    if uses_modelscope():
        folder = _modelscope_folder(name, options, option_name, with_weights)
        return Source(str(folder), folder, has_weights=_is_whole(folder))
    cached = _cached_folder(name, options)
    if cached is not None:
        return Source(name, cached)
    nowhere = _not_on_hub(name, options, option_name)
    if nowhere is not None:
        is_path = "/" in name and Path(name).parent.is_dir()  # org/model, where a folder called org is here
        raise UserError(_no_folder(name, option_name) if is_path else nowhere)
    return Source(name, None)


def local_folder(name: str, options: Any, option_name: str, patterns: Sequence[str]) -> Path:
    """The folder with the files of ``name`` that match ``patterns``, fetched from the hub where they are not here yet.

    Raises:
        UserError: where it is nowhere.
    """
    source = find_source(name, options, option_name, with_weights=True)
    if source.folder is not None and (source.name == str(source.folder) or is_offline()):
        return source.folder
    from huggingface_hub import snapshot_download

    return Path(
        snapshot_download(
            name,
            revision=options.model_revision,
            cache_dir=options.cache_dir,
            token=options.hf_hub_token,
            allow_patterns=list(patterns),
        )
    )


def adapter_folders(options: Any) -> list[Path]:
    """The local folders of ``adapter_name_or_path``, in order.

    Raises:
        UserError: with every one that is nowhere.
    """
    folders: list[Path] = []
    problems: list[Problem] = []
    for name in options.adapter_name_or_path or []:
        try:
            folders.append(local_folder(name, options, "adapter_name_or_path", ("adapter_*",)))
        except UserError as error:
            problems += error.problems
    if problems:
        raise UserError(problems)
    return folders


def hub_arguments(options: Any) -> dict[str, Any]:
    """What transformers is told about the hub."""
    return {
        "revision": options.model_revision,
        "cache_dir": options.cache_dir,
        "token": options.hf_hub_token,
        "trust_remote_code": options.trust_remote_code,
        "local_files_only": is_offline() or Path(options.model_name_or_path).expanduser().is_dir(),
    }


def _may_be_hub_id(name: str) -> bool:
    """``gpt2`` and ``org/model`` may be; ``./model`` and ``a/b/c`` are paths by their form."""
    return bool(_HUB_ID.match(name)) and not name.startswith(".")


def _cached_folder(name: str, options: Any) -> Path | None:
    from huggingface_hub import try_to_load_from_cache

    for file in ("config.json", "adapter_config.json"):
        found = try_to_load_from_cache(name, file, cache_dir=options.cache_dir, revision=options.model_revision)
        if isinstance(found, str) and (is_offline() or _is_whole(Path(found).parent)):
            return Path(found).parent
    return None


def _is_whole(folder: Path) -> bool:
    """Whether the weights are there, which are fetched last: the cache may hold a config alone."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return all((folder / name).is_file() for name in read_json(index)["weight_map"].values())
    return any(folder.glob("*.safetensors"))


def _modelscope_folder(name: str, options: Any, option_name: str, with_weights: bool) -> Path:
    """The files of ``name`` from ModelScope, or from its cache. ModelScope's first branch is called master."""
    try:
        from modelscope_hub.errors import HubError
    except ImportError:
        raise MissingExtraError("modelscope", f'{option_name} "{name}" of ModelScope', "modelscope") from None
    revision = "master" if options.model_revision == "main" else options.model_revision
    try:
        return _from_modelscope(name, revision, options.cache_dir, options.ms_hub_token, is_offline(), with_weights)
    except (HubError, OSError, ValueError) as error:
        where = "ModelScope's cache (the hubs are switched off, HF_HUB_OFFLINE)" if is_offline() else "ModelScope"
        raise UserError(
            Problem(
                f'{option_name} "{name}" is no local folder, and not to be had from {where}: {_first_line(error)}',
                remedy=f"Check the name, model_revision (asked for: {revision}) and the network; for a private model "
                "give ms_hub_token.",
            )
        ) from error


@cache
def _from_modelscope(
    name: str, revision: str, cache_dir: str | None, token: str | None, is_off: bool, with_weights: bool
) -> Path:
    """Asked once in a process for config and tokenizer, and once for weights."""
    from modelscope import snapshot_download

    return Path(
        snapshot_download(
            name, revision=revision, cache_dir=cache_dir, token=token, local_files_only=is_off,
            ignore_patterns=_PICKLES if with_weights else [*_PICKLES, "*.safetensors"],
        )
    )  # fmt: skip


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).split("\n")[0][:300]


def _not_on_hub(name: str, options: Any, option_name: str) -> Problem | None:
    """Why the hub does not give us ``name``, or None where it does. One request, one answer: the libraries' own clients
    try again for a minute before they give up."""
    if is_offline():
        return _offline(name, option_name, "the hub is switched off (HF_HUB_OFFLINE)")
    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
    request = urllib.request.Request(f"{endpoint}/api/models/{name}/revision/{options.model_revision}")  # noqa: S310
    if options.hf_hub_token:
        request.add_header("Authorization", f"Bearer {options.hf_hub_token}")
    try:
        urllib.request.urlopen(request, timeout=CONNECT_TIMEOUT_S).close()  # noqa: S310 (the hub, or HF_ENDPOINT)
    except urllib.error.HTTPError as error:
        return _refused(name, options, option_name, endpoint, error)
    except OSError as error:  # urllib's own errors, time-outs and refused connections are all of this kind
        return _offline(name, option_name, f"{endpoint} cannot be reached ({getattr(error, 'reason', error)})")
    return None


def _no_name(option_name: str) -> Problem:
    return Problem(
        f"{option_name} is not given.", remedy="Name a local folder with a model in it, or a model on the hub."
    )


def _no_folder(name: str, option_name: str) -> Problem:
    near = _nearest_folders(Path(name).expanduser())
    guess = f" Did you mean {' or '.join(near)}?" if near else ""
    return Problem(f'{option_name} "{name}" is no folder.{guess}')


def _nearest_folders(path: Path, limit: int = 3) -> list[str]:
    """Folders beside the place where ``path`` leaves what exists, those with a similar name first."""
    missing = path
    while not missing.parent.is_dir() and missing.parent != missing:
        missing = missing.parent
    beside = sorted(item.name for item in missing.parent.iterdir() if item.is_dir() and not item.name.startswith("."))
    near = get_close_matches(missing.name, beside, n=limit, cutoff=0.5)
    models = [item for item in beside if (missing.parent / item / "config.json").is_file()]
    found = list(dict.fromkeys(near + models))[:limit]
    rest = path.relative_to(missing)
    whole = (missing.parent / item / rest for item in found)
    return [str(place if place.is_dir() else missing.parent / item) for place, item in zip(whole, found, strict=True)]


def _offline(name: str, option_name: str, why: str) -> Problem:
    return Problem(
        f'{option_name} "{name}" is no local folder, is not in the hub\'s cache, and {why}.',
        remedy="Give the path of a folder, or fetch the model first where there is a network.",
    )


def _refused(name: str, options: Any, option_name: str, endpoint: str, error: urllib.error.HTTPError) -> Problem:
    """What the hub's answer means; it says why in a header (huggingface_hub, utils/_http.py, hf_raise_for_status)."""
    here = f'{option_name} "{name}" is no local folder, and {endpoint}'
    reason = error.headers.get("X-Error-Code", "")
    if reason == "RevisionNotFound":
        return Problem(
            f'{here} has it without a "model_revision" {options.model_revision}.',
            remedy="Check the branch, tag or commit; main is the usual one.",
        )
    if reason == "GatedRepo":
        return Problem(
            f"{here} gives it only to those whom its owner lets in ({error.code}).",
            remedy=f"Ask for access at {endpoint}/{name}, and give your token in hf_hub_token.",
        )
    if error.code in {401, 403, 404}:
        return Problem(
            f"{here} has no such model, or not for you ({error.code}).",
            remedy="Check the name and model_revision; for a private or gated model give hf_hub_token.",
        )
    return Problem(f"{here} answered {error.code}.", remedy="Try later.")
