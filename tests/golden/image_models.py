# ruff: noqa: C408, E501
"""Writes tiny models for images and text, their processors, and the images of the golden records.

    image_models.py FOLDER [FAMILY ...]      FOLDER/<family>/ (model, tokenizer, processor) and FOLDER/images/

A weight follows from its name, an image from its own: any machine makes the same files. Tokens are those of tokenizer/
and behind them the control tokens of the family. The layers are two, the widths 32; images are processed by the
"pil" backend of transformers, which needs no torchvision, but for families that have no such backend (NEEDS_TORCHVISION).
Where transformers cannot make a composed processor (no torchvision), ``Parts`` stands in: the files written are the same.
"""

import json
import sys
import zlib
from pathlib import Path

import numpy as np
import torch
import transformers as T
from PIL import Image

TOKENIZER = Path(__file__).resolve().parent / "tokenizer"
MROPE = {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 10000.0}
TEXT = dict(
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=4096,
    tie_word_embeddings=False,
)
CLIP = dict(
    model_type="clip_vision_model",
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    image_size=28,
    patch_size=14,
    projection_dim=32,
)
SIGLIP = dict(
    model_type="siglip_vision_model",
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    image_size=56,
    patch_size=14,
    vision_use_head=False,
)


# --- images ---------------------------------------------------------------------------------------------------------


