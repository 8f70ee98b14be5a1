"""Rollouts of prompts with images: what reward functions receive, log-probabilities, resume, and errors."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from datasets import Dataset, Features, Image, Value
from PIL import Image as pil

from burnish import GRPOTrainer, RLOOTrainer, UserError
from burnish.config.options import RawValue
from burnish.parallel.create import create_parallel
from burnish.rollouts.generation import Generator
from burnish.run.build import build_loop, train_run
from burnish.run.plan.plan import plan
from burnish.run.prepare import prepare
from image_runs import OTHERS, TEMPLATES, save_model, write_sets
from representative import representative_slow
from run_outputs import history, same_weights
from vision_models import golden, image_models

REWARDS = """
import json

def seen(prompts, completions, images, **kwargs):
    assert len(images) == len(prompts) == len(completions)
    with open(__file__ + ".seen", "w") as file:
        json.dump([[images[at], prompts[at]] for at in range(len(prompts))], file)
    return [float(len(set(str(each)))) for each in completions]
"""
RECORDS = ("one", "two", "text")


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("BURNISH_CACHE", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    """A folder with models, images and a dataset of prompts with one, two and no images."""
    folder = tmp_path_factory.mktemp("rollout-images")
    records = [golden()["records"][name] for name in RECORDS]
    image_models().write_images(folder / "data", {name for record in records for name in record["images"]})
    write_sets(folder / "data", records)
    (folder / "my_rewards.py").write_text(REWARDS)
    return folder


def options(workspace, out, family="qwen2_5_vl", **changes):
    if not (workspace / family).exists():
        save_model(workspace, family)
    return {
        "model_name_or_path": str(workspace / family), "template": (TEMPLATES | OTHERS)[family], "stage": "grpo",
        "finetuning_type": "full", "dataset_dir": str(workspace / "data"), "dataset": "answers", "cutoff_len": 512,
        "output_dir": str(out), "reward_funcs": [f"{workspace}/my_rewards.py:seen"], "num_generations": 2,
        "max_completion_length": 6, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 3,
        "max_steps": 2, "logging_steps": 1, "learning_rate": 1e-3, "use_cpu": True, "save_strategy": "no",
        "plot_loss": False, "report_to": "none", "lr_scheduler_type": "constant", **changes,
    }  # fmt: skip


def planned(values):
    return plan({name: RawValue(value, "test") for name, value in values.items() if value is not None})


def train(values):
    return train_run(planned(values)).folder


def test_reward_functions_receive_paths_and_parts(workspace, tmp_path):
    run = train(options(workspace, tmp_path))
    found = json.loads((workspace / "my_rewards.py.seen").read_text())
    assert len(found) == 6
    for paths, prompt in found:
        contents = [message["content"] for message in prompt]
        parts = [part for content in contents if isinstance(content, list) for part in content]
        assert sum(part["type"] == "image" for part in parts) == len(paths)
        assert all(path.startswith(str(workspace)) for path in paths)
    assert sorted(len(paths) for paths, _ in found) == [0, 0, 1, 1, 2, 2]
    log = [entry for entry in history(run) if "reward" in entry]
    assert len(log) == 2
    assert all(entry["grad_norm"] > 0 for entry in log)
    lines = [json.loads(line) for line in (run / "completions.jsonl").read_text().splitlines()]
    assert max(line["prompt"].count("<|image_pad|>") for line in lines) == 2  # one mark per image


@pytest.mark.sample(2)
@pytest.mark.parametrize("family", representative_slow(["qwen2_5_vl", "paligemma", "gemma3", "llava", "internvl"], 2))
@pytest.mark.parametrize("padding_free", [True, False])
def test_sampled_and_trained_log_probabilities_agree(workspace, tmp_path, monkeypatch, family, padding_free):
    # With a filter, the engine returns log-probabilities of its draws; with top_k above the vocabulary they are the
    # policy's, computed by another path: chunks of the prompt, cached keys and values, one token at a time.
    sampling = Generator.sampling
    monkeypatch.setattr(Generator, "sampling", lambda *args: replace(sampling(*args), bias={}))
    values = options(workspace, tmp_path, family, top_k=10**6, bf16=False, padding_free=padding_free, max_steps=1)
    log = next(entry for entry in history(train(values)) if "reward" in entry)
    assert log["sampling/logp_difference"] < 1e-5


def test_reward_functions_receive_images_of_parts_if_the_column_is_null(workspace, tmp_path):
    source = {"url": str(workspace / "data" / golden()["records"]["one"]["images"][0])}
    content = [{"type": "image_url", "image_url": source}, {"type": "text", "text": "Describe"}]
    records = [{"messages": [{"role": "user", "content": content}], "images": None}] * 3
    (tmp_path / "parts.json").write_text(json.dumps(records))
    columns = {"messages": "messages", "images": "images"}
    entry = {"file_name": "parts.json", "formatting": "openai", "columns": columns}
    (tmp_path / "dataset_info.json").write_text(json.dumps({"parts": entry}))
    train(options(workspace, tmp_path / "out", dataset_dir=str(tmp_path), dataset="parts", max_steps=1))
    found = json.loads((workspace / "my_rewards.py.seen").read_text())
    assert [paths for paths, _ in found] == [[source["url"]]] * 6


def test_completions_contain_no_placeholder(workspace, tmp_path):
    values = planned(options(workspace, tmp_path))
    prepared = prepare(values)
    loop = build_loop(values, prepared, create_parallel(values.options), None)
    head = loop.model.model.get_output_embeddings()
    placeholder = prepared.family.placeholder_id
    with torch.no_grad():
        head.weight[placeholder] += 50 * head.weight.norm(dim=1).mean()
    generator = loop.objective.generator(loop.model, loop.parallel)
    assert generator.sampling().bias[placeholder] == -float("inf")
    loop.train()


def test_prefetched_images_of_groups_that_are_not_trained_are_released(workspace, tmp_path):
    (workspace / "constant.py").write_text("def constant(completions, **_):\n    return [1.0] * len(completions)\n")
    more = {"drop_zero_variance_groups": "drop", "reward_funcs": [f"{workspace}/constant.py:constant"]}
    values = planned(options(workspace, tmp_path, **more))
    loop = build_loop(values, prepare(values), create_parallel(values.options), None)
    loop.train()
    assert loop.objective.collate_samples.images.prepare._in_progress == {}


def test_run_resumed_inside_a_generation_gives_the_same_weights(workspace, tmp_path):
    more = {"num_iterations": 2, "max_steps": 4, "save_strategy": "steps", "save_steps": 1}
    whole = train(options(workspace, tmp_path / "whole", **more))
    part = tmp_path / "part"
    shutil.copytree(whole / "checkpoint-1", part / "checkpoint-1")
    assert same_weights(train(options(workspace, part, **more, resume_from_checkpoint=True)), whole)


@pytest.mark.sample(1)
@pytest.mark.parametrize("stage", ["rloo", "ppo", "online"])
def test_other_stages_train_on_images(workspace, tmp_path, stage):
    of_stage = {"stage": "dpo", "online": True} if stage == "online" else {"stage": stage}
    count = 1 if stage == "ppo" else 2
    run = train(options(workspace, tmp_path, **of_stage, num_generations=count, max_steps=1))
    assert next(entry for entry in history(run) if "loss" in entry)["grad_norm"] > 0


def test_prompts_begin_the_rows_of_supervised_fine_tuning(workspace, tmp_path):
    prompts = prepare(planned(options(workspace, tmp_path)))
    answers = prepare(planned(options(workspace, tmp_path, stage="sft")))
    for prompt, row in zip(prompts.rows, answers.rows, strict=True):
        ids = list(prompt["prompt_input_ids"])
        assert list(row["input_ids"])[: len(ids)] == ids
        assert prompt.get("images") == row.get("images")


def test_prompt_that_is_too_long_is_dropped(workspace, tmp_path):
    dropped = prepare(planned(options(workspace, tmp_path, cutoff_len=42)))
    assert len(dropped.rows) == 2
    assert sum(count for reason, count in dropped.stats if reason.kind == "dropped") == 1


def test_images_are_shrunk_until_the_prompt_fits(workspace, tmp_path):
    more = {"image_min_pixels": 28 * 28 * 64, "image_max_pixels": 28 * 28 * 64, "cutoff_len": 50}  # 43, 61, 32 tokens
    assert len(prepare(planned(options(workspace, tmp_path, **more))).rows) == 2
    shrunk = prepare(planned(options(workspace, tmp_path, **more, image_fit="shrink"))).rows
    assert len(shrunk) == 3
    assert max(len(row["prompt_input_ids"]) for row in shrunk) <= 50


def test_reward_models_refuse_images(workspace, tmp_path):
    values = options(workspace, tmp_path, reward_model="http://localhost:1/scores", reward_model_type="api")
    with pytest.raises(UserError, match="prompts have images"):
        prepare(planned(values))


# --- TRL's trainers ---------------------------------------------------------------------------------------------------


def image_prompts(column, count=4):
    images = [pil.new("RGB", (40 + 10 * at, 60), (20 * at, 50, 90)) for at in range(count)]
    prompts = [[{"role": "user", "content": f"Describe {at}"}] for at in range(count)]
    values = images if column == "image" else [[image] for image in images]
    return Dataset.from_dict({"prompt": prompts, column: values, "number": list(range(count))})


def trainer_of(workspace, folder, rewards, dataset, kind=GRPOTrainer, family="qwen2_5_vl", **arguments):
    if not (workspace / family).exists():
        save_model(workspace, family)
    args = kind.config_class(
        str(folder), use_cpu=True, per_device_train_batch_size=4, num_generations=2, max_completion_length=5,
        max_steps=2, logging_steps=1, report_to="none", save_strategy="no", disable_tqdm=True, bf16=False,
        learning_rate=1e-3,
    )  # fmt: skip
    return kind(str(workspace / family), rewards, args, dataset, **arguments)


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", [GRPOTrainer, RLOOTrainer])
@pytest.mark.parametrize("column", ["image", "images"])
def test_reward_functions_of_a_trainer_receive_pillow_images(workspace, tmp_path, kind, column):
    found = []

    def rewards(prompts, completions, number, **columns):
        found.extend(zip(number, prompts, columns[column], strict=True))
        return [float(len(set(str(one)))) for one in completions]

    dataset = image_prompts(column)
    trainer = trainer_of(workspace, tmp_path, rewards, dataset, kind)
    trainer.train()
    assert found
    for number, prompt, images in found:
        (image,) = images if column == "images" else [images]
        assert image.size == (40 + 10 * number, 60)
        assert getattr(image, "fp", None) is None  # no file stays open
        assert [part["type"] for part in prompt[0]["content"]] == ["image", "text"]
    assert any(entry["grad_norm"] > 0 for entry in trainer.state.log_history if "grad_norm" in entry)
    assert "eval_reward" in trainer.evaluate(dataset)


@pytest.mark.parametrize("arguments", [{"tools": [len]}, {"rollout_func": lambda prompts, trainer: {}}])
def test_tools_and_rollout_functions_refuse_images(workspace, tmp_path, arguments):
    if "tools" in arguments:

        def size(text: str) -> int:
            """Count.

            Args:
                text: the text.
            """
            return len(text)

        arguments = {"tools": [size]}
    with pytest.raises(UserError, match="cannot be used with images"):
        trainer_of(workspace, tmp_path, lambda completions, **_: [0.0] * len(completions), image_prompts("image"),
                   **arguments)  # fmt: skip


def test_images_after_a_first_record_without_them_are_refused(workspace, tmp_path):
    records = [{"prompt": [{"role": "user", "content": "Hello"}]}]
    records.append({"prompt": records[0]["prompt"], "image": pil.new("RGB", (40, 60))})
    with pytest.raises(UserError, match="record 2: it contains images"):
        trainer_of(workspace, tmp_path, lambda completions, **_: [0.0] * len(completions), records)


@pytest.mark.parametrize("record", [
    {"prompt": "Describe", "image": pil.new("RGB", (40, 60))},
    {"prompt": [{"role": "user", "content": "Describe"}], "image": pil.new("RGB", (40, 60)),
     "images": [pil.new("RGB", (40, 60))]},
])  # fmt: skip
@pytest.mark.parametrize("kind", [list, Dataset.from_list])
def test_images_of_a_text_prompt_and_of_two_columns_are_refused(workspace, tmp_path, record, kind):
    with pytest.raises(UserError, match="record 1"):
        trainer_of(workspace, tmp_path, lambda completions, **_: [0.0] * len(completions), kind([record] * 4))


def test_prompts_of_reward_functions_do_not_contain_images(workspace, tmp_path):
    found = []

    def rewards(prompts, completions, images, **_):
        found.extend(zip(prompts, images, strict=True))
        return [float(len(set(str(one)))) for one in completions]

    image = pil.new("RGB", (40, 60))
    content = [{"type": "image", "image": image}, {"type": "text", "text": "Describe"}]
    trainer_of(workspace, tmp_path, rewards, [{"prompt": [{"role": "user", "content": content}]}] * 4).train()
    assert found
    for prompt, (seen,) in found:
        assert prompt[0]["content"] == [{"type": "image"}, {"type": "text", "text": "Describe"}]
        assert seen.size == image.size


@pytest.mark.sample(2)
@pytest.mark.parametrize("mode", ["LA", "CMYK", "F", "I"])
def test_pillow_images_of_other_modes_can_be_used(workspace, tmp_path, mode):
    sizes = []

    def rewards(completions, image, **_):
        sizes.extend(one.size for one in image)
        return [float(len(set(str(one)))) for one in completions]

    records = [{"prompt": [{"role": "user", "content": "Describe"}], "image": pil.new(mode, (40, 60))}] * 4
    trainer_of(workspace, tmp_path, rewards, records).train()
    assert set(sizes) == {(40, 60)}


def test_placeholders_in_text_prompts_are_refused(workspace, tmp_path):
    image = {"prompt": [{"role": "user", "content": "Describe"}], "image": pil.new("RGB", (40, 60))}
    with pytest.raises(UserError, match="record 2"):
        trainer_of(workspace, tmp_path, lambda completions, **_: [0.0] * len(completions),
                   [image, {"prompt": "Describe <|image_pad|>"}])  # fmt: skip


@pytest.mark.parametrize("has_images", [True, False])
@pytest.mark.parametrize("is_dataset", [True, False])
def test_reward_functions_receive_pillow_images_of_further_columns(workspace, tmp_path, has_images, is_dataset):
    found = []

    def rewards(completions, reference_image, others, **_):
        found.extend(zip(reference_image, others, strict=True))
        return [float(len(set(str(one)))) for one in completions]

    pixels = [pil.new("RGB", (30 + at, 20)) for at in range(4)]
    prompt = [{"role": "user", "content": "Describe"}]
    own = {"image": pil.new("RGB", (40, 60))} if has_images else {}
    records = [
        {"prompt": prompt, **own, "reference_image": one, "others": {"several": [one, one], "name": "a"}}
        for one in pixels
    ]
    dataset = records
    if is_dataset:
        features = {"reference_image": Image(), "others": {"several": [Image()], "name": Value("string")}}
        text = {"prompt": [{"role": Value("string"), "content": Value("string")}]}
        images = {"image": Image()} if has_images else {}
        dataset = Dataset.from_list(records, features=Features({**text, **images, **features}))
    trainer_of(workspace, tmp_path, rewards, dataset).train()
    assert found
    for image, others in found:
        assert image.height == 20
        assert [one.size for one in others["several"]] == [image.size] * 2
        assert others["name"] == "a"
