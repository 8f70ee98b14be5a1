"""Tiny models that see, their processors, and the images of the golden records.

``build(family)`` gives a model of two layers, 32 wide, and its processor; ``save_processor`` and ``write_images`` write
files as a checkpoint and a data set have them. A weight follows from its name and an image from its own, so that any
machine makes the same. Processors are those of transformers' "pil" backend; llama4 and lfm2_vl have none and need
torchvision. Video processors need it too and are left out without it.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import transformers as T
from PIL import Image

TOKENIZER = Path(__file__).resolve().parent / "tokenizer"
LAYERS = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
PATCHES = {"image_size": 56, "patch_size": 14}
CLIP = LAYERS | PATCHES | {"model_type": "clip_vision_model", "image_size": 28, "projection_dim": 32}
SIGLIP = LAYERS | PATCHES | {"model_type": "siglip_vision_model", "vision_use_head": False}
PIXTRAL = LAYERS | PATCHES | {"model_type": "pixtral", "head_dim": 8, "image_size": 84}
OF_56, OF_28 = ({"height": side, "width": side} for side in (56, 28))

# --- images -----------------------------------------------------------------------------------------------------------


def image(name: str) -> Image.Image:
    """The image of a name such as ``p7_64x48.png`` or ``p3_40x30_L.png``: its number, size and mode."""
    number, size, *mode = Path(name).stem.split("_")
    seed, (width, height) = int(number[1:]), (int(side) for side in size.split("x"))
    y, x = np.mgrid[:height, :width]
    board = (x // 8 + y // 8 + seed) % 2 * 64
    colors = [x * (3 + seed % 5) + y * factor + seed * 37 + board for factor in (1, 2, 3)]
    drawn = Image.fromarray((np.stack(colors, -1) % 256).astype(np.uint8))
    return drawn.convert(mode[0]) if mode and mode[0] in ("L", "P", "RGBA", "CMYK", "LA", "1") else drawn


def write_images(folder: Path | str, names: Sequence[str]) -> None:
    """Write images. ``_clear`` in a name: its left half is transparent; ``_turned.jpg``: EXIF says to rotate it."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        drawn, options = image(name), {}
        if "_clear" in name:
            alpha = np.zeros((drawn.height, drawn.width), np.uint8)
            alpha[:, drawn.width // 2 :] = 255
            drawn.putalpha(Image.fromarray(alpha))
        if name.endswith("_turned.jpg"):
            exif = Image.Exif()
            exif[0x0112] = 6
            options = {"quality": 95, "exif": exif}
        drawn.save(folder / name, **options)


# --- parts of a model -------------------------------------------------------------------------------------------------


def _drawn(name: str, shape: torch.Size) -> torch.Tensor:
    if name.endswith("bias"):
        return torch.zeros(shape)
    normal = torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))
    if len(shape) == 1:
        return (1.0 if "norm" in name else 0.5) + 0.05 * normal
    scales = {"embed_tokens": 1.0, "lm_head": 0.25, "position": 0.1, "pos_emb": 0.1}
    return normal * next((scale for part, scale in scales.items() if part in name), 0.15)


