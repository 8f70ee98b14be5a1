"""Find a model in a local folder, in the hub's cache, or on the hub.

In:  a name, and the options of the hub. Out: a ``ModelSource``. The hub is Hugging Face's, or ModelScope's if
USE_MODELSCOPE_HUB is set. transformers downloads from Hugging Face when it loads. From ModelScope everything except the
weights is downloaded when the model is first looked up, the weights when they are needed, and pickle files never.
Refuses: a folder that does not exist, an id that is neither cached nor reachable; within seconds, without retries.
"""

from __future__ import annotations

import os
import re
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from http.client import HTTPException
from pathlib import Path
from typing import Any

from burnish.config.errors import MissingExtraError, Problem, UserError, did_you_mean, first_line
from burnish.config.options import raise_if
from burnish.models.options import ModelOptions
from burnish.utils.environment import is_offline, uses_modelscope
from burnish.utils.files import check_folder_below_roots, expand_user
from burnish.utils.json_files import DAMAGED_FILE_REMEDY, read_object

CONNECT_TIMEOUT_S = 5.0
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?$")
_PICKLES = ["*.bin", "*.pt", "*.pth", "*.ckpt"]
TOKENIZER_PATTERNS = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "spiece.model",
    "sentencepiece.bpe.model", "tekken.json", "chat_template*", "additional_chat_templates/*",
)  # fmt: skip
"""Files of a tokenizer and its chat templates."""
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
"""Files of a vision model that describe how images and videos are preprocessed."""
ADAPTER_PATTERNS = ("adapter_*", "merged_adapters.json", "value_head.*", *TOKENIZER_PATTERNS)
"""Files of an adapter, which may have a reward head, and a tokenizer with new tokens."""


@dataclass(frozen=True)
class ModelSource:
    """A model that was found.

    Args:
        name: the name for transformers: a folder or an id.
        folder: the local folder of its files; None if they have to be downloaded.
        has_weights: false if only the weights are missing.
    """

    name: str
    folder: Path | None
    has_weights: bool = True


def find_source(
    name: str | None, options: ModelOptions, option_name: str = "model_name_or_path", with_weights: bool = False
) -> ModelSource:
    """Find the model ``name``.

    Args:
        name: a folder or a hub id.
        options: read for ``cache_dir``, ``model_revision``, ``hf_hub_token`` and ``ms_hub_token``.
        option_name: the option, for error messages.
        with_weights: also download the weights of a model on ModelScope.

    Raises:
        UserError: if there is no such model; suggests similar names.
    """
    if not name or not name.strip():
        remedy = "Set it to a local model folder or a model ID on the Hub."
        raise UserError(f"{option_name} is not set.", remedy=remedy, option=option_name)
    path = expand_user(name)
    if os.path.isdir(path):  # unlike Path.is_dir, false for a name that is too long
        check_folder_below_roots(path)
        return ModelSource(str(path), path)
    check_model_path(name, option_name)
    if uses_modelscope():
        folder = _modelscope_folder(name, options, option_name, with_weights)
        return ModelSource(str(folder), folder, has_weights=_is_whole(folder))
    cached = _cached_folder(name, options)
    if cached is not None:
        return ModelSource(name, cached)
    nowhere = _not_on_hub(name, options, option_name)
    if nowhere is not None:
        is_path = "/" in name and os.path.isdir(Path(name).parent)  # for org/model: a local folder "org" exists
        raise UserError(_no_folder(name, option_name) if is_path else nowhere)
    return ModelSource(name, None)


def check_model_path(name: str, option_name: str) -> None:
    """Raise UserError for the name of a file, or a path that does not exist."""
    path = expand_user(name)
    if os.path.isdir(path):
        return
    if os.path.exists(path):
        raise UserError(
            f'{option_name} "{name}" is a file.',
            remedy="Set it to the folder that contains the file.",
            option=option_name,
        )
    # ``gpt2`` and ``org/model`` may be hub ids; ``./model`` and ``a/b/c`` are paths.
    if not _HUB_ID.match(name) or name.startswith(".") or not (uses_modelscope() or is_hub_id(name)):
        raise UserError(_no_folder(name, option_name))


def refuse_unavailable(name: str, options: ModelOptions, option_name: str) -> None:
    """Raise UserError for a name that is not a folder, has no file in the hub's cache, and is not on the hub."""
    check_model_path(name, option_name)
    if os.path.isdir(expand_user(name)) or uses_modelscope() or any(_cached_configs(name, options)):
        return
    if (nowhere := _not_on_hub(name, options, option_name)) is not None:
        raise UserError(nowhere)


