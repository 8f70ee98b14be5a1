"""Load a model for inference: weights, adapters, tokenizer, and the template of its training.

``load_for_inference`` returns a ``LoadedModel``, and ``engine_of`` an engine for it. A command that checks its input
before weights are read calls ``prepare_for_inference`` and ``load_weights`` instead. ``merged_model`` returns the base
model with every adapter merged, which ``burnish export`` writes.

``adapter_name_or_path`` is a chain of adapters that are merged in order. ``served_adapters`` are not merged; each
request selects one. Errors: adapters of another base model, and adapters with full modules (``modules_to_save``)
together with others.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from burnish.adapters.base import ADAPTERS
from burnish.adapters.chain import incomplete_chain_notes
from burnish.adapters.lora import load_adapter
from burnish.adapters.lora_fit import check_fit
from burnish.adapters.lora_model import merge_into_base
from burnish.config.errors import Problem, UserError
from burnish.config.options import raise_if
from burnish.data.chat.chat_template import JinjaFormat
from burnish.data.chat.choose import RECORDED, configure_tokenizer, load_template_of_model, recorded_options
from burnish.data.chat.rendering import UnreadableTemplate, start_rendering
from burnish.data.chat.rows import Template
from burnish.data.chat.truncate import row_length
from burnish.data.images.options import limits_of
from burnish.data.stats import DataStats
from burnish.inference.engine import LocalEngine
from burnish.inference.images.family import load_family
from burnish.inference.images.reading import ImageReader
from burnish.inference.loaded_model import LoadedModel, UnloadedModel, load_side_by_side, served_folders
from burnish.inference.options import is_remote
from burnish.inference.replies.reply_forms import form_of
from burnish.inference.scoring import NO_ANSWERS, ScoreEngine
from burnish.inference.slots import Deliver, SlotLimits
from burnish.inference.types import InferenceEngine, Sampling
from burnish.loop.types import Example, Message
from burnish.losses.reward import REWARD_HEADS, RewardHead, ValueHead
from burnish.models.export import inference_dtype
from burnish.models.load import context_length, largest_over_layers, load_config, load_model, raise_if_not_finite
from burnish.models.options import USED_MODEL
from burnish.models.quantization.quantize import quantization_method_of, quantization_of
from burnish.models.reward_files import BIAS, WEIGHT, check_head_width, head_folders, kind_of_head, read_head
from burnish.models.source import adapter_folders
from burnish.models.tokens import TOKENIZER_FILES, load_tokenizer, resize_embeddings, resized_meta_model
from burnish.parallel.precision import compute_sentence, loaded_dtype, supported_dtype
from burnish.parallel.selection import device_of
from burnish.utils.files import expand_user
from burnish.utils.work import track

if TYPE_CHECKING:
    from burnish.inference.options import AnsweringOptions

OptionsT = TypeVar("OptionsT", bound="AnsweringOptions")
UNLIMITED_CONTEXT = 1 << 20
"""Effectively no limit: a template that only renders prompts does not truncate."""
SLOTS_OF_CPU, MOST_SLOTS, MOST_CONTEXT = 8, 64, 8192
_SHARE_OF_FREE = 0.9


def load_for_inference(
    options: AnsweringOptions, name: str = "", on_note: Callable[[str], None] | None = None, may_score: bool = False,
    explicit: Container[str] = (),
) -> LoadedModel:  # fmt: skip
    """Load the model that the options name.

    Args:
        options: inference options.
        name: name of the model. Default: the last part of its path.
        on_note: called with each note.
        may_score: accept a reward model.
        explicit: names of options that were set, even to their default value.
    Raises:
        UserError: if it cannot be loaded.
    """
    return load_weights(prepare_for_inference(options, name, may_score, explicit), on_note)


def prepare_for_inference(
    options: AnsweringOptions, name: str = "", may_score: bool = False, explicit: Container[str] = ()
) -> UnloadedModel:
    """Read all of a model but its weights. Arguments and errors are those of ``load_for_inference``."""
    notes: list[str] = []
    adapters, config = adapter_folders(options), load_config(options, row_length(options), notes)
    tokenizer, options = tokenizer_of(options, adapters, notes)
    options = with_recorded_template(options, tokenizer, explicit)
    if options.template is None:
        start_rendering()  # while the weights are read
    family = None if is_remote(options) else load_family(options, config, tokenizer, notes, options)
    template = load_template_of_model(options, tokenizer, UNLIMITED_CONTEXT, family)
    own = tokenizer.chat_template
    head = None if is_remote(options) else _reward_head(options, adapters, may_score, config)
    template = template if head is None else template.answering_last()
    notes += configure_tokenizer(template, tokenizer)
    differs = _other_template(template, own, tokenizer)
    notes += differs
    notes += incomplete_chain_notes(adapters)
    served = served_folders(options)
    raise_if(problems_of_adapters(options, config, tokenizer, [*adapters, *served.values()]))
    last = str(adapters[-1] if adapters else options.model_name_or_path)
    return UnloadedModel(
        name or expand_user(last).resolve().name, options, config, tokenizer, template, context_of(options, config),
        tuple(adapters), served, family, head, tuple(notes), tuple(differs), explicit,
    )  # fmt: skip


def load_weights(unloaded: UnloadedModel, on_note: Callable[[str], None] | None = None) -> LoadedModel:
    """Load the weights of a model that ``prepare_for_inference`` returned. Raises UserError if that is impossible."""
    options, tokenizer, template = unloaded.options, unloaded.tokenizer, unloaded.template
    family, served, notes = unloaded.family, unloaded.served, [*unloaded.notes]
    model = None
    if not is_remote(options):
        model = _model(options, unloaded.config, tokenizer, unloaded.adapters, notes, unloaded.head is None)
    adapter_context = load_side_by_side(model, served) if model is not None and served else None
    for sentence in notes:
        (on_note or (lambda text: None))(sentence)
    return LoadedModel(
        unloaded.name, options, model, tokenizer, template, form_of(template), tuple(template.stop_token_ids()),
        default_sampling(options, model, unloaded.explicit),
        options.max_new_tokens if options.max_new_tokens > 0 else options.max_length,
        unloaded.context, tuple(served), adapter_context, tuple(notes), unloaded.head, unloaded.template_notes,
        None if model is None or family is None else ImageReader(model, family, limits_of(options)),
    )  # fmt: skip


def engine_of(loaded: LoadedModel, waiting: int | None = None, deliver: Deliver | None = None) -> InferenceEngine:
    """Return the engine selected by the options: in this process, a server to start, or a running server.

    Args:
        loaded: the loaded model.
        waiting: maximum number of queued requests; None for no limit.
        deliver: receives all results of a turn of the engine in this process.
    """
    if loaded.head is not None and loaded.model is not None:
        return ScoreEngine(loaded.model, loaded.head, loaded.context)
    if not is_remote(loaded.options):
        return local_engine(loaded, waiting, deliver)
    from burnish.inference.remote.client import started_engine

    return started_engine(loaded, waiting)


def local_engine(loaded: LoadedModel, waiting: int | None = None, deliver: Deliver | None = None) -> LocalEngine:
    """Return an engine in this process for a loaded model. Its thread is started."""
    model, options = loaded.model, loaded.options
    assert model is not None
    limits = SlotLimits(slots_of(options, model, loaded.context), loaded.context, waiting, options.infer_exact)
    return LocalEngine(model, limits, adapters=loaded.adapters, adapter_context=loaded.adapter_context, deliver=deliver)


# --- limits and sampling ----------------------------------------------------------------------------------------------


def context_of(options: AnsweringOptions, config: Any) -> int:
    """Return the maximum number of tokens of prompt and response: as configured, within the model's context length."""
    own = context_length(config) or MOST_CONTEXT
    if is_remote(options) and options.infer_url is None:
        return int(min(own, getattr(options, f"{options.infer_backend}_maxlen")))
    return min(own, options.infer_context or MOST_CONTEXT)