def fill(model: Any) -> Any:
    """Give each weight the value that follows from its name."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(_drawn(name, weight.shape))
    return model.float().eval()


def tokenizer_of(*words: str, eos: str | None = None, **named: str) -> Any:
    """The golden tokenizer with more control tokens. Args: named: those that are attributes, such as image_token."""
    more = {"extra_special_tokens": named} if named else {}
    tokenizer = T.AutoTokenizer.from_pretrained(TOKENIZER, **more)
    tokenizer.add_tokens([word for word in words if word not in tokenizer.get_vocab()], special_tokens=True)
    if eos:
        tokenizer.eos_token = eos
    return tokenizer


def text_of(tokenizer: Any, **changes: Any) -> dict[str, Any]:
    """The configuration of a language model."""
    special = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    sizes = {"num_key_value_heads": 2, "max_position_embeddings": 4096, "tie_word_embeddings": False}
    return LAYERS | sizes | {"vocab_size": len(tokenizer)} | special | changes


def chat(user: str, answer: str, mark: str, system: str = "{}", begin: str = "", header: str = "") -> str:
    """A chat template whose answers are marked. Args: user, answer, system: around "{}"; header: before an answer."""
    content = (
        "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for c in m['content'] %}"
        "{% if c['type'] == 'image' %}" + mark + "{% elif c['type'] == 'text' %}{{ c['text'] }}{% endif %}"
        "{% endfor %}{% endif %}"
    )
    asked, said, told = (form.replace("{}", content) for form in (user, answer, system))
    return (
        begin + "{% for m in messages %}{% if m['role'] == 'system' %}" + told + "{% elif m['role'] == 'assistant' %}"
        f"{header}{{% generation %}}{said}{{% endgeneration %}}{{% else %}}{asked}{{% endif %}}{{% endfor %}}"
        f"{{% if add_generation_prompt %}}{header}{answer.split('{}')[0]}{{% endif %}}"
    )


def chatml(mark: str) -> str:
    turn = "<|im_start|>{}\n{{}}<|im_end|>\n"
    user, system = turn.format("user"), turn.format("system")
    return chat(user, "{}<|im_end|>\n", mark, system, header="<|im_start|>assistant\n")


CHATML = chatml("{I}")


def pil(name: str, **options: Any) -> Any:
    """An image processor of the backend that needs no torchvision."""
    return getattr(T, f"{name}Pil")(**options)


def composed(name: str, **parts: Any) -> Any:
    """transformers' processor of these parts, or the parts alone where it cannot be made without torchvision."""
    made = SimpleNamespace(**{"chat_template": None, **parts})
    if parts.get("video_processor", "") is not None:
        with suppress(ImportError):
            made = getattr(T, name)(**parts)
    told = {key: value for key, value in parts.items() if isinstance(value, int | str) and key != "chat_template"}
    made.golden_config = {"processor_class": name, **told}
    return made


def save_processor(processor: Any, folder: Path | str) -> None:
    """Write the tokenizer, ``preprocessor_config.json``, ``processor_config.json`` and ``chat_template.jinja``."""
    folder, images = Path(folder), processor.image_processor
    processor.tokenizer.save_pretrained(folder)
    settings = images.to_dict() | {"image_processor_type": type(images).__name__.removesuffix("Pil")}
    settings.pop("processor_class", None)
    for name, found in (("preprocessor_config", settings), ("processor_config", processor.golden_config)):
        (folder / f"{name}.json").write_text(json.dumps(found, indent=2, sort_keys=True))
    if processor.chat_template:
        (folder / "chat_template.jinja").write_text(processor.chat_template)


# --- families ---------------------------------------------------------------------------------------------------------


@dataclass
class Tiny:
    """A family: a call gives its model, not filled yet, and its processor.

    Args:
        kind: the names of its classes begin so; ``classes`` has those that do not ("config", "model", "processor").
        words: control tokens of the tokenizer; ``named``: those that are its attributes.
        ids: key of the configuration -> the token whose id it holds.
        text, vision, config: changes of the configurations; ``text`` may depend on the tokenizer.
        images, videos: class (without the backend) and settings of the image and the video processor.
        processor: further settings of the composed processor.
        template: the chat template.
        set_on_images: attributes of the image processor that its settings do not have.
        ties: whether the head is the embedding; None: as the class has it.
    """

    kind: str
    vision: Mapping[str, Any]
    images: tuple[str, Mapping[str, Any]]
    template: str | None
    ids: Mapping[str, str]
    words: Sequence[str] = ()
    named: Mapping[str, str] = field(default_factory=dict)
    eos: str | None = None
    text: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    videos: tuple[str, Mapping[str, Any]] | None = None
    processor: Mapping[str, Any] = field(default_factory=dict)
    classes: Mapping[str, str] = field(default_factory=dict)
    set_on_images: Mapping[str, Any] = field(default_factory=dict)
    ties: bool | None = False

    def __call__(self) -> tuple[Any, Any]:
        tokenizer = tokenizer_of(*self.words, *self.named.values(), eos=self.eos, **self.named)
        name, settings = self.images
        images = pil(name, **settings) if hasattr(T, f"{name}Pil") else getattr(T, name)(**settings)
        parts = {"image_processor": images, "tokenizer": tokenizer, **self.processor}
        if self.template is not None:
            parts["chat_template"] = self.template
        if self.videos is not None:
            parts["video_processor"] = _videos(*self.videos)
        vars(images).update(self.set_on_images)
        processor = composed(self.classes.get("processor", f"{self.kind}Processor"), **parts)
        tokenizer = processor.tokenizer
        ids = {key: tokenizer.convert_tokens_to_ids(word) for key, word in self.ids.items()}
        text = {key: value(tokenizer) if callable(value) else value for key, value in self.text.items()}
        config = getattr(T, self.classes.get("config", f"{self.kind}Config"))(
            text_config=text_of(tokenizer, **text), vision_config=dict(self.vision),
            **({} if self.ties is None else {"tie_word_embeddings": self.ties}), **ids, **self.config,
        )  # fmt: skip
        return getattr(T, f"{self.classes.get('model', self.kind)}ForConditionalGeneration")(config), processor


