"""What each option of images changes."""

import shutil
from importlib.util import find_spec

import pytest
from test_runs_with_images import TEMPLATES, workplace  # noqa: F401

from burnish.config.errors import UserError
from burnish.config.options import RawValue
from burnish.models.images import ahead
from burnish.run.images import batches
from burnish.run.plan.plan import plan
from burnish.run.prepare import prepare


def lengths(workplace, family="qwen2_5_vl", **changes):  # noqa: F811
    """Tokens of each row; None for a record that gives none."""
    options = {
        "model_name_or_path": str(workplace / family), "template": TEMPLATES[family], "stage": "sft",
        "finetuning_type": "lora", "dataset_dir": str(workplace / "data"), "dataset": "answers", "cutoff_len": 512,
        "output_dir": str(workplace / "unused"), "max_steps": 1, "use_cpu": True, "report_to": "none", **changes,
    }  # fmt: skip
    prepared = prepare(plan({name: RawValue(value, "test") for name, value in options.items()}))
    return [len(prepared.rows[at]["input_ids"]) for at in range(len(prepared.rows))]


@pytest.mark.parametrize(
    ("name", "value", "is_longer"), [("image_max_pixels", 1600, False), ("image_min_pixels", 40000, True)]
)
def test_limits_of_pixels_change_the_tokens_of_images(workplace, name, value, is_longer):  # noqa: F811
    usual, changed = lengths(workplace), lengths(workplace, **{name: value})
    assert sum(changed) > sum(usual) if is_longer else sum(changed) < sum(usual)


def test_limits_that_contradict_each_other_are_refused(workplace):  # noqa: F811
    with pytest.raises(UserError, match="is below image_min_pixels"):
        lengths(workplace, image_max_pixels=100, image_min_pixels=200)


def test_a_record_that_is_too_long_loses_text_or_its_images_are_made_smaller(workplace):  # noqa: F811
    given = {"cutoff_len": 52, "image_min_pixels": 40000, "image_max_pixels": 90000}
    assert lengths(workplace, image_fit="keep", **given)[0] == 52
    assert lengths(workplace, image_fit="shrink", **given)[0] < 52
    assert len(lengths(workplace, **{**given, "cutoff_len": 36})) < 4  # no image is cut, so rows are dropped


def test_images_are_looked_for_in_the_media_folder(workplace, tmp_path):  # noqa: F811
    data = tmp_path / "data"
    shutil.copytree(workplace / "data", data)
    (tmp_path / "images").mkdir()
    for file in [file for file in data.iterdir() if file.suffix != ".json"]:
        shutil.move(file, tmp_path / "images" / file.name)
    with pytest.raises(UserError, match="Set media_dir"):
        lengths(workplace, dataset_dir=str(data))
    assert lengths(workplace, dataset_dir=str(data), media_dir=str(tmp_path / "images")) == lengths(workplace)


def test_tiles_of_internvl_are_off_on_demand(workplace):  # noqa: F811
    usual, one = (lengths(workplace, "internvl", crop_to_patches=crop) for crop in (True, False))
    assert sum(one) < sum(usual)


def test_crops_of_gemma_are_added_on_demand(workplace):  # noqa: F811
    sizes = [
        lengths(workplace, "gemma3", image_do_pan_and_scan=crops, image_min_pixels=589824) for crops in (False, True)
    ]
    assert sum(sizes[1]) > sum(sizes[0])


@pytest.mark.skipif(find_spec("torchvision") is not None, reason="torchvision is installed")
def test_the_backend_of_torchvision_is_named_where_it_is_missing(workplace):  # noqa: F811
    with pytest.raises(UserError, match="image_backend: torchvision needs the library 'torchvision'"):
        lengths(workplace, image_backend="torchvision")


def test_memory_for_images_is_bounded_as_asked(workplace, monkeypatch):  # noqa: F811
    seen = []

    class Recorded(ahead.PreparedAhead):
        def __init__(self, prepare, images, threads, ahead_bytes, kept_bytes):
            seen.append((ahead_bytes, kept_bytes))
            super().__init__(prepare, images, threads, ahead_bytes, kept_bytes)

    monkeypatch.setattr(batches, "PreparedAhead", Recorded)
    from test_runs_with_images import train

    train(workplace, "bounded", finetuning_type="lora", max_steps=1, image_ahead_mb=3, image_cache_mb=5)
    train(workplace, "not-kept", finetuning_type="lora", max_steps=1, image_ahead_mb=3, image_cache="none")
    assert (3 * 2**20, 5 * 2**20) in seen
    assert (3 * 2**20, 0) in seen