def local_folder(
    name: str, options: ModelOptions, option_name: str, patterns: Sequence[str], with_weights: bool = True
) -> Path:
    """The local folder with the files of ``name`` that match ``patterns``, downloaded from the hub if necessary.

    Args:
        name: a folder or a hub id.
        options: options of the hub.
        option_name: the option, for error messages.
        patterns: names of files.
        with_weights: also download the weights of a model on ModelScope.

    Raises:
        UserError: if there is no such model.
    """
    source = find_source(name, options, option_name, with_weights)
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


def adapter_folders(options: ModelOptions) -> list[Path]:
    """The local folders of ``adapter_name_or_path``, in order.

    Raises:
        UserError: for all that cannot be found.
    """
    folders: list[Path] = []
    problems: list[Problem] = []
    for name in options.adapter_name_or_path or []:
        try:
            folders.append(local_folder(name, options, "adapter_name_or_path", ADAPTER_PATTERNS))
        except UserError as error:
            problems += error.problems
    raise_if(problems)
    return folders


def hub_arguments(options: ModelOptions) -> dict[str, Any]:
    """Arguments for transformers that concern the hub."""
    return {
        "revision": options.model_revision,
        "cache_dir": options.cache_dir,
        "token": options.hf_hub_token,
        "trust_remote_code": options.trust_remote_code,
        "local_files_only": is_offline() or os.path.isdir(expand_user(options.model_name_or_path or "")),
    }


def is_hub_id(name: str) -> bool:
    """Whether this is a valid repository id of the Hugging Face hub."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # (its list of names leaves it out)

    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


def _cached_configs(name: str, options: ModelOptions) -> Iterator[Path]:
    from huggingface_hub import try_to_load_from_cache

    for file in ("config.json", "adapter_config.json"):
        found = try_to_load_from_cache(name, file, cache_dir=options.cache_dir, revision=options.model_revision)
        if isinstance(found, str):
            yield Path(found)


def _cached_folder(name: str, options: ModelOptions) -> Path | None:
    folders = (path.parent for path in _cached_configs(name, options))
    return next((folder for folder in folders if is_offline() or _is_whole(folder)), None)


def _is_whole(folder: Path) -> bool:
    """Whether the weights are present. They are downloaded last, so the cache may hold only a config."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return all((folder / name).is_file() for name in set(files_of_tensors(index).values()))
    return any(folder.glob("*.safetensors"))


def files_of_tensors(index: Path) -> dict[str, str]:
    """Tensor -> the weight file in the same folder that contains it, by an index.

    Raises:
        UserError: if it is not an index, or refers to files outside of its folder.
    """
    found = read_object(index, needs=[("weight_map", dict)])["weight_map"]
    files = {tensor: str(name) for tensor, name in found.items()}
    if outside := sorted(name for name in files.values() if Path(name).is_absolute() or ".." in Path(name).parts):
        what = f'it names a file outside of its folder: "{outside[0]}".'
        raise UserError(what, where=str(index), remedy=DAMAGED_FILE_REMEDY)
    return files


def _modelscope_folder(name: str, options: ModelOptions, option_name: str, with_weights: bool) -> Path:
    """The files of ``name`` from ModelScope or its cache. ModelScope's main branch is called master."""
    try:
        from modelscope_hub.errors import HubError
    except ImportError:
        raise MissingExtraError(
            "modelscope", f'{option_name} "{name}" on ModelScope', "modelscope", option_name
        ) from None
    revision = "master" if options.model_revision == "main" else options.model_revision
    try:
        return _from_modelscope(name, revision, options.cache_dir, options.ms_hub_token, is_offline(), with_weights)
    except (HubError, OSError, ValueError) as error:
        where = "ModelScope's cache (Hub access is disabled by HF_HUB_OFFLINE)" if is_offline() else "ModelScope"
        raise UserError(
            f'{option_name} "{name}" is not a local folder and could not be downloaded from {where}: '
            f"{first_line(error)}",
            remedy=f"Check the name, model_revision (requested: {revision}) and the network; for a private "
            "model, set ms_hub_token.",
            option=option_name,
        ) from error


@cache
def _from_modelscope(
    name: str, revision: str, cache_dir: str | None, token: str | None, is_off: bool, with_weights: bool
) -> Path:
    """Download from ModelScope. Cached, so that a process requests config and tokenizer once, and the weights once."""
    from modelscope import snapshot_download

    return Path(
        snapshot_download(
            name, revision=revision, cache_dir=cache_dir, token=token, local_files_only=is_off,
            ignore_patterns=_PICKLES if with_weights else [*_PICKLES, "*.safetensors"],
        )
    )  # fmt: skip