def _videos(name: str, settings: Mapping[str, Any]) -> Any:
    try:
        return getattr(T, name)(**settings)
    except ImportError:
        return None


def _qwen(kind: str, vision: Mapping[str, Any], processor: str, videos: str, **text: Any) -> Tiny:
    """Qwen2-VL and its successors, of which the third has larger patches."""
    patch = int(vision.get("patch_size", 14))
    limits = {"shortest_edge": (patch * 2) ** 2, "longest_edge": 16 * (patch * 2) ** 2}
    settings = {"patch_size": patch, "merge_size": 2, "temporal_patch_size": 2, "size": limits}
    words = {name: f"<|{name}|>" for name in ("vision_start", "vision_end", "image_pad", "video_pad")}
    return Tiny(
        kind, vision, ("Qwen2VLImageProcessor", settings), chatml("<|vision_start|><|image_pad|><|vision_end|>"),
        {f"{name.removesuffix('_pad')}_token_id": word for name, word in words.items()}, list(words.values()),
        eos="<|im_end|>", text={"rope_parameters": MROPE, **text}, videos=(videos, settings),
        classes={"processor": processor},
    )  # fmt: skip


def _glm(kind: str, processors: str | None = None, **text: Any) -> Tiny:
    """A GLM. Args: processors: prefix of its processors' classes, if not ``kind``; text: of its language model."""
    processors = processors or kind
    words = {f"{name}_token_id": f"<|{name}|>" for name in ("image", "video")}
    for name in ("image", "video"):
        words |= {
            f"{name}_{side}_token_id": f"<|{word}_of_{name}|>" for side, word in (("start", "begin"), ("end",) * 2)
        }
    settings = {"size": {"shortest_edge": 28 * 28 * 2, "longest_edge": 28 * 28 * 2 * 16}}
    mark = "<|begin_of_image|><|image|><|end_of_image|>"
    order = ("<|image|>", "<|video|>", "<|begin_of_image|>", "<|end_of_image|>", "<|begin_of_video|>",
             "<|end_of_video|>")  # fmt: skip
    return Tiny(
        kind, TOWER | {"out_hidden_size": 32, "intermediate_size": 64, "image_size": 56},
        (f"{processors}ImageProcessor", settings),
        chat("<|user|>\n{}", "\n{}", mark, "<|system|>\n{}", "[gMASK]<sop>", "<|assistant|>"), words, order,
        eos="<|user|>", text={"rope_parameters": MROPE, "partial_rotary_factor": 1.0, **text},
        videos=(f"{processors}VideoProcessor", settings), classes={"processor": f"{processors}Processor"},
    )  # fmt: skip


def _idefics(kind: str, **more: Any) -> Tiny:
    cells = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
    end = "<end_of_utterance>"
    template = chat(
        f"User:{{}}{end}\n", f" {{}}{end}\n", "<image>", f"System: {{}}{end}\n", "<|im_start|>", "Assistant:"
    )
    return Tiny(
        kind, LAYERS | PATCHES | {"model_type": f"{kind.lower()}_vision"}, (f"{kind}ImageProcessor", TILES), template,
        {"image_token_id": "<image>"}, ["<fake_token_around_image>", "<image>", end, "<global-img>", *cells], eos=end,
        text={"model_type": "llama"},
        config={"scale_factor": 2, "pad_token_id": tokenizer_of().pad_token_id}, processor={"image_seq_len": 4}, **more,
    )  # fmt: skip


