"""Write ``llamafactory_videos.json``: the rows of LLaMA-Factory for records with videos that are lists of frames.

    python bench/run.py images --print-only --only none       (creates its environment and a copy of torchvision)
    .bench/llamafactory/bin/python tests/golden/make_llamafactory_videos.py

Its own template, plugin and row maker run, on the processors of ``image_models.py``. The file has per case ``family``,
``template``, the texts with marks, the names of frames and images, options (those that are not named have
LLaMA-Factory's defaults), ``input_ids``, ``labels``, ``video_grid_thw``, ``image_grid_thw``, ``second_per_grid_ts``,
and ``sizes``: width and height of the frames that the video processor is given.
"""

# ruff: noqa: E402  the stand-ins must precede llamafactory
from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parents[1] / "bench"), str(HERE)]

import load_torchvision  # noqa: F401, I001  before transformers looks for it
import without_torchaudio  # noqa: F401
import image_models
from llamafactory.data.processor.supervised import SupervisedDatasetProcessor
from llamafactory.data.template import get_template_and_fix_tokenizer
from llamafactory.hparams import DataArguments
from PIL import Image

FAMILIES = {
    "qwen2_vl": "qwen2_vl", "qwen2_5_vl": "qwen2_vl", "qwen3_vl": "qwen3_vl_nothink", "glm4v": "glm4v",
    "glm46v": "glm4_5v",
}  # fmt: skip
LEFT_OUT = {
    ("qwen3_vl", "tiny"): "sides are raised to 28 pixels, of which transformers' processor expects 32",
    ("qwen3_vl", "two_turns"): "the seconds of a video are looked for by the number of its message",
    ("glm4v", "fast"): "two frames per second, whatever video_fps says, so that transformers leaves frames out",
    ("glm46v", "fast"): "the same",
}
"""Cases with a fault of LLaMA-Factory, and the fault."""
ASKED, TOLD = "<video>What moves?", "A shape."
CASES: dict[str, dict[str, Any]] = {
    "even": {"texts": [ASKED, TOLD], "videos": [("64x48", 4)]},
    "odd": {"texts": [ASKED, TOLD], "videos": [("40x130", 5)]},
    "one_frame": {"texts": [ASKED, TOLD], "videos": [("64x48", 1)]},
    "large": {"texts": [ASKED, TOLD], "videos": [("640x480", 6)]},
    "tiny": {"texts": [ASKED, TOLD], "videos": [("10x6", 2)]},
    "fast": {"texts": [ASKED, TOLD], "videos": [("64x48", 6)], "options": {"video_fps": 5.0}},
    "limited": {"texts": [ASKED, TOLD], "videos": [("200x120", 4)], "options": {"video_max_pixels": 6000}},
    "two": {"texts": ["<video>And <video>", TOLD], "videos": [("64x48", 4), ("48x96", 4)]},
    "with_image": {"texts": ["<image>Is it in <video>?", TOLD], "videos": [("64x48", 4)], "images": ["p9_48x72.png"]},
    "two_turns": {"texts": [ASKED, TOLD, "<video>And now?", "It stops."], "videos": [("64x48", 2), ("64x48", 2)]},
}


def names_of(video: int, size: str, count: int) -> list[str]:
    """The names of the frames of a video (see ``image_models.image``)."""
    return [f"p{10 * video + number}_{size}.png" for number in range(count)]


class VideoProcessor:
    """GLM's video processor of transformers 5.6, called as LLaMA-Factory 0.9.5 calls that of 4.x: with ``images``, and
    with the number of frames under its former name."""

    def __init__(self, processor: Any) -> None:
        self._processor = processor

    def __getattr__(self, name: str) -> Any:
        return getattr(self._processor, name)

    def __call__(self, images: None, video_metadata: list[dict[str, Any]], **options: Any) -> Any:
        known = [{**one, "total_num_frames": one["total_frames"]} for one in video_metadata]
        known = [{key: value for key, value in one.items() if key != "total_frames"} for one in known]
        return self._processor(video_metadata=known, **options)


def row_of(family: str, name: str, folder: Path) -> dict[str, Any]:
    """Encode one case."""
    case = CASES[name]
    _, processor = image_models.FAMILIES[family]()
    options = case.get("options", {})
    vars(processor).update(
        options, **({"video_processor": VideoProcessor(processor.video_processor)} if "glm" in family else {})
    )
    frames = [names_of(number, *video) for number, video in enumerate(case["videos"])]
    images = case.get("images", [])
    image_models.write_images(folder, [*images, *(one for video in frames for one in video)])
    paths = [[str(folder / one) for one in video] for video in frames], [str(folder / one) for one in images]
    arguments = DataArguments(template=FAMILIES[family], cutoff_len=4096)
    template = get_template_and_fix_tokenizer(processor.tokenizer, arguments)
    maker = SupervisedDatasetProcessor(template, processor.tokenizer, processor, arguments)
    roles = ("user", "assistant")
    messages = [{"role": roles[at % 2], "content": text} for at, text in enumerate(case["texts"])]
    ids, labels = maker._encode_data_example(messages[:-1], messages[-1:], None, None, paths[1], paths[0], [])
    plugin = template.mm_plugin
    given = plugin.get_mm_inputs(
        paths[1], paths[0], [], [len(paths[1])], [len(paths[0])], [0], [ids], processor
    )  # fmt: skip
    shown = plugin._regularize_videos(
        [list(one) for one in paths[0]], image_max_pixels=options.get("video_max_pixels", 256 * 256),
        image_min_pixels=16 * 16, video_fps=options.get("video_fps", 2.0), video_maxlen=128,
    )["videos"]  # fmt: skip
    grids = {
        key: [[int(number) for number in grid] for grid in given[key]]
        for key in ("video_grid_thw", "image_grid_thw") if key in given
    }  # fmt: skip
    seconds = given.get("second_per_grid_ts")
    return {
        "family": family, "case": name, "template": FAMILIES[family], "texts": case["texts"], "frames": frames,
        "images": images, "options": options, "input_ids": ids, "labels": labels, **grids,
        "second_per_grid_ts": None if seconds is None else [float(one) for one in seconds],
        "sizes": [list(video[0].size) for video in shown if isinstance(video[0], Image.Image)],
    }  # fmt: skip


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        found = [
            row_of(family, name, Path(folder))
            for family in FAMILIES
            for name in CASES
            if (family, name) not in LEFT_OUT
        ]
    lines = ",\n".join(json.dumps(row, separators=(",", ":")) for row in found)
    (HERE / "llamafactory_videos.json").write_text(f"[{lines}]\n")


if __name__ == "__main__":
    main()