def _not_on_hub(name: str, options: ModelOptions, option_name: str) -> Problem | None:
    """The reason why the hub does not provide ``name``, or None if it does. Sends one request, because the libraries'
    own clients retry for a minute before they fail.
    """
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]  # (its list of names leaves it out)

    if is_offline():
        return _offline(name, option_name, "Hub access is disabled (HF_HUB_OFFLINE)")
    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
    revision = urllib.parse.quote(options.model_revision, safe="")  # refs/pr/1
    headers = build_hf_headers(token=options.hf_hub_token or None)  # default: HF_TOKEN, or that of ``hf auth login``
    try:
        request = urllib.request.Request(f"{endpoint}/api/models/{name}/revision/{revision}")  # noqa: S310
        if "authorization" in headers:
            request.add_header("Authorization", headers["authorization"])
        urllib.request.urlopen(request, timeout=CONNECT_TIMEOUT_S).close()  # noqa: S310 (the hub, or HF_ENDPOINT)
    except urllib.error.HTTPError as error:
        return _hub_error_problem(name, options, option_name, endpoint, error)
    # OSError: base class of urllib's errors, time-outs and refused connections; the others: HF_ENDPOINT is no such URL
    except (OSError, HTTPException, ValueError) as error:
        why = first_line(getattr(error, "reason", error))
        return _offline(name, option_name, f"{endpoint} cannot be reached ({why})")
    return None


def _no_folder(name: str, option_name: str) -> Problem:
    near = _nearest_folders(expand_user(name))
    guess = f" Did you mean {' or '.join(near)}?" if near else ""
    remedy = "Set it to a folder with a model, or to the name of a model on the Hub."
    return Problem(f'{option_name} "{name}" is not a folder.{guess}', option=option_name, remedy=remedy)


def _nearest_folders(path: Path) -> list[str]:
    """Folders in the deepest existing parent of ``path``, similar names first."""
    missing = path
    while not os.path.isdir(missing.parent) and missing.parent != missing:
        missing = missing.parent
    beside = sorted(item.name for item in _folders_in(missing.parent) if not item.name.startswith("."))
    near = get_close_matches(missing.name, beside, n=3, cutoff=0.5)
    models = [item for item in beside if (missing.parent / item / "config.json").is_file()]
    found = list(dict.fromkeys(near + models))[:3]
    rest = path.relative_to(missing)
    whole = {missing.parent / item: missing.parent / item / rest for item in found}
    is_root = missing.parent == missing.parent.parent  # /tmp is not meant by /hy-tmp/models/first
    return [
        str(place if os.path.isdir(place) else folder)
        for folder, place in whole.items()
        if os.path.isdir(place) or not is_root
    ]


def _similar_folder(name: str) -> str:
    """`` Did you mean "demo-run"?``: a local folder with a similar name, for a name that is also a valid hub id."""
    return did_you_mean(name, [str(item) for item in _folders_in(expand_user(name).parent)])


def _folders_in(place: Path) -> list[Path]:
    """The folders in ``place``; none if it is missing or this user may not list it."""
    try:
        return [item for item in place.iterdir() if item.is_dir()]
    except OSError:
        return []


def _offline(name: str, option_name: str, why: str) -> Problem:
    return Problem(
        f'{option_name} "{name}" is not a local folder, is not in the Hub\'s cache, and {why}.{_similar_folder(name)}',
        remedy="Set it to the path of a folder, or download the model first on a machine with network access.",
        option=option_name,
    )


def _hub_error_problem(
    name: str, options: ModelOptions, option_name: str, endpoint: str, error: urllib.error.HTTPError
) -> Problem:
    """The problem for an HTTP error of the hub. A header contains the reason (huggingface_hub, utils/_http.py,
    hf_raise_for_status).
    """
    here = f'{option_name} "{name}" is not a local folder, and {endpoint}'
    reason = error.headers.get("X-Error-Code", "")
    if reason == "RevisionNotFound":
        return Problem(
            f'{here} has this model, but not the "model_revision" {options.model_revision}.',
            remedy="Check the branch, tag or commit. The default branch is usually main.",
            option=("model_revision", option_name),
        )
    if reason == "GatedRepo":
        return Problem(
            f"{here} restricts access to this model ({error.code}).",
            remedy=f"Request access at {endpoint}/{name}, and set hf_hub_token to your token.",
            option=option_name,
        )
    if error.code in {401, 403, 404}:
        return Problem(
            f"{here} has no such model, or you have no access to it ({error.code}).{_similar_folder(name)}",
            remedy="Check the name and model_revision; for a private or gated model, set hf_hub_token.",
            option=option_name,
        )
    return Problem(f"{here} returned HTTP {error.code}.", remedy="Try later.", option=option_name)