def _pixtral(kind: str, vision_of: Mapping[str, Any], merge: int, *keys: str) -> Tiny:
    settings = {"patch_size": {"height": 14, "width": 14}, "size": {"longest_edge": 84}}
    return Tiny(
        kind, PIXTRAL, ("PixtralImageProcessor", settings),
        chat("[INST]{}[/INST]", "{}</s>", "[IMG]", "[INST]{}[/INST]", "<s>"), dict.fromkeys(keys, "[IMG]"),
        ["[IMG]", "[IMG_BREAK]", "[IMG_END]"], text=MISTRAL, config=vision_of,
        processor={"patch_size": 14, "spatial_merge_size": merge}, classes={"processor": "PixtralProcessor"},
    )  # fmt: skip


def _headers(begin: str, end: str, image: str) -> str:
    turn = f"<|{begin}|>{{}}<|{end}|>\n\n"
    user, system = (turn.format(role) + "{}<|eot_id|>" for role in ("user", "system"))
    return chat(user, "{}<|eot_id|>", image, system, "<s>", turn.format("assistant"))


def _gemma(kind: str, mark: str, end: str, system: str, header: str, named: Mapping[str, str], **more: Any) -> Tiny:
    layers = {"head_dim": 8, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 24}
    template = chat(f"{header}user\n{{}}{end}\n", f"{{}}{end}\n", mark, system, "<s>", f"{header}model\n")
    return Tiny(kind, template=template, named=named, eos=end, text=layers | more.pop("text"), **more)


