"""Runs of GLM-4.1V and GLM-4.6V with images and videos (lists of frames): rows equal those of transformers' processors,
and steps do not depend on batching.
"""

import json
from itertools import chain

import pytest

from burnish.config.options import RawValue
from burnish.data.images.image_file import images_of
from burnish.run.images.batches import RowCollator
from burnish.run.plan.plan import plan
from burnish.run.prepare import prepare
from image_runs import GLM, save_model, train
from run_outputs import history
from vision_models import GOLDEN, image_models

GOLD = [case for case in json.loads((GOLDEN / "videos.json").read_text()) if case["family"] in GLM]
IMAGES = {"one": ["p9_48x72.png"], "two": ["p7_64x48.png", "p3_200x90.png"], "none": []}


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    """Create models, a dataset with the videos of each golden case, and one with images and videos."""
    folder = tmp_path_factory.mktemp("glm")
    for family in GLM:
        save_model(folder, family)
    cases = {case["case"]: case for case in GOLD}
    films = [name for case in cases.values() for name in (*case["frames"], case["image"]) if name]
    image_models().write_images(folder / "data", sorted({*films, *chain.from_iterable(IMAGES.values())}))
    records = {
        name: record_of(case["frames"], [case["image"]] if case["image"] else []) for name, case in cases.items()
    }
    records |= {f"images_{name}": record_of([], images) for name, images in IMAGES.items()}
    for name, record in records.items():
        (folder / "data" / f"{name}.json").write_text(json.dumps([record]))
    mixed = ("even", "images_two", "odd", "images_one", "both", "images_none", "large", "images_two")
    (folder / "data" / "mixed.json").write_text(json.dumps([records[name] for name in mixed]))
    return folder


def record_of(frames, images):
    question = "<image>" * len(images) + "<video>" * bool(frames) + "What?"
    turns = [{"from": "human", "value": question}, {"from": "gpt", "value": "A shape."}]
    return {"conversations": turns, "images": images, **({"videos": [frames]} if frames else {})}


def row_of(workspace, family, dataset, **options):
    overrides = {
        "model_name_or_path": str(workspace / family), "template": GLM[family], "stage": "sft",
        "finetuning_type": "lora", "dataset_dir": str(workspace / "data"), "media_dir": str(workspace / "data"),
        "dataset": str(workspace / "data" / f"{dataset}.json"), "cutoff_len": 512, "max_steps": 1, "use_cpu": True,
        "output_dir": str(workspace / "unused"), "plot_loss": False, "report_to": "none", "image_min_pixels": 1,
        "video_min_pixels": 1, "image_max_pixels": 10**7, "video_max_pixels": 10**7, "enable_thinking": None, **options,
    }  # fmt: skip
    prepared = prepare(plan({name: RawValue(value, "test") for name, value in overrides.items()}))
    return prepared.rows[0], prepared.family, prepared.tokenizer


def with_template_tokens(ids, tokenizer):
    """Return the processor's row with an empty reasoning block and the stop token, as in the template."""
    start, stop = (tokenizer.convert_tokens_to_ids(word) for word in ("<|assistant|>", "<|user|>"))
    block = tokenizer.encode("<think>\n\n</think>\n\n", add_special_tokens=False)
    after = ids.index(start) + 1
    return [*ids[:after], *block, *ids[after:], stop]


@pytest.mark.sample(4)
@pytest.mark.parametrize("gold", GOLD, ids=lambda case: f"{case['family']}-{case['case']}")
def test_rows_with_videos_are_those_of_transformers(workspace, gold):
    row, family, tokenizer = row_of(workspace, gold["family"], gold["case"], video_fps=gold["fps"])
    assert list(row["input_ids"]) == with_template_tokens(gold["input_ids"], tokenizer)
    assert [list(family.video_grid(video)) for video in images_of(row) if video.frames] == gold["video_grid_thw"]
    learned = [token for token in row["labels"] if token >= 0]
    assert tokenizer.decode(learned) == "\nA shape.<|user|>"


@pytest.mark.sample(3)
@pytest.mark.parametrize("images", IMAGES)
@pytest.mark.parametrize("name", GLM)
def test_rows_with_images_are_those_of_transformers(workspace, name, images):
    row, _, tokenizer = row_of(workspace, name, f"images_{images}")
    processor = image_models().build(name)[1].image_processor
    text = "[gMASK]<sop><|user|>\n"
    for image in IMAGES[images]:
        grid = processor(image_models().image(image), return_tensors="pt")["image_grid_thw"]
        placeholders = int(grid.prod()) // processor.merge_size**2
        text += f"<|begin_of_image|>{'<|image|>' * placeholders}<|end_of_image|>"
    expected = tokenizer.encode(f"{text}What?<|assistant|>\nA shape.", add_special_tokens=False)
    assert list(row["input_ids"]) == with_template_tokens(expected, tokenizer)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", GLM)
def test_two_steps_do_not_depend_on_batching(workspace, monkeypatch, name):
    """Batches are flat, padded, or single rows."""
    num_rows = []

    def recorded(self, rows, own=RowCollator.__call__):
        batch = own(self, rows)
        num_rows.append(len(batch["input_ids"]))
        return batch

    monkeypatch.setattr(RowCollator, "__call__", recorded)

    def losses(out, **options):
        folder = train(
            workspace, f"{name}-{out}", name, dataset=str(workspace / "data" / "mixed.json"),
            media_dir=str(workspace / "data"), **options,
        )  # fmt: skip
        return [entry["loss"] for entry in history(folder) if "loss" in entry]

    flat = losses("flat")
    assert set(num_rows) == {1}
    assert abs(flat[1] - flat[0]) > 1e-3
    assert losses("padded", padding_free=False) == pytest.approx(flat, abs=2e-5)
    assert num_rows[-1] == 4
    alone = losses("alone", per_device_train_batch_size=1, gradient_accumulation_steps=4)
    assert alone == pytest.approx(flat, abs=2e-5)
