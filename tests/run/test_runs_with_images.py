"""Runs with images, from a YAML file to a model that transformers loads."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from PIL import Image

from burnish.adapters.base import ADAPTERS
from burnish.cli import main
from burnish.data.images.limits import apply_image_limits
from burnish.data.images.options import ImageOptions
from burnish.models.images import features
from burnish.run.images.batches import RowCollator, check_processes
from burnish.run.plan.options import RunOptions
from image_runs import OTHERS, RECORDS, TEMPLATES, make_workspace, train, write_sets
from representative import representative_slow
from run_outputs import history, same_weights, weights_in
from vision_models import golden, image_models


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    return make_workspace(tmp_path_factory.mktemp("images"))


def losses(folder):
    return [entry["loss"] for entry in history(folder) if "loss" in entry]


@pytest.mark.sample(1)
@pytest.mark.parametrize("family", representative_slow(TEMPLATES, 3))
def test_first_loss_matches_transformers(workspace, family):
    rows = [row for row in golden()["llamafactory"] if row["family"] == family and not row["options"]]
    chosen = [row for row in rows if row["record"] in RECORDS]
    expected = sum(row["loss"] * row["items"] for row in chosen) / sum(row["items"] for row in chosen)
    result = losses(train(workspace, f"first-{family}", family, max_steps=1))
    assert result == [pytest.approx(expected, abs=1e-4)]


@pytest.mark.sample(2)
@pytest.mark.parametrize("family", representative_slow([*TEMPLATES, "llava_onevision", "smolvlm", "paligemma"], 2))
@pytest.mark.parametrize("options", [{}, {"finetuning_type": "lora", "stage": "dpo", "dataset": "pairs"}], ids=str)
def test_image_rows_are_padding_free_in_a_run(workspace, monkeypatch, capsys, family, options):
    shapes = []

    def recorded(self, rows, own=RowCollator.__call__):
        batch = own(self, rows)
        shapes.append(tuple(batch["input_ids"].shape))
        return batch

    monkeypatch.setattr(RowCollator, "__call__", recorded)
    train(workspace, "shapes", family, max_steps=1, **options)
    assert [rows for rows, _ in shapes] == [1]
    assert "padded" not in "".join(capsys.readouterr())


@pytest.mark.sample(1)
@pytest.mark.parametrize("family", representative_slow(OTHERS, ("mllama", "smolvlm")))
def test_other_families_have_equal_losses_for_any_micro_batching(workspace, family):
    one = {"per_device_train_batch_size": 1, "per_device_eval_batch_size": 1, "gradient_accumulation_steps": 4}
    alone = losses(train(workspace, f"alone-{family}", family, **one))
    assert alone[1] < alone[0]
    if family == "mllama":
        return
    assert losses(train(workspace, f"flat-{family}", family)) == pytest.approx(alone, abs=2e-5)


def test_model_that_mixes_rows_uses_one_row_per_batch(workspace, capsys):
    with pytest.raises(AssertionError):
        train(workspace, "mllama-4", "mllama")
    assert "Set per_device_train_batch_size: 1." in capsys.readouterr().err


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "cut",
    representative_slow([
        {"padding_free": False}, {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4},
        {"packing": True, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 1, "cutoff_len": 1024},
        {"max_tokens_per_batch": 130}, {"image_cache": "none"}, {"dataloader_num_workers": 1},
    ], 2),
    ids=lambda cut: next(iter(cut)),
)  # fmt: skip
def test_update_does_not_depend_on_micro_batching(workspace, cut):
    whole = losses(train(workspace, "whole", finetuning_type="lora"))
    parts = losses(train(workspace, f"cut-{next(iter(cut))}", finetuning_type="lora", **cut))
    assert parts == pytest.approx(whole, abs=2e-5)


@pytest.mark.parametrize("stage", representative_slow(["dpo", "kto"], 1))
def test_initial_preference_loss_with_images_equals_reference(workspace, stage):
    dataset = {"dpo": "pairs", "kto": "unpaired"}[stage]
    size = {"dpo": 4, "kto": 8}[stage]
    options = {"stage": stage, "dataset": dataset, "finetuning_type": "lora", "learning_rate": 1e-2}
    flat = losses(train(workspace, f"{stage}-flat", per_device_train_batch_size=size, **options))
    assert flat[0] == pytest.approx({"dpo": 0.6931, "kto": 0.5}[stage], abs=1e-3)
    assert flat[1] < flat[0]
    cut = train(
        workspace, f"{stage}-cut", per_device_train_batch_size=2, gradient_accumulation_steps=size // 2,
        padding_free=False, **options,
    )  # fmt: skip
    assert losses(cut) == pytest.approx(flat, abs=2e-5)
    before = train(workspace, f"{stage}-before", per_device_train_batch_size=size, precompute_ref_log_probs=True,
                   **options)  # fmt: skip
    assert losses(before) == pytest.approx(flat, abs=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("family", representative_slow(["qwen2_5_vl", "gemma3"], 1))
def test_reference_model_processes_images(workspace, family):
    options = {"stage": "dpo", "dataset": "pairs", "finetuning_type": "lora", "learning_rate": 1e-2}
    own = losses(train(workspace, f"own-{family}", family, **options))
    second = losses(train(workspace, f"second-{family}", family, ref_model=workspace / family, **options))
    assert second == pytest.approx(own, abs=1e-4)


def test_resumed_run_is_bitwise_equal(workspace):
    options = {"finetuning_type": "lora", "per_device_train_batch_size": 1, "lr_scheduler_type": "linear"}
    whole = train(workspace, "whole-6", max_steps=6, **options)
    train(workspace, "resumed", max_steps=6, save_steps=3, save_strategy="steps", **options)
    newest = sorted((workspace / "resumed").glob("checkpoint-6"))
    for path in newest[0].iterdir():
        path.unlink()
    newest[0].rmdir()
    for name in ("all_results.json", "adapter_model.safetensors"):
        (workspace / "resumed" / name).unlink(missing_ok=True)
    resumed = train(workspace, "resumed", max_steps=6, save_steps=3, save_strategy="steps",
                    resume_from_checkpoint=str(workspace / "resumed" / "checkpoint-3"), **options)  # fmt: skip
    assert same_weights(whole, resumed)


def tower_calls(monkeypatch, workspace, out, **options):
    """Train, and return the output folder and the number of calls of the vision tower."""
    calls, original = [], features.image_features
    with monkeypatch.context() as patched:
        patched.setattr(features, "image_features", lambda *arguments: calls.append(1) or original(*arguments))
        folder = train(workspace, out, **options)
    return folder, len(calls)


def test_frozen_tower_computes_each_image_in_first_epoch_only(workspace, monkeypatch):
    options = {"finetuning_type": "lora"}
    _, once = tower_calls(monkeypatch, workspace, "features-once", max_steps=1, **options)
    kept, calls = tower_calls(monkeypatch, workspace, "features-kept", max_steps=3, **options)
    assert calls == once
    for name, changes in {"none": {"image_cache": "none"}, "small": {"image_cache_mb": 0}}.items():
        again, calls = tower_calls(monkeypatch, workspace, f"features-{name}", max_steps=3, **options, **changes)
        assert calls > once
        assert losses(kept) == losses(again)
        assert same_weights(kept, again)


@pytest.mark.slow
def test_features_are_not_cached_if_a_second_model_has_its_own_tower(workspace):
    options = {"stage": "dpo", "dataset": "pairs", "finetuning_type": "lora", "max_steps": 3,
               "ref_model": workspace / "qwen2_5_vl"}  # fmt: skip
    kept = train(workspace, "two-towers", **options)
    not_kept = train(workspace, "two-towers-not-kept", image_cache="none", **options)
    assert same_weights(kept, not_kept)
    before = train(workspace, "two-towers-before", precompute_ref_log_probs=True, **options)
    assert losses(before) == pytest.approx(losses(kept), abs=2e-5)


@pytest.mark.slow
def test_trained_tower_runs_in_every_step(workspace, monkeypatch):
    options = {"freeze_vision_tower": False}
    _, once = tower_calls(monkeypatch, workspace, "tower-1", max_steps=1, **options)
    _, calls = tower_calls(monkeypatch, workspace, "tower-3", max_steps=3, **options)
    assert calls > once


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        pytest.param("the image processor", "image_processor", marks=pytest.mark.slow),
        ("the pixels of an image", "data"),
    ],
)
def test_a_run_is_not_resumed_with_other_pixels(workspace, tmp_path, capsys, changed, named):
    for name in ("qwen2_5_vl", "data"):
        shutil.copytree(workspace / name, tmp_path / name)
    options = ["train", f"model_name_or_path={tmp_path / 'qwen2_5_vl'}", "template=qwen2_vl", "dataset=answers",
             f"dataset_dir={tmp_path / 'data'}", f"output_dir={tmp_path / 'out'}", "finetuning_type=lora",
             "use_cpu=true", "save_steps=1", "plot_loss=false"]  # fmt: skip
    assert main([*options, "max_steps=1"]) == 0
    image = tmp_path / "data" / golden()["records"]["one"]["images"][0]
    with Image.open(image) as opened:
        pixels = opened.convert("RGB")
    if changed == "the image processor":
        for name in ("preprocessor_config.json", "processor_config.json"):
            file = tmp_path / "qwen2_5_vl" / name
            file.write_text(file.read_text().replace("0.48145466", "0.5"))
    else:
        pixels.putpixel((0, 0), (1, 2, 3))
        pixels.save(image)
    capsys.readouterr()
    assert main([*options, "max_steps=2"]) == 2
    assert f"{named} has changed" in capsys.readouterr().err


def test_saved_model_loads_in_transformers_with_processor_files(workspace, tmp_path):
    from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer

    adapter = train(workspace, "to-export", finetuning_type="lora", save_strategy="steps", save_steps=2)
    merged = tmp_path / "merged"
    assert main(["export", f"model_name_or_path={workspace / 'qwen2_5_vl'}", f"adapter_name_or_path={adapter}",
                 "template=qwen2_vl", f"export_dir={merged}"]) == 0  # fmt: skip
    model = AutoModelForImageTextToText.from_pretrained(merged)
    assert type(model).__name__ == "Qwen2_5_VLForConditionalGeneration"
    assert AutoImageProcessor.from_pretrained(merged, backend="pil").merge_size == 2
    for folder in (merged, adapter, adapter / "checkpoint-2"):
        for name in ("preprocessor_config.json", "processor_config.json"):
            assert (folder / name).read_bytes() == (workspace / "qwen2_5_vl" / name).read_bytes()
        chat = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What?"}]}]
        text = AutoTokenizer.from_pretrained(folder).apply_chat_template(chat, tokenize=False)
        assert "<|vision_start|><|image_pad|><|vision_end|>What?" in text
    before = image_models().build("qwen2_5_vl")[0]
    for (name, old), (_, new) in zip(before.named_parameters(), model.named_parameters(), strict=True):
        if "visual" in name:
            assert torch.equal(old, new)


def test_exported_processor_files_contain_the_limits_if_requested(workspace, tmp_path, capsys):
    from transformers import AutoImageProcessor

    command = ["export", f"model_name_or_path={workspace / 'qwen2_5_vl'}", "template=qwen2_vl"]
    assert main([*command, f"export_dir={tmp_path / 'base'}", "image_max_pixels=2000"]) == 0
    assert "without image_max_pixels (2,000). Set export_image_limits: true to write it." in capsys.readouterr().out
    limits = ["export_image_limits=true", "image_max_pixels=2000", "image_min_pixels=900"]
    assert main([*command, f"export_dir={tmp_path / 'limited'}", *limits]) == 0
    assert "The exported image processor limits an image to 2,000 pixels." in capsys.readouterr().out
    processor = AutoImageProcessor.from_pretrained(tmp_path / "limited", backend="pil")
    size = processor.size
    assert (size["shortest_edge"], size["longest_edge"]) == (900, 2000)
    with Image.new("RGB", (200, 100)) as image:
        rows, columns = processor(images=image, return_tensors="pt")["image_grid_thw"][0, 1:].tolist()
    assert rows * columns * processor.patch_size**2 <= 2000


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"image_processor_type": "Qwen2VLImageProcessor", "min_pixels": 3136, "max_pixels": 12845056,
          "size": {"min_pixels": 3136, "max_pixels": 12845056}},
         {"min_pixels": 3136, "max_pixels": 90_000, "size": {"shortest_edge": 3136, "longest_edge": 90_000}}),
        ({"image_processor_type": "Glm4vImageProcessor", "size": {"shortest_edge": 12544, "longest_edge": 9633792}},
         {"size": {"shortest_edge": 12544, "longest_edge": 90_000}}),
        ({"image_processor_type": "Qwen2VLImageProcessor", "size": {"shortest_edge": 100_000, "longest_edge": 200_000}},
         {"size": {"shortest_edge": 100_000, "longest_edge": 100_000}}),
        ({"image_processor_type": "Qwen2VLImageProcessorFast", "size": {"shortest_edge": 3136, "longest_edge": 50_000}},
         {"size": {"shortest_edge": 3136, "longest_edge": 50_000}}),
        ({"image_processor_type": "PixtralImageProcessor", "size": {"longest_edge": 1024}},
         {"size": {"longest_edge": 300}}),
        ({"image_processor_type": "SiglipImageProcessor", "size": {"height": 896, "width": 896}},
         {"size": {"height": 896, "width": 896}}),
    ],
)  # fmt: skip
@pytest.mark.parametrize("name", ["preprocessor_config.json", "processor_config.json"])
def test_image_limits_are_written_in_the_form_of_the_file(tmp_path, settings, expected, name):
    content = settings if name.startswith("pre") else {"image_processor": settings, "processor_class": "Any"}
    (tmp_path / name).write_text(json.dumps(content))
    notes = apply_image_limits(
        [tmp_path / name, tmp_path / "none"], ImageOptions(image_max_pixels=90_000), is_requested=True
    )
    found = json.loads((tmp_path / name).read_text())
    assert found.get("image_processor", found) == {**settings, **expected}
    assert len(notes) == 1
    assert ("no effect" in notes[0]) == (expected["size"] == settings["size"])


def test_gguf_export_of_vision_model_is_rejected(workspace, tmp_path, capsys):
    options = [f"model_name_or_path={workspace / 'qwen2_5_vl'}", "template=qwen2_vl", "export_format=gguf"]
    assert main(["export", *options, f"export_dir={tmp_path / 'out'}"]) == 2
    assert "mmproj" in capsys.readouterr().err


def test_truncated_image_is_reported(workspace, tmp_path, capsys):
    data = tmp_path / "data"
    data.mkdir()
    record = golden()["records"]["one"]
    image_models().write_images(data, record["images"])
    path = data / record["images"][0]
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    write_sets(data, [record])
    options = {"model_name_or_path": str(workspace / "qwen2_5_vl"), "template": "qwen2_vl", "dataset": "answers",
               "dataset_dir": str(data), "output_dir": str(tmp_path / "out"), "max_steps": 1}  # fmt: skip
    assert main(["train", *(f"{name}={value}" for name, value in options.items())]) == 2
    assert str(path.name) in capsys.readouterr().err
    assert Path(path).is_file()


@pytest.mark.parametrize(
    ("family", "options", "splits", "is_rejected"),
    [("mllama", {}, True, True), ("mllama", {"freeze_vision_tower": False}, False, True), ("mllama", {}, False, False),
     ("llava", {}, True, False), ("llava", {"freeze_vision_tower": False}, False, False)],
)  # fmt: skip
def test_only_cross_attention_is_rejected_with_several_processes(family, options, splits, is_rejected):
    chosen = RunOptions(finetuning_type="full", **options)
    model = ADAPTERS["full"](chosen, []).attach(image_models().build(family)[0])
    assert bool(list(check_processes(model, 2, splits))) is is_rejected
    assert not list(check_processes(model, 1, splits))


@pytest.mark.slow
def test_prediction_and_evaluation_commands_read_images(workspace, tmp_path):
    options = [str(workspace / "qwen2_5_vl"), "template=qwen2_vl", "eval_dataset=answers", "use_cpu=true",
             f"dataset_dir={workspace / 'data'}", "cutoff_len=512"]  # fmt: skip
    assert main(["predict", *options, "max_new_tokens=3", f"save_dir={tmp_path / 'predicted'}"]) == 0
    lines = (tmp_path / "predicted" / "generated_predictions.jsonl").read_text().splitlines()
    answers = [json.loads(line) for line in lines]
    for record, answer in zip(RECORDS, answers, strict=True):
        images = golden()["records"][record]["images"]
        assert [Path(path).name for path in answer.get("images", ())] == images
        assert answer["prompt"].count("<|image_pad|>") == len(images)
    assert main(["eval", *options, f"save_dir={tmp_path / 'evaluated'}"]) == 0
    rows = [row for row in golden()["llamafactory"] if row["family"] == "qwen2_5_vl" and not row["options"]]
    chosen = [row for row in rows if row["record"] in RECORDS]
    expected = sum(row["loss"] * row["items"] for row in chosen) / sum(row["items"] for row in chosen)
    result = json.loads((tmp_path / "evaluated" / "eval_results.json").read_text())
    assert result["eval_loss"] == pytest.approx(expected, abs=1e-4)


@pytest.mark.slow
def test_features_that_an_evaluation_computed_are_trained_on(workspace, monkeypatch):
    options = {"finetuning_type": "lora", "max_steps": 2, "eval_dataset": "answers", "eval_strategy": "steps",
               "eval_steps": 1}  # fmt: skip
    first = train(workspace, "evaluated-first", eval_on_start=True, **options)
    later, calls = tower_calls(monkeypatch, workspace, "evaluated-later", **options)
    _, without = tower_calls(monkeypatch, workspace, "not-evaluated", finetuning_type="lora", max_steps=2)
    assert losses(first) == losses(later)
    assert same_weights(first, later)
    assert calls == without


@pytest.mark.slow
@pytest.mark.parametrize("stage", representative_slow(["dpo", "kto"], 1))
def test_adapter_of_the_tower_is_trained_on_preferences(workspace, stage):
    dataset = {"dpo": "pairs", "kto": "unpaired"}[stage]
    options = {"stage": stage, "dataset": dataset, "finetuning_type": "lora", "lora_target": "all", "max_steps": 3,
               "freeze_vision_tower": False, "freeze_multi_modal_projector": False}  # fmt: skip
    folder = train(workspace, f"tower-{stage}", **options)
    adapter = weights_in(folder)
    assert max(float(weight.abs().max()) for name, weight in adapter.items() if "visual" in name and "lora_B" in name)
    before = train(workspace, f"tower-{stage}-before", precompute_ref_log_probs=True, **options)
    assert losses(folder) == pytest.approx(losses(before), abs=2e-5)


@pytest.mark.slow
def test_reference_of_badam_keeps_the_features_of_its_own_weights(workspace):
    options = {"stage": "dpo", "dataset": "pairs", "use_badam": True, "badam_switch_interval": 2, "max_steps": 8,
               "freeze_vision_tower": False, "freeze_multi_modal_projector": False, "learning_rate": 1e-2}  # fmt: skip
    folder = train(workspace, "tower-badam", **options)
    before = train(workspace, "tower-badam-before", precompute_ref_log_probs=True, **options)
    assert losses(folder) == pytest.approx(losses(before), abs=2e-5)