def image(name):
    """An image from a name such as ``p7_64x48.png`` or ``p3_40x30_RGBA.png``: number, width, height, mode."""
    number, size, *mode = Path(name).stem.split("_")
    seed, (wide, high) = int(number[1:]), map(int, size.split("x"))
    y, x = np.mgrid[0:high, 0:wide]
    planes = [
        (x * (3 + seed % 5) + y * (1 + channel) + seed * 37 + ((x // 8 + y // 8 + seed) % 2) * 64) % 256
        for channel in range(3)
    ]
    whole = Image.fromarray(np.stack(planes, -1).astype(np.uint8), "RGB")
    return whole.convert(mode[0]) if mode and mode[0] in ("L", "P", "RGBA", "CMYK", "LA", "1") else whole


def write_images(folder, names):
    """Write images. A name that ends in ``_rotated.jpg`` carries EXIF orientation 6; ``_clear`` is half transparent."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        made = image(name)
        if "_clear" in name:
            made = made.convert("RGBA")
            alpha = np.zeros((made.height, made.width), np.uint8)
            alpha[:, made.width // 2 :] = 255
            made.putalpha(Image.fromarray(alpha))
        if name.endswith("_turned.jpg"):
            exif = Image.Exif()
            exif[0x0112] = 6
            made.save(folder / name, quality=95, exif=exif)
        else:
            made.save(folder / name)


# --- weights ----------------------------------------------------------------------------------------------------------


def draw(name, shape):
    if name.endswith("bias"):
        return torch.zeros(shape)
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    drawn = torch.randn(shape, generator=generator)
    if "norm" in name and len(shape) == 1:
        return torch.ones(shape) + 0.05 * drawn
    if len(shape) == 1:  # gates, scales
        return 0.5 + 0.05 * drawn
    scale = (
        1.0
        if "embed_tokens" in name
        else 0.25
        if "lm_head" in name
        else 0.1
        if "position" in name or "pos_emb" in name
        else 0.15
    )
    return drawn * scale


def fill(model):
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(draw(name, parameter.shape))
    return model.to(torch.float32).eval()


def tokenizer_of(*added, eos=None, **named):
    """The golden tokenizer with further control tokens. Args: named: attributes such as image_token."""
    made = T.AutoTokenizer.from_pretrained(TOKENIZER, **({"extra_special_tokens": named} if named else {}))
    missing = [word for word in added if word not in made.get_vocab()]
    made.add_tokens(missing, special_tokens=True)
    if eos:
        made.eos_token = eos
    return made


def ids_of(tokenizer, **words):
    return {key: tokenizer.convert_tokens_to_ids(word) for key, word in words.items()}


def text_of(tokenizer, **more):
    return {
        **TEXT,
        "vocab_size": len(tokenizer),
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        **more,
    }


def chat_template(user, answer, image, system="{s}", begin="", header=""):
    """A chat template with marked answers. ``user`` holds {c}, ``answer`` {c}, ``system`` {s}; ``header`` opens an answer."""
    u0, u1 = user.split("{c}")
    a0, a1 = answer.split("{c}")
    s0, s1 = system.split("{s}")
    parts = (
        "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for c in m['content'] %}{% if c['type'] == 'image' %}"
        + image
        + "{% elif c['type'] == 'text' %}{{ c['text'] }}{% endif %}{% endfor %}{% endif %}"
    )
    return (
        begin
        + "{% for m in messages %}{% if m['role'] == 'system' %}"
        + s0
        + parts
        + s1
        + "{% elif m['role'] == 'assistant' %}"
        + header
        + "{% generation %}"
        + a0
        + parts
        + a1
        + "{% endgeneration %}{% else %}"
        + u0
        + parts
        + u1
        + "{% endif %}{% endfor %}"
        + "{% if add_generation_prompt %}"
        + header
        + a0
        + "{% endif %}"
    )


CHATML = chat_template(
    "<|im_start|>user\n{c}<|im_end|>\n",
    "{c}<|im_end|>\n",
    "{I}",
    "<|im_start|>system\n{s}<|im_end|>\n",
    header="<|im_start|>assistant\n",
)


# --- families ---------------------------------------------------------------------------------------------------------

FAMILIES, NEEDS_TORCHVISION = {}, set()


def family(build):
    FAMILIES[build.__name__] = build
    return build


def pil(name, **options):
    return getattr(T, name + "Pil")(**options)


class Parts:
    """Tokenizer, image processor and chat template where transformers cannot compose them."""

    def __init__(self, image_processor, tokenizer, chat_template=None, **others):
        self.image_processor, self.tokenizer, self.chat_template = image_processor, tokenizer, chat_template


def composed(name, **parts):
    if parts.get("video_processor", "") is None:
        made = Parts(**parts)
    else:
        try:
            made = getattr(T, name)(**parts)
        except ImportError:
            made = Parts(**parts)
    plain = {key: value for key, value in parts.items() if key != "chat_template" and isinstance(value, (int, str))}
    made.golden_config = {"processor_class": name, **plain}
    return made


def save_processor(processor, folder):
    """preprocessor_config.json, processor_config.json, chat_template.jinja and the tokenizer, as checkpoints have them."""
    folder = Path(folder)
    processor.tokenizer.save_pretrained(folder)
    config = {
        **processor.image_processor.to_dict(),
        "image_processor_type": type(processor.image_processor).__name__.removesuffix("Pil"),
    }
    config.pop("processor_class", None)
    (folder / "preprocessor_config.json").write_text(json.dumps(config, indent=2, sort_keys=True))
    (folder / "processor_config.json").write_text(json.dumps(processor.golden_config, indent=2, sort_keys=True))
    if processor.chat_template:
        (folder / "chat_template.jinja").write_text(processor.chat_template)


def video(name, **options):
    """A video processor, which needs torchvision; without it the processor has none."""
    try:
        return getattr(T, name)(**options)
    except ImportError:
        return None


def _qwen(
    name,
    config,
    processor,
    vision,
    text=None,
    patch=14,
    mrope=(2, 1, 1),
    video_name="Qwen2VLVideoProcessor",
    model=None,
):
    t = tokenizer_of("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>", eos="<|im_end|>")
    unit = patch * 2
    words = ids_of(
        t,
        image_token_id="<|image_pad|>",
        video_token_id="<|video_pad|>",
        vision_start_token_id="<|vision_start|>",
        vision_end_token_id="<|vision_end|>",
    )
    made = getattr(T, config)(
        text_config=text_of(t, rope_parameters={**MROPE, "mrope_section": list(mrope)}, **(text or {})),
        vision_config=vision,
        tie_word_embeddings=False,
        **words,
    )
    options = dict(
        patch_size=patch,
        merge_size=2,
        temporal_patch_size=2,
        size={"shortest_edge": unit * unit, "longest_edge": 16 * unit * unit},
    )
    template = CHATML.replace("{I}", "<|vision_start|><|image_pad|><|vision_end|>")
    proc = composed(
        processor,
        image_processor=pil("Qwen2VLImageProcessor", **options),
        tokenizer=t,
        video_processor=video(video_name, **options),
        chat_template=template,
    )
    return getattr(T, model or f"{name}ForConditionalGeneration")(made), proc


@family
def qwen2_vl():
    return _qwen(
        "Qwen2VL",
        "Qwen2VLConfig",
        "Qwen2VLProcessor",
        dict(embed_dim=32, hidden_size=32, num_heads=4, depth=2, mlp_ratio=2),
    )


@family
def qwen2_5_vl():
    vision = dict(
        hidden_size=32,
        num_heads=4,
        depth=2,
        fullatt_block_indexes=[1],
        out_hidden_size=32,
        intermediate_size=64,
        window_size=56,
    )
    return _qwen("Qwen2_5_VL", "Qwen2_5_VLConfig", "Qwen2_5_VLProcessor", vision)


QWEN3_VISION = dict(
    hidden_size=32,
    num_heads=4,
    depth=2,
    out_hidden_size=32,
    intermediate_size=64,
    patch_size=16,
    num_position_embeddings=64,
)


@family
def qwen3_vl():
    return _qwen(
        "Qwen3VL",
        "Qwen3VLConfig",
        "Qwen3VLProcessor",
        dict(QWEN3_VISION, deepstack_visual_indexes=[0]),
        dict(head_dim=8),
        patch=16,
        video_name="Qwen3VLVideoProcessor",
    )


@family
def qwen3_vl_moe():
    return _qwen(
        "Qwen3VLMoe",
        "Qwen3VLMoeConfig",
        "Qwen3VLProcessor",
        dict(QWEN3_VISION, deepstack_visual_indexes=[0]),
        dict(head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32),
        patch=16,
        video_name="Qwen3VLVideoProcessor",
    )


@family
def qwen3_5():
    """Three quarters of such a model's layers are recurrent; here one of two."""
    return _qwen(
        "Qwen3_5",
        "Qwen3_5Config",
        "Qwen3VLProcessor",
        dict(QWEN3_VISION),
        dict(
            head_dim=8,
            layer_types=["linear_attention", "full_attention"],
            linear_key_head_dim=8,
            linear_value_head_dim=8,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            partial_rotary_factor=1.0,
        ),
        patch=16,
        video_name="Qwen3VLVideoProcessor",
    )


@family
def llava():
    t = tokenizer_of("<image>")
    config = T.LlavaConfig(
        text_config=text_of(t, model_type="llama"),
        vision_config=CLIP,
        image_token_id=t.convert_tokens_to_ids("<image>"),
        image_seq_length=4,
        tie_word_embeddings=False,
    )
    proc = composed(
        "LlavaProcessor",
        image_processor=pil("CLIPImageProcessor", size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28}),
        tokenizer=t,
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=chat_template("USER: {c} ", "{c}</s>", "<image>", "{s} ", header="ASSISTANT:"),
    )
    return T.LlavaForConditionalGeneration(config), proc


PINPOINTS = [[28, 56], [56, 28], [56, 56], [84, 28], [28, 84]]


@family
def llava_next():
    t = tokenizer_of("<image>")
    config = T.LlavaNextConfig(
        text_config=text_of(t, model_type="mistral", sliding_window=None),
        vision_config=CLIP,
        image_grid_pinpoints=PINPOINTS,
        image_token_id=t.convert_tokens_to_ids("<image>"),
        image_seq_length=4,
        tie_word_embeddings=False,
    )
    images = pil(
        "LlavaNextImageProcessor",
        size={"shortest_edge": 28},
        crop_size={"height": 28, "width": 28},
        image_grid_pinpoints=PINPOINTS,
    )
    proc = composed(
        "LlavaNextProcessor",
        image_processor=images,
        tokenizer=t,
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=chat_template("[INST] {c} [/INST]", " {c}</s>", "<image>", "{s} ", begin="<s>"),
    )
    return T.LlavaNextForConditionalGeneration(config), proc


@family
def llava_onevision():
    t = tokenizer_of("<image>", "<video>", eos="<|im_end|>")
    points = [[56, 56], [56, 112], [112, 56], [112, 112]]
    config = T.LlavaOnevisionConfig(
        text_config=text_of(t, model_type="qwen2"),
        vision_config=SIGLIP,
        image_grid_pinpoints=points,
        tie_word_embeddings=False,
        vision_aspect_ratio="anyres_max_9",
        **ids_of(t, image_token_id="<image>", video_token_id="<video>"),
    )
    images = pil("LlavaOnevisionImageProcessor", size={"height": 56, "width": 56}, image_grid_pinpoints=points)
    proc = composed(
        "LlavaOnevisionProcessor",
        image_processor=images,
        tokenizer=t,
        video_processor=video("LlavaOnevisionVideoProcessor"),
        num_image_tokens=16,
        vision_feature_select_strategy="full",
        chat_template=CHATML.replace("{I}", "<image>"),
    )
    return T.LlavaOnevisionForConditionalGeneration(config), proc


@family
def gemma3():
    named = dict(boi_token="<start_of_image>", eoi_token="<end_of_image>", image_token="<image_soft_token>")
    t = tokenizer_of(*named.values(), eos="<end_of_turn>", **named)
    text = text_of(
        t, head_dim=8, layer_types=["sliding_attention", "full_attention"], sliding_window=24, query_pre_attn_scalar=8
    )
    config = T.Gemma3Config(
        text_config=text,
        vision_config=SIGLIP,
        mm_tokens_per_image=4,
        tie_word_embeddings=False,
        **ids_of(
            t, boi_token_index="<start_of_image>", eoi_token_index="<end_of_image>", image_token_id="<image_soft_token>"
        ),
    )
    proc = composed(
        "Gemma3Processor",
        image_processor=pil("Gemma3ImageProcessor", size={"height": 56, "width": 56}),
        tokenizer=t,
        image_seq_length=4,
        chat_template=chat_template(
            "<start_of_turn>user\n{c}<end_of_turn>\n",
            "{c}<end_of_turn>\n",
            "<start_of_image>",
            "<start_of_turn>user\n{s}\n\n<end_of_turn>\n",
            begin="<s>",
            header="<start_of_turn>model\n",
        ),
    )
    return T.Gemma3ForConditionalGeneration(config), proc


@family
def gemma4():
    named = dict(
        boi_token="<|image>",
        eoi_token="<image|>",
        image_token="<|image|>",
        video_token="<|video|>",
        boa_token="<|audio>",
        eoa_token="<audio|>",
        audio_token="<|audio|>",
    )
    t = tokenizer_of(*named.values(), eos="<turn|>", **named)
    text = text_of(
        t,
        head_dim=8,
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=24,
        hidden_size_per_layer_input=0,
        vocab_size_per_layer_input=len(t),
        use_bidirectional_attention="vision",
        global_head_dim=8,
    )
    vision = dict(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=8,
        patch_size=8,
        position_embedding_size=64,
        pooling_kernel_size=2,
    )
    config = T.Gemma4Config(
        text_config=text,
        vision_config=vision,
        audio_config=None,
        tie_word_embeddings=False,
        **ids_of(
            t,
            boi_token_id="<|image>",
            eoi_token_id="<image|>",
            image_token_id="<|image|>",
            video_token_id="<|video|>",
            boa_token_id="<|audio>",
            eoa_token_index="<audio|>",
            audio_token_id="<|audio|>",
        ),
    )
    images = pil("Gemma4ImageProcessor", patch_size=8, max_soft_tokens=70, pooling_kernel_size=2)
    proc = composed(
        "Gemma4Processor",
        feature_extractor=T.Gemma4AudioFeatureExtractor(),
        image_processor=images,
        tokenizer=t,
        video_processor=video("Gemma4VideoProcessor", patch_size=8, max_soft_tokens=70, pooling_kernel_size=2),
        image_seq_length=70,
        chat_template=chat_template(
            "<|turn>user\n{c}<turn|>\n",
            "{c}<turn|>\n",
            "<|image|>",
            "<|turn>system\n{s}<turn|>\n",
            begin="<s>",
            header="<|turn>model\n",
        ),
    )
    return T.Gemma4ForConditionalGeneration(config), proc


@family
def paligemma():
    t = tokenizer_of("<image>", image_token="<image>")
    images = pil("SiglipImageProcessor", size={"height": 56, "width": 56})
    images.image_seq_length = 16
    proc = composed("PaliGemmaProcessor", image_processor=images, tokenizer=t)
    t = proc.tokenizer
    config = T.PaliGemmaConfig(
        text_config=text_of(t, model_type="gemma", head_dim=8),
        vision_config=dict(SIGLIP, projection_dim=32),
        projection_dim=32,
        image_token_index=t.convert_tokens_to_ids("<image>"),
        tie_word_embeddings=False,
    )
    return T.PaliGemmaForConditionalGeneration(config), proc


@family
def internvl():
    named = dict(
        start_image_token="<img>", end_image_token="</img>", context_image_token="<IMG_CONTEXT>", video_token="<video>"
    )
    t = tokenizer_of(*named.values(), eos="<|im_end|>", **named)
    vision = dict(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=[56, 56],
        patch_size=[14, 14],
    )
    config = T.InternVLConfig(
        text_config=text_of(t, model_type="qwen2"),
        vision_config=vision,
        image_seq_length=4,
        tie_word_embeddings=False,
        image_token_id=t.convert_tokens_to_ids("<IMG_CONTEXT>"),
    )
    images = pil(
        "GotOcr2ImageProcessor", size={"height": 56, "width": 56}, crop_to_patches=True, min_patches=1, max_patches=4
    )
    proc = composed(
        "InternVLProcessor",
        image_processor=images,
        tokenizer=t,
        video_processor=video("InternVLVideoProcessor", size={"height": 56, "width": 56}),
        image_seq_length=4,
        chat_template=CHATML.replace("{I}", "<IMG_CONTEXT>\n"),
    )
    return T.InternVLForConditionalGeneration(config), proc


def _idefics(processor, config, model, images, vision_type, **more):
    cells = [f"<row_{r}_col_{c}>" for r in range(1, 7) for c in range(1, 7)]
    t = tokenizer_of(
        "<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>", *cells, eos="<end_of_utterance>"
    )
    vision = dict(
        model_type=vision_type,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=56,
        patch_size=14,
    )
    made = getattr(T, config)(
        text_config=text_of(t, model_type="llama"),
        vision_config=vision,
        scale_factor=2,
        tie_word_embeddings=False,
        image_token_id=t.convert_tokens_to_ids("<image>"),
        pad_token_id=t.pad_token_id,
    )
    template = chat_template(
        "User:{c}<end_of_utterance>\n",
        " {c}<end_of_utterance>\n",
        "<image>",
        "System: {s}<end_of_utterance>\n",
        begin="<|im_start|>",
        header="Assistant:",
    )
    proc = composed(
        processor,
        image_processor=pil(images, size={"longest_edge": 112}, max_image_size={"longest_edge": 56}),
        tokenizer=t,
        image_seq_len=4,
        chat_template=template,
        **more,
    )
    return getattr(T, model)(made), proc


@family
def smolvlm():
    return _idefics(
        "SmolVLMProcessor",
        "SmolVLMConfig",
        "SmolVLMForConditionalGeneration",
        "SmolVLMImageProcessor",
        "smolvlm_vision",
        video_processor=video("SmolVLMVideoProcessor", size={"longest_edge": 112}, max_image_size={"longest_edge": 56}),
    )


@family
def idefics3():
    return _idefics(
        "Idefics3Processor",
        "Idefics3Config",
        "Idefics3ForConditionalGeneration",
        "Idefics3ImageProcessor",
        "idefics3_vision",
    )


def _pixtral(t, merge):
    images = pil("PixtralImageProcessor", patch_size={"height": 14, "width": 14}, size={"longest_edge": 84})
    return composed(
        "PixtralProcessor",
        image_processor=images,
        tokenizer=t,
        patch_size=14,
        spatial_merge_size=merge,
        chat_template=chat_template("[INST]{c}[/INST]", "{c}</s>", "[IMG]", "[INST]{s}[/INST]", begin="<s>"),
    )


PIXTRAL_VISION = dict(
    model_type="pixtral",
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    head_dim=8,
    image_size=84,
    patch_size=14,
)


@family
def pixtral():
    t = tokenizer_of("[IMG]", "[IMG_BREAK]", "[IMG_END]")
    config = T.LlavaConfig(
        text_config=text_of(t, model_type="mistral", sliding_window=None),
        vision_config=PIXTRAL_VISION,
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
        image_token_id=t.convert_tokens_to_ids("[IMG]"),
        tie_word_embeddings=False,
    )
    return T.LlavaForConditionalGeneration(config), _pixtral(t, 1)


@family
def mistral3():
    t = tokenizer_of("[IMG]", "[IMG_BREAK]", "[IMG_END]")
    config = T.Mistral3Config(
        text_config=text_of(t, model_type="mistral", sliding_window=None),
        vision_config=PIXTRAL_VISION,
        spatial_merge_size=2,
        image_token_id=t.convert_tokens_to_ids("[IMG]"),
        image_token_index=t.convert_tokens_to_ids("[IMG]"),
        tie_word_embeddings=False,
    )
    return T.Mistral3ForConditionalGeneration(config), _pixtral(t, 2)


def _glm(kind):
    t = tokenizer_of(
        "<|image|>",
        "<|video|>",
        "<|begin_of_image|>",
        "<|end_of_image|>",
        "<|begin_of_video|>",
        "<|end_of_video|>",
        eos="<|user|>",
    )
    words = ids_of(
        t,
        image_token_id="<|image|>",
        video_token_id="<|video|>",
        image_start_token_id="<|begin_of_image|>",
        image_end_token_id="<|end_of_image|>",
        video_start_token_id="<|begin_of_video|>",
        video_end_token_id="<|end_of_video|>",
    )
    vision = dict(hidden_size=32, num_heads=4, depth=2, out_hidden_size=32, intermediate_size=64, image_size=56)
    config = getattr(T, f"{kind}Config")(
        text_config=text_of(t, rope_parameters={**MROPE, "mrope_section": [2, 1, 1]}, partial_rotary_factor=1.0),
        vision_config=vision,
        tie_word_embeddings=False,
        **words,
    )
    options = dict(size={"shortest_edge": 28 * 28 * 2, "longest_edge": 28 * 28 * 2 * 16})
    proc = composed(
        f"{kind}Processor",
        image_processor=pil(f"{kind}ImageProcessor", **options),
        tokenizer=t,
        video_processor=video(f"{kind}VideoProcessor", **options),
        chat_template=chat_template(
            "<|user|>\n{c}",
            "\n{c}",
            "<|begin_of_image|><|image|><|end_of_image|>",
            "<|system|>\n{s}",
            begin="[gMASK]<sop>",
            header="<|assistant|>",
        ),
    )
    return getattr(T, f"{kind}ForConditionalGeneration")(config), proc


@family
def glm4v():
    return _glm("Glm4v")


@family
def glm46v():
    return _glm("Glm46V")


@family
def mllama():
    t = tokenizer_of("<|image|>", "<|python_tag|>", "<|begin_of_text|>", eos="<|eot_id|>")
    vision = dict(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_global_layers=1,
        attention_heads=4,
        vision_output_dim=64,
        image_size=28,
        patch_size=14,
        max_num_tiles=4,
        intermediate_layers_indices=[0],
        supported_aspect_ratios=[[1, 1], [1, 2], [1, 3], [1, 4], [2, 1], [2, 2], [3, 1], [4, 1]],
    )
    text = text_of(
        t,
        num_hidden_layers=3,
        cross_attention_layers=[1],
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    config = T.MllamaConfig(
        text_config=text, vision_config=vision, image_token_index=t.convert_tokens_to_ids("<|image|>")
    )
    images = pil("MllamaImageProcessor", size={"height": 28, "width": 28}, max_image_tiles=4)
    turn = "<|start_header_id|>{r}<|end_header_id|>\n\n"
    proc = composed(
        "MllamaProcessor",
        image_processor=images,
        tokenizer=t,
        chat_template=chat_template(
            turn.format(r="user") + "{c}<|eot_id|>",
            "{c}<|eot_id|>",
            "<|image|>",
            turn.format(r="system") + "{s}<|eot_id|>",
            begin="<s>",
            header=turn.format(r="assistant"),
        ),
    )
    return T.MllamaForConditionalGeneration(config), proc


@family
def llama4():
    words = dict(
        fake_image_token="<|image|>",
        image_token="<|image|>",
        start_of_image_token="<|image_start|>",
        end_of_image_token="<|image_end|>",
        patch_token="<|patch|>",
        tile_x_separator_token="<|tile_x_separator|>",
        tile_y_separator_token="<|tile_y_separator|>",
    )
    t = tokenizer_of(*words.values(), eos="<|eot_id|>")
    vision = dict(
        hidden_size=32,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=56,
        patch_size=14,
        vision_output_dim=32,
        projector_input_dim=32,
        projector_output_dim=32,
    )
    text = text_of(
        t,
        head_dim=8,
        intermediate_size_mlp=64,
        num_local_experts=4,
        attention_chunk_size=32,
        attn_temperature_tuning=False,
        moe_layers=[1],
        no_rope_layers=[1, 0],
        layer_types=["chunked_attention", "full_attention"],
    )
    config = T.Llama4Config(
        text_config=text,
        vision_config=vision,
        tie_word_embeddings=False,
        **ids_of(t, boi_token_index="<|image_start|>", eoi_token_index="<|image_end|>", image_token_index="<|patch|>"),
    )
    images = T.Llama4ImageProcessor(size={"height": 56, "width": 56}, max_patches=4)
    turn = "<|header_start|>{r}<|header_end|>\n\n"
    proc = composed(
        "Llama4Processor",
        image_processor=images,
        tokenizer=t,
        patch_size=14,
        chat_template=chat_template(
            turn.format(r="user") + "{c}<|eot_id|>",
            "{c}<|eot_id|>",
            "<|image|>",
            turn.format(r="system") + "{s}<|eot_id|>",
            begin="<s>",
            header=turn.format(r="assistant"),
        ),
        **words,
    )
    return T.Llama4ForConditionalGeneration(config), proc


NEEDS_TORCHVISION.add("llama4")


@family
def aya_vision():
    words = dict(
        start_of_img_token="<|START_OF_IMG|>",
        end_of_img_token="<|END_OF_IMG|>",
        img_patch_token="<|IMG_PATCH|>",
        img_line_break_token="<|IMG_LINE_BREAK|>",
    )
    t = tokenizer_of("<image>", *words.values(), eos="<|im_end|>")
    config = T.AyaVisionConfig(
        text_config=text_of(t, model_type="cohere2", sliding_window=24),
        vision_config=SIGLIP,
        downsample_factor=2,
        image_token_index=t.convert_tokens_to_ids("<|IMG_PATCH|>"),
        tie_word_embeddings=False,
        adapter_layer_norm_eps=1e-6,
        alignment_intermediate_size=64,
    )
    images = pil(
        "GotOcr2ImageProcessor", size={"height": 56, "width": 56}, crop_to_patches=True, min_patches=1, max_patches=4
    )
    proc = composed(
        "AyaVisionProcessor",
        image_processor=images,
        tokenizer=t,
        patch_size=14,
        img_size=56,
        downsample_factor=2,
        chat_template=CHATML.replace("{I}", "<image>"),
        **words,
    )
    return T.AyaVisionForConditionalGeneration(config), proc


@family
def lfm2_vl():
    named = dict(
        image_token="<image>",
        image_start_token="<|image_start|>",
        image_end_token="<|image_end|>",
        image_thumbnail_token="<|img_thumbnail|>",
    )
    t = tokenizer_of(
        *named.values(),
        *(f"<|img_row_{r}_col_{c}|>" for r in range(1, 11) for c in range(1, 11)),
        eos="<|im_end|>",
        **named,
    )
    vision = dict(
        model_type="siglip2_vision_model",
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_patches=16,
        patch_size=14,
    )
    text = text_of(
        t, model_type="lfm2", layer_types=["conv", "full_attention"], block_auto_adjust_ff_dim=False, conv_L_cache=3
    )
    config = T.Lfm2VlConfig(
        text_config=text,
        vision_config=vision,
        projector_hidden_size=64,
        downsample_factor=2,
        tie_word_embeddings=False,
        image_token_id=t.convert_tokens_to_ids("<image>"),
    )
    images = T.Lfm2VlImageProcessor(
        encoder_patch_size=14,
        downsample_factor=2,
        tile_size=56,
        max_image_tokens=16,
        min_image_tokens=4,
        max_num_patches=64,
        do_image_splitting=True,
    )
    proc = composed(
        "Lfm2VlProcessor", image_processor=images, tokenizer=t, chat_template=CHATML.replace("{I}", "<image>")
    )
    return T.Lfm2VlForConditionalGeneration(config), proc


NEEDS_TORCHVISION.add("lfm2_vl")


def build(name):
    """(model with its weights drawn, processor)"""
    model, processor = FAMILIES[name]()
    return fill(model), processor


def main(folder, *names):
    for name in names or FAMILIES:
        try:
            model, processor = build(name)
        except ImportError as error:
            if name in names or name not in NEEDS_TORCHVISION:
                raise
            print(f"{name}: left out, it needs torchvision ({str(error).strip().splitlines()[0]})")
            continue
        model.save_pretrained(Path(folder) / name)
        save_processor(processor, Path(folder) / name)


if __name__ == "__main__":
    main(*sys.argv[1:])
