"""Effects of each image option."""

import json
import shutil
from importlib.util import find_spec

import pytest
import torch

from burnish.cli import main
from burnish.config.errors import UserError
from burnish.config.options import RawValue
from burnish.models.images import ahead, on_disk
from burnish.models.images.processor import ImageProcessor
from burnish.run.images import batches
from burnish.run.plan.plan import plan
from burnish.run.prepare import prepare
from image_runs import TEMPLATES as RUN_TEMPLATES
from image_runs import make_workspace
from run_outputs import history
from vision_models import image_models

TEMPLATES = RUN_TEMPLATES | {"qwen3_vl": "qwen3_vl"}


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    return make_workspace(tmp_path_factory.mktemp("images"))


def lengths(workspace, family="qwen2_5_vl", **changes):
    """Return the number of tokens of each row; None for a dropped record."""
    options = {
        "model_name_or_path": str(workspace / family), "template": TEMPLATES[family], "stage": "sft",
        "finetuning_type": "lora", "dataset_dir": str(workspace / "data"), "dataset": "answers", "cutoff_len": 512,
        "output_dir": str(workspace / "unused"), "max_steps": 1, "use_cpu": True, "plot_loss": False,
        "report_to": "none", **changes,
    }  # fmt: skip
    prepared = prepare(plan({name: RawValue(value, "test") for name, value in options.items()}))
    return [len(prepared.rows[index]["input_ids"]) for index in range(len(prepared.rows))]


@pytest.mark.parametrize(
    ("name", "value", "is_longer"), [("image_max_pixels", 1600, False), ("image_min_pixels", 40000, True)]
)
def test_pixel_limits_change_number_of_image_tokens(workspace, name, value, is_longer):
    defaults, changed = lengths(workspace), lengths(workspace, **{name: value})
    assert sum(changed) > sum(defaults) if is_longer else sum(changed) < sum(defaults)


@pytest.fixture(scope="module")
def videos(workspace):
    """Create a dataset with a video of three frames, and an image."""
    model, processor = image_models().build("qwen3_vl")
    model.save_pretrained(workspace / "qwen3_vl")
    image_models().save_processor(processor, workspace / "qwen3_vl")
    image_models().write_images(workspace / "data" / "film", [f"p{number}_64x48.png" for number in range(3)])
    image_models().write_images(workspace / "data", ["p9_48x72.png"])
    turns = [{"from": "human", "value": "See:<video>and <image>."}, {"from": "gpt", "value": "A shape."}]
    record = {"conversations": turns, "videos": ["film"], "images": ["p9_48x72.png"]}
    (workspace / "data" / "films.json").write_text(json.dumps([record] * 4))
    return {"dataset": str(workspace / "data" / "films.json")}


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("name", "value"), [("video_max_pixels", 1100), ("video_min_pixels", 60000), ("video_fps", 0.001)]
)
def test_video_options_change_rows(workspace, videos, name, value):
    assert lengths(workspace, "qwen3_vl", **videos, **{name: value}) != lengths(workspace, "qwen3_vl", **videos)


@pytest.mark.sample(1)
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_run_with_videos_trains_and_explains_them(workspace, videos, family, capsys):
    run = workspace / f"films_{family}.yaml"
    lines = [
        f"model_name_or_path: {workspace / family}", f"template: {TEMPLATES[family]}", "stage: sft",
        "finetuning_type: lora", f"dataset: {videos['dataset']}", f"output_dir: {workspace / 'films' / family}",
        "max_steps: 2", "logging_steps: 1", "report_to: none", "use_cpu: true", "per_device_train_batch_size: 2",
    ]  # fmt: skip
    run.write_text("\n".join(lines))
    assert main(["explain", str(run)]) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert "p0_64x48.png and 3 more frames 64x48 -> " in output
    assert main(["train", str(run)]) == 0
    assert all(0 < entry["loss"] < 20 for entry in history(workspace / "films" / family) if "loss" in entry)


def test_model_without_video_support_rejects_them_by_record(workspace, videos):
    with pytest.raises(UserError, match=r"(?s)record 1.*contains a video .videos.0.., but llava models can be trained"):
        lengths(workspace, "llava", **videos)


def test_contradictory_pixel_limits_are_rejected(workspace):
    with pytest.raises(UserError, match="is below image_min_pixels"):
        lengths(workspace, image_max_pixels=100, image_min_pixels=200)


