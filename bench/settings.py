"""The settings that are compared: how each library is run, by part of the benchmark.

Other libraries run with their defaults and with the best options that they offer on a CPU: bf16, padding-free batches
or grouping by length, no gradient checkpointing. All of them get the same rows in steps of eight. A pack is as long as
eight rows on average, or as the longest row. Each setting runs one epoch plus one step: the first step is not counted,
and with rows sorted by length it contains the longest ones, which the additional step repeats. burnish runs two epochs,
to have enough to measure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

from gauge import GENERATION_OPTIONS, PREFERENCES
from material import SEED, make_vocabulary

from burnish.parallel.precision import has_fast_bfloat16

BASE = "TRL, default"
OURS = "burnish, bf16"
OURS_FLOAT32 = "burnish, float32"
PLAIN = "plain: padded, all logits, AdamW tensor by tensor"
ROWS_PER_STEP = 8


@dataclass(frozen=True)
class Setting:
    """One way to run one library.

    Args:
        library: name of the environment.
        command: script under bench/ and its arguments. MATERIAL and OUTPUT are replaced by folders, EVALUATION by the
            file of conversations of the material.
        in_new_process: whether it runs in a new process instead of one forked from a process that has imported the
            library.
        stops_at_first_step: whether a new process stops at its first step.
        processor: key of ``measuring.LIMITS``; limits the instructions that are used.
    """

    name: str
    library: str
    command: tuple[str, ...]
    in_new_process: bool = False
    stops_at_first_step: bool = True
    processor: str = ""


def training(name: str, library: str, **options: Any) -> Setting:
    """Return a training setting with these options, formatted as the script of the library expects them."""
    script = {"burnish": ("train_burnish.py",), "llamafactory": ("train_llamafactory.py",)}.get(
        library, ("train_peer.py", library)
    )
    formatted = to_yaml if library == "burnish" else repr
    arguments = (f"{option}={formatted(value)}" for option, value in options.items())
    return Setting(name, library, (*script, "MATERIAL", "OUTPUT", *arguments))


def to_yaml(value: Any) -> str:
    """Format a value as on burnish's command line."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def trainings(method: str, facts: dict[str, Any]) -> tuple[Setting, ...]:
    """Return every training setting with ``method``, full or lora.

    With LoRA, other libraries load the model in bfloat16 at their best setting; otherwise its weights are cast in every
    forward pass.
    """
    is_long = facts["longest"] > LONG
    pack = max(facts["longest_row"], 0 if is_long else ROWS_PER_STEP * facts["tokens"] // facts["rows"])
    pack += -pack % 8  # LLaMA-Factory 0.9.5 pads packs to a multiple of eight, but not their positions
    same: dict[str, Any] = {"finetuning_type": method, "num_train_epochs": 1.01}
    lean = same | ({"dtype": "bfloat16"} if method == "lora" else {})
    # Two long rows per step, and one per micro-batch if they are padded: the logits of more do not fit into memory.
    fitting = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 2} if is_long else {}
    trl = lean | {"gradient_checkpointing": False}
    factory = same | {"bf16": True}
    grouped = fitting | {"train_sampling_strategy": "group_by_length"}  # never the best setting of TRL or LLaMA-Factory
    packed = {"per_device_train_batch_size": 1}
    return (
        training(BASE, "trl", **same, **fitting),
        training("TRL, packing, no checkpointing", "trl", packing=True, max_length=pack, **trl, **packed),
        training("TRL, padding-free, no checkpointing", "trl", padding_free=True, max_length=None, **trl),
        training("transformers, bf16", "transformers", bf16=True, **lean, **fitting),
        training("transformers, bf16, grouped by length", "transformers", bf16=True, **lean, **grouped),
        training("LLaMA-Factory, bf16", "llamafactory", **factory, **fitting),
        training("LLaMA-Factory, bf16, neat packing", "llamafactory", neat_packing=True, cutoff_len=pack, **factory,
                 **packed),
        training("LLaMA-Factory, bf16, neat packing, no checkpointing", "llamafactory", neat_packing=True,
                 cutoff_len=pack, **factory, **packed, disable_gradient_checkpointing=True),
        training(OURS, "burnish", bf16=True, **same | {"num_train_epochs": 1.01 if is_long else 2.01},
                 per_device_train_batch_size=2 if is_long else ROWS_PER_STEP),
        training("burnish, float32", "burnish", **same),
    )  # fmt: skip


def in_float32(settings: Iterable[Setting]) -> tuple[Setting, ...]:
    """Return float32 variants of the bfloat16 settings, as on a processor without AVX512. TRL's configs use bfloat16
    unless it is disabled."""
    settings_list = []
    for setting in settings:
        command = tuple(item for item in setting.command if item.lower() not in ("bf16=true", "dtype='bfloat16'"))
        is_script_of_trl = command[:2] == ("train_peer.py", "trl")
        command += ("bf16=False",) * is_script_of_trl
        if setting.name != OURS_FLOAT32:
            name = setting.name.replace("bf16", "float32")
            settings_list.append(replace(setting, name=name, command=command, processor="avx2"))
    return tuple(settings_list)