def slots_of(options: AnsweringOptions, model: nn.Module, context: int) -> int:
    """Return the number of concurrent requests.

    Default: 8 on a CPU; on a GPU as many as fit into 90% of the free memory, at most 64.
    """
    device = next(model.parameters()).device
    if options.max_concurrent_requests or device.type != "cuda":
        return options.max_concurrent_requests or SLOTS_OF_CPU
    free, _ = torch.cuda.mem_get_info(device)
    return max(1, min(MOST_SLOTS, int(free * _SHARE_OF_FREE) // max(1, slot_bytes(model, context))))


def slot_bytes(model: nn.Module, context: int) -> int:
    """Return the memory of one slot: 2 x layers x key heads x head size x bytes per element x positions."""
    config: Any = model.config
    config = config.get_text_config()
    all_heads = largest_over_layers(config, "num_attention_heads") or 1
    heads = largest_over_layers(config, "num_key_value_heads") or all_heads
    size = largest_over_layers(config, "head_dim") or config.hidden_size // all_heads
    return int(2 * config.num_hidden_layers * heads * size * next(model.parameters()).element_size() * context)


_SAMPLING_SETTINGS = ("temperature", "top_p", "top_k", "repetition_penalty")


def default_sampling(
    options: AnsweringOptions, model: nn.Module | None = None, explicit: Container[str] = ()
) -> Sampling:
    """Return the sampling settings of the options.

    Settings that were not set are those of the model's own ``generation_config``, if it has them.
    """
    plain, config = type(options)(), getattr(model, "generation_config", None)
    values = {}
    for name in _SAMPLING_SETTINGS:
        value, own = getattr(options, name), getattr(config, name, None)
        is_set = name in explicit or value != getattr(plain, name)
        values[name] = value if is_set or own is None else own
    return Sampling(
        temperature=float(values["temperature"]) if options.do_sample else 0.0, top_p=float(values["top_p"]),
        top_k=int(values["top_k"]), repetition_penalty=float(values["repetition_penalty"]),
    )  # fmt: skip


# --- template ---------------------------------------------------------------------------------------------------------


def with_recorded_template(options: AnsweringOptions, tokenizer: Any, explicit: Container[str] = ()) -> Any:
    """Return the options with the template recorded in the model's folder, unless the options name one. Options of the
    template that were set precede the recorded ones."""
    if options.template is not None:
        return options
    where, plain = f"{tokenizer.name_or_path}/tokenizer_config.json", type(options)()
    recorded = recorded_options(tokenizer.init_kwargs.get(RECORDED), where)
    is_set = {name: name in explicit or getattr(options, name) != getattr(plain, name) for name in recorded}
    return replace(options, **{name: value for name, value in recorded.items() if not is_set[name]})


CONVERSATION = (
    Message("user", "What is 2 + 2?"),
    Message("assistant", "4."),
    Message("user", "And in words, per favore: «due»?"),
    Message("assistant", "Four.\nQuattro."),
)


def readable_example(template: Template) -> Example | None:
    """Return a conversation that the template accepts, with a system message if possible."""
    for system in ("You answer in one line.", None):
        example = Example(messages=CONVERSATION, system=system, source="export", number=1)
        if template.encode([example], DataStats())[0] is not None:
            return example
    return None


def as_chat(example: Example) -> list[dict[str, str]]:
    """Return the messages in the format of chat templates."""
    chat = [{"role": message.role, "content": message.text} for message in example.messages]
    return [{"role": "system", "content": example.system}, *chat] if example.system is not None else chat


def _other_template(template: Template, own: Any, tokenizer: Any) -> list[str]:
    """Return a note if the selected template renders other prompts than the model's own chat template."""
    example = readable_example(template)
    if template.spec is None or not own or example is None:
        return []
    try:
        found = JinjaFormat(own, template.options, tokenizer, "the model's own").prompt(example)
    except (UnreadableTemplate, UserError) as error:
        return [f"The model's own chat template failed on a simple test conversation: {error}"]
    ours = template.prompt(example)
    if ours == found:
        return []
    at = next((i for i, (a, b) in enumerate(zip(ours, found, strict=False)) if a != b), min(len(ours), len(found)))
    around = [tokenizer.convert_ids_to_tokens(ids[max(0, at - 2) : at + 3]) for ids in (ours, found)]
    return [
        f'The prompts of template "{template.name}" differ from the model\'s own chat template at token {at}: '
        f"{around[0]} ({template.name}), {around[1]} (the model's own)."
    ]


# --- model and adapters -----------------------------------------------------------------------------------------------


def tokenizer_of(options: OptionsT, adapters: Sequence[Path], notes: list[str]) -> tuple[Any, OptionsT]:
    """Return the tokenizer, and options with which the model matches it.

    The tokenizer comes from the last adapter that has one, since training saves it there with new tokens and chat
    template; otherwise it is the model's.
    """
    for folder in reversed(adapters):
        if any((folder / name).is_file() for name in TOKENIZER_FILES):
            there = replace(options, model_name_or_path=str(folder))
            return load_tokenizer(there, notes), replace(options, resize_vocab=True)
    return load_tokenizer(options, notes), options


def problems_of_adapters(
    options: AnsweringOptions, config: Any, tokenizer: Any, adapters: Sequence[Path]
) -> list[Problem]:
    """Return problems of adapters that do not match the base model. No weight is read."""
    if _is_of_peft(options):
        from burnish.adapters.peft import folder_problems

        return [problem for folder in adapters for problem in folder_problems(folder)]
    model = resized_meta_model(config, tokenizer, options)
    return [problem for folder in adapters for problem in check_fit(model, folder)]


def _is_of_peft(options: AnsweringOptions) -> bool:
    return bool(ADAPTERS.get(options.finetuning_type).metadata.get("is_of_peft"))


def merged_model(
    options: AnsweringOptions, config: Any, tokenizer: Any, adapters: Sequence[Path], notes: list[str],
    device: str | torch.device, needs_head: bool = True,
) -> nn.Module:  # fmt: skip
    """Merge all adapters into the base model in order. Sums are computed in float32 for any dtype of the weights."""
    dtype: Any = torch.float32 if inference_dtype(options) == torch.float32 else "auto"
    loaded = load_model(
        options, dtype=dtype, config=config, device=device, notes=notes, needs_head=needs_head, names=USED_MODEL
    )
    resize_embeddings(loaded, tokenizer, options, notes)
    model: nn.Module = loaded
    if adapters and _is_of_peft(options):
        from burnish.adapters.peft import merge_folders

        model = merge_folders(model, adapters)
    else:
        for folder in track(adapters, "Merging", "adapters"):
            load_adapter(model, folder)
            merge_into_base(model)
    notes += [f"The adapter {folder} was merged." for folder in adapters]
    raise_if_not_finite(model, str(options.model_name_or_path))
    return model


def _model(
    options: AnsweringOptions, config: Any, tokenizer: Any, adapters: Sequence[Path], notes: list[str],
    needs_head: bool = True,
) -> nn.Module:  # fmt: skip
    """Return the model on its device and in its dtype. Adapters of a quantized base model are not merged."""
    device = device_of(options)
    if method := quantization_of(options, config):
        dtype: Any = "auto" if quantization_method_of(config) else supported_dtype(loaded_dtype(config), device)
        model: nn.Module = load_model(
            options, dtype=dtype, config=config, device=device, notes=notes, needs_head=needs_head, names=USED_MODEL
        )
        if len(adapters) > 1:
            what = f"several adapters cannot be merged into a quantized base model ({method})."
            raise UserError(
                what, remedy="First merge all adapters except the last with burnish export, without quantization_bit."
            )
        for folder in adapters:
            load_adapter(model, folder)
    else:
        model = merged_model(options, config, tokenizer, adapters, notes, device, needs_head)
        in_files = next(model.parameters()).dtype
        requested = inference_dtype(options) or supported_dtype(in_files, device)
        model = model.to(requested)
        if requested != in_files:
            notes.append(compute_sentence(requested, in_files, device))
    model.config.use_cache = True  # type: ignore[union-attr]
    return model.eval().requires_grad_(False)


def saved_head(options: AnsweringOptions, adapters: Sequence[Path]) -> tuple[dict[str, torch.Tensor], Path] | None:
    """Return weights and file of the head that ``reward_head`` loads."""
    return read_head(head_folders(options, adapters))


def reward_head(options: AnsweringOptions, adapters: Sequence[Path], config: Any = None) -> RewardHead | None:
    """Return the head of a reward model, float32 on the CPU; None for a generative model.

    Args:
        options: inference options.
        adapters: folders of its adapters, in order; the last folder with a head is used.
        config: config of the model, to check that the head fits.
    """
    found = saved_head(options, adapters)
    if found is None:
        return None
    weights, file = found
    kind = kind_of_head(file)
    head = REWARD_HEADS[kind[0]](kind[1]) if kind else ValueHead(weights[WEIGHT].numel(), has_bias=BIAS in weights)
    head.take(weights)
    if config is not None:
        check_head_width(head.width, getattr(config.get_text_config(), "hidden_size", head.width), str(file))
    return head.requires_grad_(False)


def writes_answers(options: AnsweringOptions) -> bool:
    """Return whether the model generates text. True also if its folders cannot be found, which is reported later."""
    try:
        folders = head_folders(options, adapter_folders(options))
    except UserError:
        return True
    return read_head(folders) is None


def _reward_head(
    options: AnsweringOptions, adapters: Sequence[Path], may_score: bool, config: Any
) -> RewardHead | None:
    head = reward_head(options, adapters, config)
    if head is not None and not may_score:
        remedy = "For scores, use burnish score, or POST /v1/score/evaluation of burnish api."
        raise UserError(NO_ANSWERS, where=str(adapters[-1] if adapters else options.model_name_or_path), remedy=remedy)
    return None if head is None else head.to(device_of(options))