TOWER = {"hidden_size": 32, "num_heads": 4, "depth": 2}
QWEN_3 = TOWER | {"out_hidden_size": 32, "intermediate_size": 64, "patch_size": 16, "num_position_embeddings": 64}
DEEP = QWEN_3 | {"deepstack_visual_indexes": [0]}
MROPE = {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 10000.0}
MISTRAL = {"model_type": "mistral", "sliding_window": None}
TILES = {"size": {"longest_edge": 112}, "max_image_size": {"longest_edge": 56}}
CROPS = {"size": OF_56, "crop_to_patches": True, "min_patches": 1, "max_patches": 4}
OF_CLIP = {"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
PINPOINTS = {
    "llava_next": [[28, 56], [56, 28], [56, 56], [84, 28], [28, 84]],
    "onevision": [[56, 56], [56, 112], [112, 56], [112, 112]],
}  # fmt: skip
OF_LLAVA = {"size": {"shortest_edge": 28}, "crop_size": OF_28}
GEMMA_3 = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
GEMMA_4 = {
    "boi_token": "<|image>", "eoi_token": "<image|>", "image_token": "<|image|>", "video_token": "<|video|>",
    "boa_token": "<|audio>", "eoa_token": "<audio|>", "audio_token": "<|audio|>",
}  # fmt: skip
POOLED = {"patch_size": 8, "pooling_kernel_size": 2}
SOFT = {"max_soft_tokens": 70}
INTERN = {
    "start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>",
    "video_token": "<video>",
}  # fmt: skip
LLAMA_4 = {
    "fake_image_token": "<|image|>", "image_token": "<|image|>", "start_of_image_token": "<|image_start|>",
    "end_of_image_token": "<|image_end|>", "patch_token": "<|patch|>", "tile_x_separator_token": "<|tile_x_separator|>",
    "tile_y_separator_token": "<|tile_y_separator|>",
}  # fmt: skip
AYA = {
    "start_of_img_token": "<|START_OF_IMG|>", "end_of_img_token": "<|END_OF_IMG|>", "img_patch_token": "<|IMG_PATCH|>",
    "img_line_break_token": "<|IMG_LINE_BREAK|>",
}  # fmt: skip
LFM_2 = {
    "image_token": "<image>", "image_start_token": "<|image_start|>", "image_end_token": "<|image_end|>",
    "image_thumbnail_token": "<|img_thumbnail|>",
}  # fmt: skip

FAMILIES: dict[str, Tiny] = {
    "qwen2_vl": _qwen(
        "Qwen2VL", TOWER | {"embed_dim": 32, "mlp_ratio": 2}, "Qwen2VLProcessor", "Qwen2VLVideoProcessor"
    ),
    "qwen2_5_vl": _qwen(
        "Qwen2_5_VL",
        TOWER | {"fullatt_block_indexes": [1], "out_hidden_size": 32, "intermediate_size": 64, "window_size": 56},
        "Qwen2_5_VLProcessor", "Qwen2VLVideoProcessor",
    ),
    "qwen3_vl": _qwen("Qwen3VL", DEEP, "Qwen3VLProcessor", "Qwen3VLVideoProcessor", head_dim=8),
    "qwen3_vl_moe": _qwen(
        "Qwen3VLMoe", DEEP, "Qwen3VLProcessor", "Qwen3VLVideoProcessor", head_dim=8, num_experts=4,
        num_experts_per_tok=2, moe_intermediate_size=32,
    ),
    "qwen3_5": _qwen(  # three quarters of its layers are recurrent; here one of two
        "Qwen3_5", QWEN_3, "Qwen3VLProcessor", "Qwen3VLVideoProcessor", head_dim=8,
        layer_types=["linear_attention", "full_attention"], linear_key_head_dim=8, linear_value_head_dim=8,
        linear_num_key_heads=2, linear_num_value_heads=4, partial_rotary_factor=1.0,
    ),
    "qwen3_5_moe": _qwen(
        "Qwen3_5Moe", QWEN_3, "Qwen3VLProcessor", "Qwen3VLVideoProcessor", head_dim=8,
        layer_types=["linear_attention", "full_attention"], linear_key_head_dim=8, linear_value_head_dim=8,
        linear_num_key_heads=2, linear_num_value_heads=4, partial_rotary_factor=1.0, num_experts=4,
        num_experts_per_tok=2, moe_intermediate_size=32, shared_expert_intermediate_size=32,
    ),
    "qwen4_exp": _qwen(
        "Qwen4Exp", QWEN_3, "Qwen3VLProcessor", "Qwen3VLVideoProcessor", head_dim=8,
        layer_types=["linear_attention", "full_attention"], linear_key_head_dim=8, linear_value_head_dim=8,
        linear_num_key_heads=2, linear_num_value_heads=4, num_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=32, shared_expert_intermediate_size=32, hc_count=2, hc_lowrank=8, ple_layer_ids=[],
        ngram_vocab_size_base=100, split_ngram_parts=1, indexer_n_heads=2, indexer_kv_heads=1, indexer_head_dim=8,
        indexer_budget=16, indexer_compress_ratio=1,
    ),
    "vipllava": Tiny(
        "VipLlava", CLIP, ("CLIPImageProcessor", OF_LLAVA),
        chat("USER: {} ", "{}</s>", "<image>", "{} ", header="ASSISTANT:"), {"image_token_index": "<image>"},
        ["<image>"], text={"model_type": "llama"}, config={"image_seq_length": 4, "vision_feature_layers": [-1, -2]},
        processor=OF_CLIP, classes={"processor": "LlavaProcessor"},
    ),
    "llava": Tiny(
        "Llava", CLIP, ("CLIPImageProcessor", OF_LLAVA),
        chat("USER: {} ", "{}</s>", "<image>", "{} ", header="ASSISTANT:"), {"image_token_id": "<image>"}, ["<image>"],
        text={"model_type": "llama"}, config={"image_seq_length": 4}, processor=OF_CLIP,
    ),
    "llava_next": Tiny(
        "LlavaNext", CLIP, ("LlavaNextImageProcessor", OF_LLAVA | {"image_grid_pinpoints": PINPOINTS["llava_next"]}),
        chat("[INST] {} [/INST]", " {}</s>", "<image>", "{} ", "<s>"), {"image_token_id": "<image>"}, ["<image>"],
        text=MISTRAL, config={"image_seq_length": 4, "image_grid_pinpoints": PINPOINTS["llava_next"]},
        processor=OF_CLIP,
    ),
    "llava_next_video": Tiny(
        "LlavaNextVideo", CLIP,
        ("LlavaNextImageProcessor", OF_LLAVA | {"image_grid_pinpoints": PINPOINTS["llava_next"]}),
        chat("[INST] {} [/INST]", " {}</s>", "<image>", "{} ", "<s>"),
        {"image_token_index": "<image>", "video_token_index": "<video>"}, ["<image>", "<video>"],
        text=MISTRAL, config={"image_seq_length": 4, "image_grid_pinpoints": PINPOINTS["llava_next"]},
        processor=OF_CLIP, videos=("LlavaNextVideoVideoProcessor", {}),
    ),
    "llava_onevision": Tiny(
        "LlavaOnevision", SIGLIP,
        ("LlavaOnevisionImageProcessor", {"size": OF_56, "image_grid_pinpoints": PINPOINTS["onevision"]}),
        chatml("<image>"), {"image_token_id": "<image>", "video_token_id": "<video>"}, ["<image>", "<video>"],
        eos="<|im_end|>", text={"model_type": "qwen2"}, videos=("LlavaOnevisionVideoProcessor", {}),
        config={"image_grid_pinpoints": PINPOINTS["onevision"], "vision_aspect_ratio": "anyres_max_9"},
        processor={"num_image_tokens": 16, "vision_feature_select_strategy": "full"},
    ),
    "gemma3": _gemma(
        "Gemma3", "<start_of_image>", "<end_of_turn>", "<start_of_turn>user\n{}\n\n<end_of_turn>\n", "<start_of_turn>",
        GEMMA_3, vision=SIGLIP, images=("Gemma3ImageProcessor", {"size": OF_56}),
        ids={
            "boi_token_index": "<start_of_image>", "eoi_token_index": "<end_of_image>",
            "image_token_id": "<image_soft_token>",
        },
        text={"query_pre_attn_scalar": 8}, config={"mm_tokens_per_image": 4}, processor={"image_seq_length": 4},
    ),
    "gemma4": _gemma(
        "Gemma4", "<|image|>", "<turn|>", "<|turn>system\n{}<turn|>\n", "<|turn>", GEMMA_4,
        vision=LAYERS | POOLED | {"num_key_value_heads": 4, "head_dim": 8, "position_embedding_size": 64},
        images=("Gemma4ImageProcessor", POOLED | SOFT), videos=("Gemma4VideoProcessor", POOLED | SOFT),
        ids={
            f"{name}_{'index' if name == 'eoa_token' else 'id'}": word for name, word in GEMMA_4.items()
        },
        text={
            "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": len, "global_head_dim": 8,
            "use_bidirectional_attention": "vision",
        },
        config={"audio_config": None},
        processor={"image_seq_length": 70, "feature_extractor": T.Gemma4AudioFeatureExtractor()},
    ),
    "paligemma": Tiny(
        "PaliGemma", SIGLIP | {"projection_dim": 32}, ("SiglipImageProcessor", {"size": OF_56}), None,
        {"image_token_index": "<image>"}, named={"image_token": "<image>"}, text={"model_type": "gemma", "head_dim": 8},
        config={"projection_dim": 32}, set_on_images={"image_seq_length": 16},
    ),
    "internvl": Tiny(
        "InternVL", LAYERS | {"image_size": [56, 56], "patch_size": [14, 14]}, ("GotOcr2ImageProcessor", CROPS),
        chatml("<IMG_CONTEXT>\n"), {"image_token_id": "<IMG_CONTEXT>"}, named=INTERN, eos="<|im_end|>",
        text={"model_type": "qwen2"}, config={"image_seq_length": 4},
        videos=("InternVLVideoProcessor", {"size": OF_56}), processor={"image_seq_length": 4},
    ),
    "smolvlm": _idefics("SmolVLM", videos=("SmolVLMVideoProcessor", TILES)),
    "idefics3": _idefics("Idefics3"),
    "pixtral": _pixtral(
        "Llava", {"vision_feature_layer": -1, "vision_feature_select_strategy": "full"}, 1, "image_token_id"
    ),
    "mistral3": _pixtral("Mistral3", {"spatial_merge_size": 2}, 2, "image_token_id", "image_token_index"),
    "glm4v": _glm("Glm4v"),
    "glm46v": _glm("Glm46V"),
    "glm4v_moe": _glm(
        "Glm4vMoe", "Glm4v", num_hidden_layers=2, first_k_dense_replace=1, n_routed_experts=4, num_experts_per_tok=2,
        n_shared_experts=1, moe_intermediate_size=32, n_group=1, topk_group=1,
    ),
    "glm_ocr": _glm("GlmOcr", "Glm46V"),
    "mllama": Tiny(
        "Mllama",
        {
            "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_global_layers": 1,
            "attention_heads": 4, "vision_output_dim": 64, "image_size": 28, "patch_size": 14, "max_num_tiles": 4,
            "intermediate_layers_indices": [0],
            "supported_aspect_ratios": [[1, 1], [1, 2], [1, 3], [1, 4], [2, 1], [2, 2], [3, 1], [4, 1]],
        },
        ("MllamaImageProcessor", {"size": OF_28, "max_image_tiles": 4}),
        _headers("start_header_id", "end_header_id", "<|image|>"), {"image_token_index": "<|image|>"},
        ["<|image|>", "<|python_tag|>", "<|begin_of_text|>"], eos="<|eot_id|>",
        text={
            "num_hidden_layers": 3, "cross_attention_layers": [1],
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
        ties=None,
    ),
    "llama4": Tiny(
        "Llama4",
        LAYERS | PATCHES | {
            "intermediate_size": 128, "vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32,
        },
        ("Llama4ImageProcessor", {"size": OF_56, "max_patches": 4}),
        _headers("header_start", "header_end", "<|image|>"),
        {"boi_token_index": "<|image_start|>", "eoi_token_index": "<|image_end|>", "image_token_index": "<|patch|>"},
        list(LLAMA_4.values()), eos="<|eot_id|>", processor={"patch_size": 14, **LLAMA_4},
        text={
            "head_dim": 8, "intermediate_size_mlp": 64, "num_local_experts": 4, "attention_chunk_size": 32,
            "attn_temperature_tuning": False, "moe_layers": [1], "no_rope_layers": [1, 0],
            "layer_types": ["chunked_attention", "full_attention"],
        },
    ),
    "aya_vision": Tiny(
        "AyaVision", SIGLIP, ("GotOcr2ImageProcessor", CROPS), chatml("<image>"),
        {"image_token_index": "<|IMG_PATCH|>"}, ["<image>", *AYA.values()], eos="<|im_end|>",
        text={"model_type": "cohere2", "sliding_window": 24},
        config={"downsample_factor": 2, "adapter_layer_norm_eps": 1e-6, "alignment_intermediate_size": 64},
        processor={"patch_size": 14, "img_size": 56, "downsample_factor": 2, **AYA},
    ),
    "lfm2_vl": Tiny(
        "Lfm2Vl", LAYERS | {"model_type": "siglip2_vision_model", "num_patches": 16, "patch_size": 14},
        ("Lfm2VlImageProcessor", {
            "encoder_patch_size": 14, "downsample_factor": 2, "tile_size": 56, "max_image_tokens": 16,
            "min_image_tokens": 4, "max_num_patches": 64, "do_image_splitting": True,
        }),
        chatml("<image>"), {"image_token_id": "<image>"},
        [*LFM_2.values(), *(f"<|img_row_{row}_col_{col}|>" for row in range(1, 11) for col in range(1, 11))],
        named=LFM_2, eos="<|im_end|>", config={"projector_hidden_size": 64, "downsample_factor": 2},
        text={
            "model_type": "lfm2", "layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False,
            "conv_L_cache": 3,
        },
    ),
}  # fmt: skip


def build(name: str) -> tuple[Any, Any]:
    """The model of a family with its weights, and its processor."""
    model, processor = FAMILIES[name]()
    return fill(model), processor