LONG = 1024
# The settings that ratios need for the 30M shape; --all-settings adds the others.
DEFAULT_NAMES = (
    BASE, "TRL, packing, no checkpointing", "TRL, padding-free, no checkpointing",
    "transformers, bf16, grouped by length", "LLaMA-Factory, bf16, neat packing",
    "LLaMA-Factory, bf16, neat packing, no checkpointing", OURS,
)  # fmt: skip
# For the wide model: the setting of each library that was the fastest and needed the least memory, or nearly so.
WIDE_NAMES = (BASE, "TRL, padding-free, no checkpointing", "transformers, bf16, grouped by length",
        "LLaMA-Factory, bf16, neat packing", OURS)  # fmt: skip
BEST_NAMES = ("TRL, packing, no checkpointing", "transformers, bf16, grouped by length",
        "LLaMA-Factory, bf16, neat packing, no checkpointing", OURS)  # fmt: skip


def optimization_settings() -> tuple[Setting, ...]:
    """Return burnish without its optimizations, then with one added after the other. They are options, patches that are
    disabled, and what ``optimizations.py`` disables."""
    options: dict[str, Any] = {"padding_free": False, "attn_implementation": "sdpa", "fused_loss": False}
    options |= {"optim": "adamw_torch", "needed_tokens_only": False}
    without = ["attention", "memory"]
    left_out = ["norm", "gated layer", "activation", "linear layer", "tied embedding"]
    settings_list = []
    for name, *enabled in OPTIMIZATIONS:
        options = {option: value for option, value in options.items() if option not in enabled}
        without = [item for item in without if item not in enabled]
        left_out = [kind for kind in left_out if kind not in enabled]
        more = options | ({"leave_out": ",".join(left_out)} if left_out else {})
        settings_list.append(
            training(name, "burnish", bf16=True, num_train_epochs=1.01, without=",".join(without), **more)
        )
    return tuple(settings_list)


# Line of the table, and what is enabled in it and in the lines below.
OPTIMIZATIONS = (
    (PLAIN,),
    ("+ head and loss at trained positions only, in chunks", "fused_loss"),
    ("+ padding-free, torch's attention per sequence", "padding_free", "attn_implementation"),
    ("+ own attention for short and long sequences", "attention"),
    ("+ fused AdamW", "optim"),
    ("+ freed memory is reused", "memory"),
    ("+ norms, gated layers and activations by blocks", "norm", "gated layer", "activation"),
    ("+ no saved copies of weights", "linear layer"),
    ("+ one gradient for embedding and head", "tied embedding"),
    ("+ prefix sharing, no tokens without effect on the loss", "needed_tokens_only"),
)  # fmt: skip


SYSTEM = " ".join(make_vocabulary(Random(SEED))[:150])
BATCHING = tuple(
    training(name, "burnish", bf16=True, num_train_epochs=1.01, **options)
    for name, options in (
        (OURS, {}),
        ("burnish, packing", {"packing": True, "per_device_train_batch_size": 1}),
        ("burnish, grouped by length", {"train_sampling_strategy": "group_by_length"}),
        ("burnish, at most 768 tokens per micro-batch", {"max_tokens_per_batch": 768}),
        ("burnish, rows with a common prefix of 150 words", {"default_system": SYSTEM}),
        ("the same, without prefix sharing", {"default_system": SYSTEM, "needed_tokens_only": False}),
    )
)
# A script of another library, and the same script with burnish's classes.
SCRIPTS = tuple(
    replace(training(name, peer, num_train_epochs=1.01, **options, **source), library="burnish" if source else peer)
    for peer, theirs, ours, options in (
        ("trl", BASE, "the same script with burnish's SFTTrainer", {}),
        ("transformers", "transformers, bf16", "the same script with burnish's Trainer", {"bf16": True}),
    )
    for name, source in ((theirs, {}), (ours, {"made_by": "burnish"}))
)


def preference_settings(stage: str, method: str) -> tuple[Setting, ...]:
    """Return the preference training settings: TRL's script, LLaMA-Factory, and burnish used like both.

    Args:
        method: full or lora; with lora, TRL's best setting loads the model in bfloat16.
    """
    data = {"stage": stage, "finetuning_type": method, "num_train_epochs": 1.01}
    lean = {"dtype": "bfloat16"} if method == "lora" else {}
    script = training("TRL's script with burnish's import", "trl", made_by="burnish", **data)
    factory = {"bf16": True, "dataset": PREFERENCES[stage], **data}
    return (
        training(BASE, "trl", **data),
        training("TRL, bf16, no checkpointing", "trl", bf16=True, gradient_checkpointing=False, **data, **lean),
        training("LLaMA-Factory, bf16", "llamafactory", **factory),
        training("LLaMA-Factory, bf16, no checkpointing", "llamafactory", disable_gradient_checkpointing=True,
                 **factory),
        replace(script, library="burnish"),
        training(OURS, "burnish", **factory),
        training("burnish, at most 2,048 tokens per micro-batch", "burnish", max_tokens_per_batch=2048, **factory),
    )  # fmt: skip


