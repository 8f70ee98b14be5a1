"""Write ``videos.json``: rows, tensors, positions and losses of transformers' own processors for lists of frames.

    python tests/golden/make_videos_golden.py

It needs a torchvision that fits torch, without which transformers has no video processors.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import image_models
import torch

QWEN = "<|im_start|>user\n{}{}<|im_end|>\n<|im_start|>assistant\nA shape.<|im_end|>\n"
GLM = "[gMASK]<sop><|user|>\n{}{}<|assistant|>\nA shape."
VIDEO = "<|vision_start|><|video_pad|><|vision_end|>"
IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
MARKS = {
    "glm4v": (GLM, "<|begin_of_video|><|video|><|end_of_video|>", "<|begin_of_image|><|image|><|end_of_image|>"),
    "glm46v": (GLM, "<|begin_of_video|><|video|><|end_of_video|>", "<|begin_of_image|><|image|><|end_of_image|>"),
}
CASES = {
    "even": {"size": "64x48", "frames": 4, "fps": 2.0, "image": ""},
    "odd": {"size": "40x130", "frames": 5, "fps": 3.0, "image": ""},
    "large": {"size": "640x480", "frames": 6, "fps": 0.4, "image": ""},
    "both": {"size": "64x48", "frames": 3, "fps": 2.0, "image": "p9_48x72.png"},
}


def made(family: str, name: str) -> dict[str, Any]:
    case = CASES[name]
    model, processor = image_models.build(family)
    form, video, image = MARKS.get(family, (QWEN, VIDEO, IMAGE))
    names = [f"p{number}_{case['size']}.png" for number in range(case["frames"])]
    pictures = [image_models.image(case["image"])] if case["image"] else None
    text = form.format(image if pictures else "", video + "What?")
    frames = [image_models.image(name) for name in names]
    width, height = frames[0].size
    told = {
        "fps": case["fps"], "total_num_frames": len(names), "frames_indices": list(range(len(names))), "width": width,
        "height": height,
    }  # fmt: skip
    batch = processor(
        text=[text], images=pictures, videos=[frames], do_sample_frames=False, video_metadata=[told],
        return_tensors="pt", add_special_tokens=False,
    )  # fmt: skip
    batch = {name: value for name, value in batch.items() if torch.is_tensor(value)}
    pixels, grids = batch["pixel_values_videos"], {
        name: batch[name] for name in ("image_grid_thw", "video_grid_thw", "second_per_grid_ts") if name in batch
    }  # fmt: skip
    row = {
        "input_ids": batch["input_ids"][0].tolist(), "video_grid_thw": batch["video_grid_thw"].tolist(),
        "mean": round(float(pixels.mean()), 6), "abs": round(float(pixels.abs().mean()), 6),
        "corner": [round(float(value), 5) for value in pixels[-1, :8]],
    }  # fmt: skip
    positions, _ = model.model.get_rope_index(batch["input_ids"], mm_token_type_ids=batch["mm_token_type_ids"], **grids)
    row["position_ids"] = positions[:, 0].tolist()
    if not (pictures and family in MARKS):  # these models cannot take both: one token stands for either
        with torch.no_grad():
            row["loss"] = float(model(**batch, labels=batch["input_ids"]).loss)
    of_videos = {name: list(getattr(processor.video_processor, name)) for name in ("image_mean", "image_std")}
    told = {"settings": of_videos, "frames": names, "fps": case["fps"], "image": case["image"]}
    return {"family": family, "case": name, "text": text, **told, **row}


def main() -> None:
    families = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "glm4v", "glm46v")
    found = [made(family, case) for family in families for case in CASES]
    (Path(__file__).parent / "videos.json").write_text(json.dumps(found, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
