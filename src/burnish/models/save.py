"""Saving a trained model for other programs: a folder that ``AutoModelForCausalLM`` or peft loads.

In:  the model, its tokenizer, a folder. Out: safetensors (sharded with an index if large), config, generation config,
tokenizer with its chat template; for an adapter, the adapter's files and the tokenizer.
Refuses: a full model that still contains an adapter. Nothing is pickled.

Checkpoints contain the weights in the precision of training (``adapters.base.ModelState``). Here they are saved in the
precision in which they were loaded.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from burnish.models.images.processor import copy_companions
from burnish.models.quiet import suppress_loading_messages
from burnish.models.save_gathered import save_gathered, trained_weights_whole
from burnish.models.source import files_of_tensors
from burnish.utils.work import progress

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SHARD_SIZE = "5GB"


class SavesAdapter(Protocol):
    """What ``save_model`` needs of an adapter (``adapters.base.ModelAdapter``)."""

    def save(self, model: nn.Module, folder: str) -> None: ...


def save_model(
    model: nn.Module, tokenizer: PreTrainedTokenizerBase | None, folder: str | Path, *,
    adapter: SavesAdapter | None = None, dtype: torch.dtype | None = None, max_shard_size: str | int = SHARD_SIZE,
    stop_token_ids: Sequence[int] = (), whole: Callable[[Tensor], Tensor] | None = None, writes: bool = True,
) -> None:  # fmt: skip
    """Save the trained model or adapter.

    Args:
        model: the trained model.
        tokenizer: its tokenizer, saved as well.
        folder: the destination.
        adapter: saves only the adapter's weights; None saves the full model.
        dtype: dtype of the saved weights. Default: the one in which they were loaded.
        max_shard_size: maximum size of a file.
        stop_token_ids: tokens besides the EOS token at which generation stops.
        whole: gathers a sharded weight; a collective operation.
        writes: whether this rank writes the files.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with progress("Writing the model"), whole_or_nothing(folder) if writes else nullcontext():
        if adapter is not None:
            with trained_weights_whole(model, whole) if whole is not None else nullcontext():
                if writes:
                    adapter.save(model, str(folder))
        else:
            if tokenizer is not None:
                align_special_tokens(model, tokenizer, stop_token_ids)
            with replacing_weights(folder) if writes else nullcontext():
                _save_whole(model, folder, dtype, max_shard_size, whole, writes)
        if not writes:
            return
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        copy_companions(model, folder)


@contextmanager
def whole_or_nothing(folder: Path) -> Iterator[None]:
    """Remove new files from ``folder`` if saving fails, because an incomplete model is useless, and a repeated command
    would refuse the folder.
    """
    there, is_whole = set(folder.iterdir()), False
    try:
        yield
        is_whole = True
    finally:
        if not is_whole:
            for path in set(folder.iterdir()) - there:
                if path.is_file():
                    path.unlink()


_WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")


@contextmanager
def replacing_weights(folder: Path) -> Iterator[None]:
    """Remove the weights of an earlier model from ``folder`` once a full model is written there.

    Shards do not overwrite a single ``model.safetensors``, which libraries load first, and a single file does not
    overwrite shards and their index.
    """
    from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

    index = folder / SAFE_WEIGHTS_INDEX_NAME
    earlier = index.with_name(f"{index.name}.earlier")
    if index.is_file():
        index.replace(earlier)
    try:
        yield
    except BaseException:
        if earlier.is_file():
            earlier.replace(index)
        raise
    earlier.unlink(missing_ok=True)
    written = set(files_of_tensors(index).values()) if index.is_file() else {SAFE_WEIGHTS_NAME}
    if all((folder / name).is_file() for name in written):
        for path in folder.glob("model*.safetensors"):
            if _WEIGHTS.fullmatch(path.name) and path.name not in written:
                path.unlink()


def save_config(model: nn.Module, folder: str | Path, dtype: torch.dtype | None = None) -> None:
    """Write ``config.json`` and ``generation_config.json`` with the cache enabled, which training disables."""
    config: Any = copy.deepcopy(model.config)
    config.dtype = dtype or config.dtype
    config.architectures = [type(model).__name__.removeprefix("FSDP")]  # torch's fully_shard adds this prefix
    if hasattr(config, "use_cache"):
        config.use_cache = True
    config.save_pretrained(folder)
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.save_pretrained(folder)  # type: ignore[union-attr, operator]


def align_special_tokens(
    model: nn.Module, tokenizer: PreTrainedTokenizerBase, stop_token_ids: Sequence[int] = ()
) -> None:
    """Set EOS, BOS and padding token in the model's configs to those of its training.

    EOS tokens that the generation config already contains still stop generation.
    """
    config: Any = model.config
    generation: Any = getattr(model, "generation_config", None)
    rows = config.get_text_config().vocab_size
    for holder in (config, generation):
        if holder is not None:
            for name in ("bos_token_id", "pad_token_id", "eos_token_id"):
                if name != "eos_token_id" or holder is config:
                    set_token(holder, name, getattr(tokenizer, name))
    if generation is not None:
        before = generation.eos_token_id
        ends = [tokenizer.eos_token_id, *stop_token_ids, *(before if isinstance(before, list) else [before])]
        ends = list(dict.fromkeys(end for end in ends if end is not None and end < rows))
        generation.eos_token_id = ends[0] if len(ends) == 1 else ends or None


def set_token(config: Any, name: str, token: int | None) -> None:
    """Set a special token in a config. A config that requires a number keeps its own if the tokenizer has none."""
    from huggingface_hub.errors import StrictDataclassError

    try:
        setattr(config, name, token)
    except StrictDataclassError:
        if token is not None:
            raise


def _save_whole(
    model: nn.Module, folder: Path, dtype: torch.dtype | None, max_shard_size: str | int,
    whole: Callable[[Tensor], Tensor] | None, writes: bool,
) -> None:  # fmt: skip
    config: Any = model.config
    loaded_in = config.dtype
    target_dtype = dtype or loaded_in
    if any(".base_layer." in name or ".original_module." in name for name in model.state_dict(keep_vars=True)):
        raise RuntimeError("An adapter is still in the model; merge it, or save the adapter.")
    if whole is not None:
        save_gathered(model, folder, target_dtype, max_shard_size, whole, writes)
        config.dtype = loaded_in
        if writes:
            save_config(model, folder, target_dtype)
        return
    state = state_in(model, target_dtype)
    # transformers reverts its own conversions (experts), omits tied weights and creates the shards.
    with suppress_loading_messages():
        model.save_pretrained(folder, state_dict=state, max_shard_size=max_shard_size)  # type: ignore[operator]
    config.dtype = loaded_in  # save_pretrained sets it to the dtype of the parameters in memory
    save_config(model, folder, target_dtype)


def state_in(model: nn.Module, dtype: torch.dtype | None) -> dict[str, Tensor]:
    """The state dict with floating-point tensors converted to ``dtype``. Shared tensors stay shared."""
    converted: dict[int, Tensor] = {}
    found = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in converted:
            is_float = tensor.is_floating_point() and dtype is not None
            converted[id(tensor)] = tensor.detach().to(dtype) if is_float else tensor.detach()
        found[name] = converted[id(tensor)]
    return found