COMPLETIONS, GROUP = 32, 8
"""Completions per step and per prompt in GRPO."""


def grpo_settings(longest: int, is_float32: bool = False) -> tuple[Setting, ...]:
    """Return the GRPO settings with completions of at most ``longest`` tokens: TRL with its defaults, and with other
    dtypes and micro-batch sizes.

    Args:
        is_float32: only settings in float32, limited to AVX2, as on a processor without bfloat16 products.
    """
    data = {"stage": "grpo", "max_steps": 3, "learning_rate": 1e-6, "max_completion_length": longest,
            "num_generations": GROUP, "gradient_accumulation_steps": COMPLETIONS // ROWS_PER_STEP}  # fmt: skip
    lean, single = {"gradient_checkpointing": False}, {"per_device_train_batch_size": COMPLETIONS}
    single["gradient_accumulation_steps"] = 1
    ours = {**data, "reward_funcs": "[grpo.even_share]", "log_completions": False}
    settings = (
        training(BASE, "trl", **data),
        training("TRL, bf16, no checkpointing", "trl", **data, **lean),
        training("TRL, bf16, no checkpointing, one micro-batch", "trl", **data | lean | single),
        training(OURS, "burnish", bf16=True, **ours),
    )
    if is_float32:
        return in_float32(settings)
    return (
        *settings[:-1],
        training("TRL, bf16 weights, no checkpointing", "trl", **data, **lean, dtype="bfloat16"),
        training("TRL, float32, no checkpointing", "trl", **data, **lean, bf16=False),
        settings[-1],
        training(OURS_FLOAT32, "burnish", **ours),
    )


LONG_GRPO_NAMES = (BASE, "TRL, bf16 weights, no checkpointing", OURS, OURS_FLOAT32)
"""GRPO settings that are measured with long completions, where a step of TRL takes a minute."""


# Enough steps between two checkpoints that the first one is on disk before the second one is due. The rows are short,
# because the cost of a checkpoint does not depend on them.
_SAVES = {"max_steps": 6, "save_strategy": "steps", "save_steps": 3}
CHECKPOINT = (
    training("transformers", "transformers", bf16=True, **_SAVES),
    training("burnish", "burnish", bf16=True, **_SAVES),
)


def process_settings() -> tuple[Setting, ...]:
    """Return settings with one process and with two, which share the eight rows of each step and save a checkpoint at
    the end.

    TRL uses its fastest setting with one process. FSDP2 in transformers and TRL needs the names of the layers to wrap.
    """
    layers = {"version": 2, "transformer_layer_cls_to_wrap": ["Qwen2DecoderLayer"]}
    sharded = {"fsdp": "full_shard", "fsdp_config": layers}
    trl = {"padding_free": True, "max_length": None, "gradient_checkpointing": False}
    same: dict[str, Any] = {"bf16": True, "max_steps": 7, "save_strategy": "steps", "save_steps": 7}
    variants: tuple[tuple[str, int, dict[str, Any], dict[str, Any]], ...] = (
        ("one process", 1, {}, {}),
        ("DDP", 2, {}, {}),
        ("FSDP2", 2, sharded, {"fsdp": "full_shard"}),
    )
    settings_list = []
    for way, count, theirs, ours in variants:
        share = same | {"per_device_train_batch_size": ROWS_PER_STEP // count}
        settings_list += [
            training(f"transformers, {way}", "transformers", **share, **theirs),
            training(f"TRL, {way}", "trl", **share, **trl, **theirs),
            training(f"burnish, {way}", "burnish", **share, **ours),
        ]
    return tuple(replace(one, command=("processes.py", str(1 + (not one.name.endswith("one process"))), *one.command))
                 for one in settings_list)  # fmt: skip


# The two import times are no trainings: they are the lower bound of every start.
START = tuple(
    replace(setting, in_new_process=True)
    for setting in (
        training(BASE, "trl", max_steps=2),
        training("transformers", "transformers", max_steps=2, bf16=True),
        training("LLaMA-Factory", "llamafactory", max_steps=2, bf16=True),
        training(OURS, "burnish", max_steps=2, bf16=True),
        Setting("torch alone, imported", "burnish", ("imports.py", "torch")),
        Setting("torch and transformers' model, imported", "burnish",
                ("imports.py", "torch", "transformers.models.qwen2.modeling_qwen2")),
    )
)  # fmt: skip
_EVALUATES: dict[str, Any] = {"max_steps": 2, "per_device_eval_batch_size": 8}
EVALUATION = (
    training(BASE, "trl", do_eval=True, **_EVALUATES),
    training("transformers, bf16", "transformers", bf16=True, do_eval=True, **_EVALUATES),
    training("LLaMA-Factory, bf16", "llamafactory", bf16=True, do_eval=True, eval_dataset="rows", **_EVALUATES),
    training(OURS, "burnish", bf16=True, eval_dataset="EVALUATION", **_EVALUATES),
    training("burnish, bf16, LoRA", "burnish", bf16=True, finetuning_type="lora", eval_dataset="EVALUATION",
             **_EVALUATES),
)  # fmt: skip
_GENERATES: dict[str, Any] = {"max_steps": 2, "bf16": True, "do_train": True, "do_predict": True}
GENERATION = (
    training("transformers", "transformers", **_GENERATES),
    *(
        training(f"burnish, {cache} cache", "burnish", cache_implementation=cache, predict_with_generate=True,
                 do_sample=False, predict_metrics="exact_match", eval_dataset="EVALUATION", **_GENERATES,
                 **GENERATION_OPTIONS)
        for cache in ("dynamic", "static")
    ),
)  # fmt: skip
ENCODING = tuple(
    Setting(name, library, ("encode.py", library, "MATERIAL"))
    for name, library in (("TRL", "trl"), ("LLaMA-Factory", "llamafactory"), ("burnish", "burnish"))
)
PACKING = tuple(
    Setting(name, library, ("pack.py", library))
    for name, library in (("TRL", "trl"), ("LLaMA-Factory", "llamafactory"), ("burnish", "burnish"))
)

IMAGES_OURS = "burnish"


def image_settings(is_start: bool) -> tuple[Setting, ...]:
    """Return the settings for training on images, in bfloat16 where that is faster than float32, otherwise in
    float32. Each is a new process, because other libraries need torchvision here.

    Args:
        is_start: whether to measure the time to the first step, with default options.
    """
    bf16, epochs = f"bf16={has_fast_bfloat16()}", "num_train_epochs=3"  # the default of all three
    variants: list[tuple[str, str, tuple[str, ...]]] = [
        ("TRL", "trl", ()),
        ("LLaMA-Factory", "llamafactory", ()),
        (IMAGES_OURS, "burnish", ()),
    ]
    if not is_start:
        variants[2:2] = [("LLaMA-Factory, no checkpointing", "llamafactory", ("disable_gradient_checkpointing=True",))]
        variants.insert(1, ("TRL, gradient checkpointing", "trl", ("gradient_checkpointing=True",)))
        variants.append(("burnish, images not kept", "burnish", ("image_cache='none'",)))
    return tuple(
        Setting(
            name, library, ("train_images.py", library, "MATERIAL", "OUTPUT", bf16, epochs, *options), True, is_start
        )
        for name, library, options in variants
    )


RESUME = tuple(
    Setting(name, library, ("resume.py", library))
    for name, library in (("transformers", "transformers"), ("burnish", "burnish"))
)


def restart_settings(many: Path, count: int) -> tuple[Setting, ...]:
    """Return settings for ``count`` rows of the file ``many``, tokenized before the first step or streamed."""
    return tuple(
        Setting(name, "burnish", ("restart.py", "MATERIAL", "OUTPUT", "bf16=true", *options), in_new_process=True)
        for name, options in (
            (f"{count:,} rows, tokenized before the first step", (f"dataset={many}",)),
            (f"{count:,} rows, streamed", (f"dataset={many}", "streaming=true", "max_steps=1000")),
        )
    )


# Name -> environment and command of each API server; ``measure_server.py`` replaces MODEL and PORT.
SERVERS: dict[str, tuple[str, Callable[[str], list[str]]]] = {
    "burnish api": ("burnish", lambda python: [python, "-m", "burnish", "api", "MODEL", "api_port=PORT"]),
    "LLaMA-Factory api": (
        "llamafactory",
        lambda python: [
            python,
            str(Path(__file__).parent / "serve_llamafactory.py"),
            "api",
            "--model_name_or_path",
            "MODEL",
            "--template",
            "empty",
            "--infer_dtype",
            "float32",
        ],
    ),
    "transformers serve": (
        "transformers serve",
        lambda python: [python, "-m", "transformers.cli.transformers", "serve", "MODEL", "--port", "PORT"],
    ),
    "transformers serve, continuous batching": (
        "transformers serve",
        lambda python: [
            python,
            "-m",
            "transformers.cli.transformers",
            "serve",
            "MODEL",
            "--port",
            "PORT",
            "--continuous-batching",
        ],
    ),
}
