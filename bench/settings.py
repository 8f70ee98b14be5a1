"""The comparisons: each way to run each library, by part.

A peer runs as it comes and at the best that its options offer on a processor: bf16, rows laid beside each other or
grouped by length, nothing computed twice for the sake of memory. All of them take the same rows in steps of eight; a
pack is as long as eight rows on average, or as the longest. Each goes over the rows once and takes one step more: the
first step is not counted, and where rows are sorted by length it has the longest of them, which come again. burnish
goes over the rows twice, so that there is enough to measure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

from gauge import ANSWERS, PREFERENCES
from material import SEED, words

BASE = "TRL, default"
OURS = "burnish, bf16"
OURS_FLOAT32 = "burnish, float32"
PLAIN = "plain: padded, all logits, AdamW tensor by tensor"
ROWS_PER_STEP = 8


@dataclass(frozen=True)
class Setting:
    """One way to run one library.

    Args:
        library: whose environment it runs in.
        words: the script under bench/ and its arguments; MATERIAL and OUTPUT stand for folders, EVALUATION for the
            conversations of the material.
        is_alone: whether it is a process from its start, instead of a child of one that has imported its library.
        ends_early: whether a process of its own ends at its first step.
        processor: a name of ``measuring.LIMITS``, whose instructions it is limited to.
    """

    name: str
    library: str
    words: tuple[str, ...]
    is_alone: bool = False
    ends_early: bool = True
    processor: str = ""


def training(name: str, library: str, **options: Any) -> Setting:
    """A training with these options, said as each script reads them."""
    script = {"burnish": ("train_burnish.py",), "llamafactory": ("train_llamafactory.py",)}.get(
        library, ("train_peer.py", library)
    )
    say = spoken if library == "burnish" else repr
    words = (f"{option}={say(value)}" for option, value in options.items())
    return Setting(name, library, (*script, "MATERIAL", "OUTPUT", *words))


def spoken(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def trainings(method: str, facts: dict[str, Any]) -> tuple[Setting, ...]:
    """Every training with ``method``, full or lora.

    A frozen model is loaded in bfloat16 at each peer's best: else its weights are cast in every forward pass.
    """
    is_long = facts["longest"] > LONG
    pack = max(facts["longest_row"], 0 if is_long else ROWS_PER_STEP * facts["tokens"] // facts["rows"])
    pack += -pack % 8  # LLaMA-Factory 0.9.5 pads packs to a multiple of eight, and their positions not
    same: dict[str, Any] = {"finetuning_type": method, "num_train_epochs": 1.01}
    lean = same | ({"dtype": "bfloat16"} if method == "lora" else {})
    # Long rows go two to a step, and one at a time where they would be padded: more are more logits than memory.
    fitting = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 2} if is_long else {}
    trl = lean | {"gradient_checkpointing": False}
    factory = same | {"bf16": True}
    grouped = fitting | {"train_sampling_strategy": "group_by_length"}  # never the best of TRL or LLaMA-Factory
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
    """The settings in bfloat16, in float32 instead, as on a processor without AVX512. TRL's configs choose bfloat16
    unless they are told otherwise."""
    found = []
    for setting in settings:
        words = tuple(word for word in setting.words if word.lower() not in ("bf16=true", "dtype='bfloat16'"))
        is_script_of_trl = words[:2] == ("train_peer.py", "trl")
        words += ("bf16=False",) * is_script_of_trl
        if setting.name != OURS_FLOAT32:
            name = setting.name.replace("bf16", "float32")
            found.append(replace(setting, name=name, words=words, processor="avx2"))
    return tuple(found)


LONG = 1024
# What ratios are made of on the 30M shape; the rest comes with --all-settings.
USUAL = (
    BASE, "TRL, packing, no checkpointing", "TRL, padding-free, no checkpointing",
    "transformers, bf16, grouped by length", "LLaMA-Factory, bf16, neat packing",
    "LLaMA-Factory, bf16, neat packing, no checkpointing", OURS,
)  # fmt: skip
# Of the wide model: what was both fastest and leanest of each peer, or as good as that.
WIDE = (BASE, "TRL, padding-free, no checkpointing", "transformers, bf16, grouped by length",
        "LLaMA-Factory, bf16, neat packing", OURS)  # fmt: skip
BEST = ("TRL, packing, no checkpointing", "transformers, bf16, grouped by length",
        "LLaMA-Factory, bf16, neat packing, no checkpointing", OURS)  # fmt: skip


def ways() -> tuple[Setting, ...]:
    """burnish without its own ways, and then with one after the other: options, patches that are left out, and
    what ``ways.py`` takes out."""
    options: dict[str, Any] = {"padding_free": False, "attn_implementation": "sdpa", "fused_loss": False}
    options |= {"optim": "adamw_torch", "needed_tokens_only": False}
    without = ["attention", "memory"]
    left_out = ["norm", "gated layer", "activation", "linear layer", "tied embedding"]
    found = []
    for name, *there in WAYS:
        options = {option: value for option, value in options.items() if option not in there}
        without = [way for way in without if way not in there]
        left_out = [kind for kind in left_out if kind not in there]
        more = options | ({"leave_out": ",".join(left_out)} if left_out else {})
        found.append(training(name, "burnish", bf16=True, num_train_epochs=1.01, without=",".join(without), **more))
    return tuple(found)


# The line of the table, and what is no longer taken out in it and in those below.
WAYS = (
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


SYSTEM = " ".join(words(Random(SEED))[:150])
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
# A script of a peer, and the same script with burnish's classes.
SCRIPTS = tuple(
    replace(training(name, peer, num_train_epochs=1.01, **options, **who), library="burnish" if who else peer)
    for peer, of_peer, ours, options in (
        ("trl", BASE, "the same script with burnish's SFTTrainer", {}),
        ("transformers", "transformers, bf16", "the same script with burnish's Trainer", {"bf16": True}),
    )
    for name, who in ((of_peer, {}), (ours, {"made_by": "burnish"}))
)


def preferences(stage: str, method: str) -> tuple[Setting, ...]:
    """Learning from preferences: TRL's script and LLaMA-Factory, and burnish through the same doors.

    Args:
        method: full or lora; a frozen model is loaded in bfloat16 at TRL's best.
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
        training("burnish, at most 2,048 tokens to a micro-batch", "burnish", max_tokens_per_batch=2048, **factory),
    )  # fmt: skip


