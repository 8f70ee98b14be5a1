"""Measure how long ``burnish explain`` takes for many records with an image each, with nothing cached.

    python bench/plan_images.py MODEL FOLDER RECORDS

Takes the model of ``image_material.py``. Every record has a JPEG file of its own, in seven sizes; the files are made in
FOLDER. Short records have a question of three words and a response of four, long ones of 12 and 62. Prints one line of
JSON with processor and wall seconds, the peak memory and the mean number of characters of each.
"""

from __future__ import annotations

import io
import json
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from material import SEED, Writer

SIZES = ((640, 480), (1280, 960), (800, 600), (1920, 1080), (1024, 768), (600, 800), (333, 500))
TEXTS = {"short": ((2, 0.3, 4), (3, 0.3, 5)), "long": ((8, 0.3, 16), (40, 0.5, 100))}
"""Median, spread and maximum of the words of question and response."""


def make_files(folder: Path, count: int) -> None:
    """Create the images, unless they exist."""
    from PIL import Image

    (folder / "media").mkdir(parents=True, exist_ok=True)
    contents = []
    for place, size in enumerate(SIZES):
        file = io.BytesIO()
        Image.new("RGB", size, (10 * place, 50, 90)).save(file, "JPEG")
        contents.append(file.getvalue())
    for number in range(count):
        path = folder / "media" / f"{number:06}.jpg"
        if not path.exists():
            path.write_bytes(contents[number % len(contents)])


def make_records(folder: Path, count: int, question: Sequence[Any], response: Sequence[Any]) -> float:
    """Write the records and return the mean number of characters of their texts."""
    writer, records = Writer(SEED), []
    for number in range(count):
        texts = {"instruction": f"<image>{writer.text(*question)}", "output": writer.text(*response)}
        records.append({**texts, "images": [f"media/{number:06}.jpg"]})
    (folder / "records.json").write_text(json.dumps(records))
    columns = {"prompt": "instruction", "response": "output", "images": "images"}
    (folder / "dataset_info.json").write_text(
        json.dumps({"records": {"file_name": "records.json", "columns": columns}})
    )
    return sum(len(record["instruction"]) + len(record["output"]) for record in records) / count


def explain(model: Path, folder: Path) -> dict[str, float]:
    """Run ``burnish explain`` in a new process and return what it took."""
    command = [
        str(Path(sys.executable).with_name("burnish")), "explain", f"model_name_or_path={model}", "dataset=records",
        f"dataset_dir={folder}", "template=qwen2_vl", f"output_dir={folder / 'run'}", "overwrite_cache=true",
    ]  # fmt: skip
    before, begin = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    wall_s, after = time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"cpu_s": cpu_s, "wall_s": wall_s, "peak_bytes": after.ru_maxrss * 1024}


def main(model: Path, folder: Path, count: int) -> None:
    """Print the measurements."""
    make_files(folder, count)
    results = {}
    for name, (question, response) in TEXTS.items():
        characters = make_records(folder, count, question, response)
        results[name] = {"characters": characters, **explain(model, folder)}
    print(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
