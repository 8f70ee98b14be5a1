"""Images that cannot be trained on are reported with a message before or at their step."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from burnish.cli import main
from burnish.config.errors import UserError
from burnish.models.images.processor import load_image_processor
from burnish.models.options import ModelOptions
from run_outputs import history
from vision_models import image_models

TAGS = {
    "role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant",
    "system_tag": "system",
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "qwen2_5_vl"
    vision_model, processor = image_models().build("qwen2_5_vl")
    vision_model.save_pretrained(folder)
    image_models().save_processor(processor, folder)
    return folder


def command_line(model, folder, records, **options):
    """Return the command line of a run on the records."""
    entry = {
        "file_name": "v.json", "formatting": "sharegpt", "columns": {"messages": "messages", "images": "images"},
        "tags": TAGS,
    }  # fmt: skip
    (folder / "dataset_info.json").write_text(json.dumps({"v": entry}))
    (folder / "v.json").write_text(json.dumps(records))
    options = {
        "model_name_or_path": model, "template": "qwen2_vl", "dataset": "v", "dataset_dir": folder, "max_steps": 1,
        "output_dir": folder / "out", "use_cpu": "true", "report_to": "none", "plot_loss": "false", **options,
    }  # fmt: skip
    return ["train", *(f"{set_images}={value}" for set_images, value in options.items())]


def records(folder):
    """Return four records with one image each."""
    result = []
    for number in range(4):
        Image.new("RGB", (40, 30), (number * 40, 9, 9)).save(folder / f"{number}.png")
        question = {"role": "user", "content": "<image>What is it?"}
        answer = {"role": "assistant", "content": "A shape."}
        result.append({"messages": [question, answer], "images": [f"{number}.png"]})
    return result


def remove_image(folder, records):
    (folder / "2.png").unlink()


def move_images(folder, records):
    (folder / "elsewhere").mkdir()
    for number in range(4):
        (folder / f"{number}.png").rename(folder / "elsewhere" / f"{number}.png")


def replace_content(content):
    def change(folder, records):
        (folder / "2.png").write_bytes(content)

    return change


def truncate_image(folder, records):
    pixels = np.random.default_rng(7).integers(0, 256, (200, 300, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(folder / "2.png")
    content = (folder / "2.png").read_bytes()
    (folder / "2.png").write_bytes(content[: len(content) // 2])


def set_images(value):
    def change(folder, records):
        records[2]["images"] = value

    return change


CASES = [
    (remove_image, {}, 'record 3 (line 1): images[0] "2.png" was not found. Searched:'),
    (move_images, {}, "elsewhere/0.png"),
    (replace_content(b""), {}, "is empty (0 bytes)"),
    (
        replace_content(b"<!DOCTYPE html>"),
        {},
        'record 3 (line 1): images[0] "2.png" is not an image (begins "<!DOCTYPE ht")',
    ),
    (truncate_image, {}, '2.png" is truncated'),
    (truncate_image, {}, 'record 3: images[0] "'),
    (truncate_image, {"streaming": "true", "max_steps": 2}, 'record 3: images[0] "'),
    (
        set_images(["iVBORw0KGgo" + 500 * "A"]),
        {},
        'AAAA..." is base64 without a data URI prefix. Prepend "data:image/jpeg;base64,".',
    ),
    (set_images(["0.png", "1.png"]), {}, '2 images and 1 "<image>"'),
    (set_images(["http://example.com/a.png"]), {}, "Images are not downloaded during training"),
    (set_images([7]), {}, "Received: int"),
    (set_images([""]), {}, "images[0] is an empty path"),
    (set_images(["data:image/png;base64,iV*"]), {}, "invalid base64"),
    (None, {"image_max_pixels": 100, "image_min_pixels": 50}, "is smaller than one patch of this model (784)"),
    (None, {"image_max_pixels": 100}, "image_max_pixels (100) is below image_min_pixels (1024)"),
    (None, {"template": "gemma3"}, "template gemma3 uses the placeholder <image_soft_token>, but qwen2_5_vl uses"),
    (None, {"lora_target": "qkv"}, "matches only frozen layers of"),
    (None, {"freeze_language_model": "true"}, "are all frozen: nothing is left to train"),
    (None, {"stage": "pt"}, "but stage pt supports text only."),
    (None, {"cutoff_len": 8}, "truncation to cutoff_len would split an image"),
]


@pytest.mark.sample(8)
@pytest.mark.parametrize(
    ("change", "options", "message"),
    CASES,
    ids=[f"{message[:40]}{'-streamed' * ('streaming' in options)}" for _, options, message in CASES],
)
def test_bad_image_gives_its_error(model, tmp_path, monkeypatch, capsys, change, options, message):
    monkeypatch.setenv("BURNISH_CACHE", str(tmp_path / "cache"))
    made = records(tmp_path)
    if change is not None:
        change(tmp_path, made)
    assert main(command_line(model, tmp_path, made, **options)) == 2
    assert message in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("batch", [4, 1])
def test_row_with_damaged_image_is_dropped_on_request(model, tmp_path, monkeypatch, capsys, batch):
    monkeypatch.setenv("BURNISH_CACHE", str(tmp_path / "cache"))
    made = records(tmp_path)
    truncate_image(tmp_path, made)
    options = {"on_bad_record": "drop", "max_steps": 4 // batch, "per_device_train_batch_size": batch}
    assert main(command_line(model, tmp_path, made, **options)) == 0
    assert "Its example is excluded from the step (1 so far, on_bad_record: drop)." in " ".join(
        capsys.readouterr().err.split()
    )


def test_step_without_undamaged_image_does_not_count_in_the_mean_loss(model, tmp_path, monkeypatch):
    monkeypatch.setenv("BURNISH_CACHE", str(tmp_path / "cache"))
    made = records(tmp_path)
    truncate_image(tmp_path, made)
    more = {"on_bad_record": "drop", "max_steps": len(made), "per_device_train_batch_size": 1, "logging_steps": 1}
    assert main(command_line(model, tmp_path, made, **more)) == 0
    losses = [entry["loss"] for entry in history(tmp_path / "out") if "loss" in entry]
    assert losses.count(0) == 1
    mean = json.loads((tmp_path / "out" / "train_results.json").read_text())["train_loss"]
    assert mean == pytest.approx(sum(losses) / (len(losses) - 1), rel=1e-3)
    more = {**more, "output_dir": tmp_path / "together", "logging_steps": len(made)}
    assert main(command_line(model, tmp_path, made, **more)) == 0
    (together,) = [entry["loss"] for entry in history(tmp_path / "together") if "loss" in entry]
    assert together == pytest.approx(mean, rel=1e-3)


def test_run_whose_images_are_all_damaged_is_an_error(model, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("BURNISH_CACHE", str(tmp_path / "cache"))
    made = records(tmp_path)
    truncate_image(tmp_path, made)
    assert main(command_line(model, tmp_path, made[2:3], on_bad_record="drop")) == 2
    assert "no step had a token to train on" in capsys.readouterr().err
    assert not list((tmp_path / "out").glob("*.safetensors"))


def test_missing_pillow_is_reported(model, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("BURNISH_CACHE", str(tmp_path / "cache"))
    arguments = command_line(model, tmp_path, records(tmp_path))
    monkeypatch.setitem(sys.modules, "PIL", None)
    assert main(arguments) == 2
    assert "requires the library 'Pillow'" in capsys.readouterr().err


def test_missing_image_processor_files_are_reported(model, tmp_path, monkeypatch, capsys):
    import shutil

    monkeypatch.setenv("BURNISH_CACHE", str(tmp_path / "cache"))
    without = tmp_path / "without"
    shutil.copytree(model, without, ignore=shutil.ignore_patterns("*processor_config.json"))
    assert main(command_line(without, tmp_path, records(tmp_path))) == 2
    output = " ".join(capsys.readouterr().err.split())
    assert "record 1: the images of the record cannot be used" in output
    assert "this folder has no preprocessor_config.json" in output


def test_image_processor_that_requires_torchvision_is_reported(model, monkeypatch):
    def load(*_, **__):
        raise ImportError("Could not load any class. " * 20 + "Missing optional dependencies: torchvision.")

    monkeypatch.setattr("transformers.AutoImageProcessor.from_pretrained", load)
    monkeypatch.setattr("burnish.models.images.processor.raise_if_torchvision_is_broken", lambda error: None)
    with pytest.raises(UserError, match="its image processor requires torchvision") as raised:
        load_image_processor(ModelOptions(model_name_or_path=str(model)))
    assert "Could not load" not in str(raised.value)


@pytest.mark.slow
def test_incompatible_torchvision_is_reported(model, tmp_path):
    broken = tmp_path / "library"
    (broken / "torchvision").mkdir(parents=True)
    (broken / "torchvision" / "__init__.py").write_text(
        'raise RuntimeError("operator torchvision::nms does not exist")\n'
    )
    info = broken / "torchvision-0.28.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torchvision\nVersion: 0.28.0\n")
    (info / "RECORD").write_text("torchvision/__init__.py,,\n")
    path = os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(broken)])
    environment = {**os.environ, "PYTHONPATH": path, "BURNISH_CACHE": str(tmp_path / "cache")}
    command = [sys.executable, "-m", "burnish", *command_line(model, tmp_path, records(tmp_path))]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert result.returncode == 2
    assert "torchvision 0.28.0 is not compatible with torch" in result.stderr
    assert "pip uninstall torchvision" in result.stderr


def test_images_require_a_version_of_transformers(model, tmp_path, monkeypatch, capsys):
    """Models of earlier versions do not accept encoded images; the error looked like a fault of the model."""
    monkeypatch.setenv("BURNISH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("transformers.__version__", "5.17.0")
    assert main(command_line(model, tmp_path, records(tmp_path))) == 2
    error = capsys.readouterr().err
    assert "Images require transformers 5.21.0 or later. Received: 5.17.0." in error
    assert 'pip install "transformers>=5.21.0"' in error


@pytest.mark.parametrize("packing", ["true", "false"])
def test_explain_counts_no_prefix_of_other_images_as_shared(model, tmp_path, capsys, packing):
    def skipped(rows):
        assert main(["explain", *command_line(model, tmp_path, rows, packing=packing)[1:]]) == 0
        return float(capsys.readouterr().out.partition("skipped tokens")[2].partition("%")[0])

    rows = records(tmp_path)
    assert skipped(rows) < skipped(rows[:1] * len(rows))


def test_cutoff_len_that_keeps_all_rows_is_named(model, tmp_path, capsys):
    def explain(cutoff_len):
        status = main(["explain", *command_line(model, tmp_path, records(tmp_path), cutoff_len=cutoff_len)[1:]])
        return status, capsys.readouterr()

    status, output = explain(12)
    assert (status, "would split an image" in output.err) == (2, True)
    sufficient = int(output.err.partition("examples have at most ")[2].partition(" tokens")[0])
    status, output = explain(sufficient)
    assert (status, "truncated" in output.out) == (0, False)