COMPLETIONS, GROUP = 32, 8
"""Of a step from rewards, and of a prompt."""


def rewarded(longest: int) -> tuple[Setting, ...]:
    """GRPO on completions of at most ``longest`` tokens: TRL as it comes, and in other formats and micro-batches."""
    data = {"stage": "grpo", "max_steps": 3, "learning_rate": 1e-6, "max_completion_length": longest,
            "num_generations": GROUP, "gradient_accumulation_steps": COMPLETIONS // ROWS_PER_STEP}  # fmt: skip
    lean, whole = {"gradient_checkpointing": False}, {"per_device_train_batch_size": COMPLETIONS}
    whole["gradient_accumulation_steps"] = 1
    ours = {**data, "reward_funcs": "[rewarded.even_share]", "log_completions": False}
    return (
        training(BASE, "trl", **data),
        training("TRL, bf16, no checkpointing", "trl", **data, **lean),
        training("TRL, bf16, no checkpointing, one micro-batch", "trl", **data | lean | whole),
        training("TRL, bf16 weights, no checkpointing", "trl", **data, **lean, dtype="bfloat16"),
        training("TRL, float32, no checkpointing", "trl", **data, **lean, bf16=False),
        training(OURS, "burnish", bf16=True, **ours),
        training("burnish, float32", "burnish", **ours),
    )


# Steps enough between two checkpoints that the first is on the disk when the second is due; their rows are short,
# since a checkpoint does not depend on them.
_SAVES = {"max_steps": 6, "save_strategy": "steps", "save_steps": 3}
CHECKPOINT = (
    training("transformers", "transformers", bf16=True, **_SAVES),
    training("burnish", "burnish", bf16=True, **_SAVES),
)


def by_processes() -> tuple[Setting, ...]:
    """One process, and two that share each step's eight rows: the same rows for everyone, and a checkpoint at the end.

    TRL as it is fastest in one process; a peer's layers are named for FSDP2, which it does not find by itself.
    """
    layers = {"version": 2, "transformer_layer_cls_to_wrap": ["Qwen2DecoderLayer"]}
    sharded = {"fsdp": "full_shard", "fsdp_config": layers}
    trl = {"padding_free": True, "max_length": None, "gradient_checkpointing": False}
    same: dict[str, Any] = {"bf16": True, "max_steps": 7, "save_strategy": "steps", "save_steps": 7}
    ways = (("one process", 1, {}, {}), ("DDP", 2, {}, {}), ("FSDP2", 2, sharded, {"fsdp": "full_shard"}))
    found = []
    for way, count, of_peer, ours in ways:
        share = same | {"per_device_train_batch_size": ROWS_PER_STEP // count}
        found += [
            training(f"transformers, {way}", "transformers", **share, **of_peer),
            training(f"TRL, {way}", "trl", **share, **trl, **of_peer),
            training(f"burnish, {way}", "burnish", **share, **ours),
        ]
    return tuple(replace(one, words=("processes.py", str(1 + (not one.name.endswith("one process"))), *one.words))
                 for one in found)  # fmt: skip


# What is imported is no way to train: it is what every start stands on.
START = tuple(
    replace(setting, is_alone=True)
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
_ANSWERS: dict[str, Any] = {"max_steps": 2, "bf16": True, "do_train": True, "do_predict": True}
GENERATION = (
    training("transformers", "transformers", **_ANSWERS),
    *(
        training(f"burnish, {cache} cache", "burnish", cache_implementation=cache, predict_with_generate=True,
                 do_sample=False, predict_metrics="exact_match", eval_dataset="EVALUATION", **_ANSWERS, **ANSWERS)
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


def of_images(is_start: bool) -> tuple[Setting, ...]:
    """Trainings on images; a process each, because the peers need another torchvision than for text.

    Args:
        is_start: only until the first step, with everything at its default.
    """
    ways: list[tuple[str, str, tuple[str, ...]]] = [
        ("TRL", "trl", ()),
        ("LLaMA-Factory", "llamafactory", ()),
        (IMAGES_OURS, "burnish", ()),
    ]
    if not is_start:
        ways[2:2] = [("LLaMA-Factory, no checkpointing", "llamafactory", ("disable_gradient_checkpointing=True",))]
        ways.insert(1, ("TRL, gradient checkpointing", "trl", ("gradient_checkpointing=True",)))
        ways.append(("burnish, images not kept", "burnish", ("image_cache='none'",)))
    return tuple(
        Setting(name, library, ("train_images.py", library, "MATERIAL", "OUTPUT", *words), True, is_start)
        for name, library, words in ways
    )


RESUME = tuple(
    Setting(name, library, ("resume.py", library))
    for name, library in (("transformers", "transformers"), ("burnish", "burnish"))
)


def starts_again(many: Path, count: int) -> tuple[Setting, ...]:
    """``count`` rows in the file ``many``, tokenized before the first step or streamed."""
    return tuple(
        Setting(name, "burnish", ("start_again.py", "MATERIAL", "OUTPUT", "bf16=true", *words), is_alone=True)
        for name, words in (
            (f"{count:,} rows, tokenized before the first step", (f"dataset={many}",)),
            (f"{count:,} rows, streamed", (f"dataset={many}", "streaming=true", "max_steps=1000")),
        )
    )


# How each server of answers is started, in the environment of its library; ``ask_server.py`` says folder and port.
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