def test_long_record_loses_text_or_its_images_are_downscaled(workspace):
    options = {"cutoff_len": 52, "image_min_pixels": 40000, "image_max_pixels": 90000}
    assert lengths(workspace, image_fit="keep", **options)[0] == 52
    assert lengths(workspace, image_fit="shrink", **options)[0] < 52
    assert len(lengths(workspace, **{**options, "cutoff_len": 36})) < 4  # images are not truncated, so rows are dropped


def test_images_are_searched_in_media_dir(workspace, tmp_path):
    data = tmp_path / "data"
    shutil.copytree(workspace / "data", data)
    (tmp_path / "images").mkdir()
    for file in [file for file in data.iterdir() if file.suffix != ".json"]:
        shutil.move(file, tmp_path / "images" / file.name)
    with pytest.raises(UserError, match="Set media_dir"):
        lengths(workspace, dataset_dir=str(data))
    assert lengths(workspace, dataset_dir=str(data), media_dir=str(tmp_path / "images")) == lengths(workspace)


def test_internvl_tiles_can_be_disabled(workspace):
    defaults, one = (lengths(workspace, "internvl", crop_to_patches=crop) for crop in (True, False))
    assert sum(one) < sum(defaults)


def test_gemma_crops_can_be_enabled(workspace):
    sizes = [
        lengths(workspace, "gemma3", image_do_pan_and_scan=crops, image_min_pixels=589824) for crops in (False, True)
    ]
    assert sum(sizes[1]) > sum(sizes[0])


@pytest.mark.skipif(find_spec("torchvision") is not None, reason="torchvision is installed")
def test_missing_torchvision_backend_is_reported(workspace):
    with pytest.raises(UserError, match="image_backend: torchvision requires the library 'torchvision'"):
        lengths(workspace, image_backend="torchvision")


@pytest.mark.slow
def test_image_cache_on_disk_is_shared_by_runs(workspace, monkeypatch, tmp_path):
    from image_runs import train

    monkeypatch.setenv("BURNISH_CACHE", str(tmp_path))
    recorded, tensors = [], ImageProcessor.tensors_of

    def counted(self, prepare, image):
        recorded.append(image.path)
        return tensors(self, prepare, image)

    monkeypatch.setattr(ImageProcessor, "tensors_of", counted)
    options = {"finetuning_type": "lora", "max_steps": 2}
    runs = [train(workspace, "in-memory", **options)]
    recorded.clear()
    runs.append(train(workspace, "on-disk", image_cache="disk", **options))
    assert len(recorded) == len(set(recorded))
    assert recorded
    recorded.clear()
    runs.append(train(workspace, "from-disk", image_cache="disk", **options))
    assert not recorded
    losses = [[entry["loss"] for entry in history(run) if "loss" in entry] for run in runs]
    assert losses[0] == losses[1] == losses[2]
    (folder,) = (tmp_path / "preprocessed").iterdir()
    for file in folder.iterdir():
        file.write_bytes(file.read_bytes()[:-9])  # truncated
    runs.append(train(workspace, "damaged", image_cache="disk", **options))
    assert recorded
    assert [entry["loss"] for entry in history(runs[-1]) if "loss" in entry] == losses[0]


def test_full_image_cache_on_disk_writes_no_more(tmp_path):
    def prepared(image):
        return {"pixel_values": torch.rand(1000), "grid": torch.tensor([[1, image, 3]])}

    cache = on_disk.ImageDiskCache(prepared, str, tmp_path, 10_000)
    first = {number: cache(number) for number in range(5)}
    assert 0 < len(list(tmp_path.iterdir())) < 5
    for file in tmp_path.iterdir():
        again = cache(int(file.stem))
        assert all(torch.equal(again[name], tensor) for name, tensor in first[int(file.stem)].items())


def test_image_memory_limit_is_respected(workspace, monkeypatch):
    recorded = []

    class RecordingPrefetcher(ahead.ImagePrefetcher):
        def __init__(self, prepare, images, threads, ahead_bytes, cache_bytes, num_frames):
            recorded.append((ahead_bytes, cache_bytes))
            super().__init__(prepare, images, threads, ahead_bytes, cache_bytes, num_frames)

    monkeypatch.setattr(batches, "ImagePrefetcher", RecordingPrefetcher)
    from image_runs import train

    train(workspace, "bounded", finetuning_type="lora", max_steps=1, image_ahead_mb=3, image_cache_mb=5)
    train(workspace, "not-kept", finetuning_type="lora", max_steps=1, image_ahead_mb=3, image_cache="none")
    assert (3 * 2**20, 5 * 2**20) in recorded
    assert (3 * 2**20, 0) in recorded
