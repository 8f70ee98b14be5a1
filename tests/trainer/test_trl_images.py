"""TRL's trainers with images: rows and losses of TRL, without its composed processor."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset, Features, Image, List, Value
from peft import LoraConfig
from PIL import Image as pil
from transformers import AutoModelForImageTextToText, AutoProcessor, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from burnish import (
    DPOConfig,
    DPOTrainer,
    KTOConfig,
    KTOTrainer,
    RewardConfig,
    RewardTrainer,
    SFTConfig,
    SFTTrainer,
)
from burnish.loop.types import IGNORE_INDEX
from burnish.models.images import features as image_features_module
from burnish.models.images.processor import ImageProcessor
from vision_models import golden, image_models


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Create a saved vision-language model, and the images of two records."""
    folder = tmp_path_factory.mktemp("vision")
    model, composed = image_models().build("qwen2_5_vl")
    model.save_pretrained(folder / "model")
    image_models().save_processor(composed, folder / "model")
    image_models().write_images(folder, ["p1_64x48.png", "p4_48x48.png"])
    return folder


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("BURNISH_CACHE", str(tmp_path / "cache"))


def options(kind: Any, tmp_path: Path, **more: Any) -> Any:
    return kind(
        output_dir=str(tmp_path / "out"), report_to="none", max_steps=2, per_device_train_batch_size=2,
        use_cpu=True, bf16=False, logging_steps=1, learning_rate=1e-3, **{"save_strategy": "no", **more},
    )  # fmt: skip


USER, ANSWER = {"role": "user", "content": "What is it?"}, {"role": "assistant", "content": "A wall of bricks."}


def test_sft_rows_and_loss_match_trl(folder, tmp_path):
    case = next(
        c for c in golden()["trl"] if (c["family"], c["record"], c["mode"]) == ("qwen2_5_vl", "one", "assistant")
    )
    records = {"messages": [[USER, ANSWER]] * 2, "images": [[pil.open(folder / "p1_64x48.png")]] * 2}
    args = options(SFTConfig, tmp_path, assistant_only_loss=True)
    trainer = SFTTrainer(str(folder / "model"), args=args, train_dataset=Dataset.from_dict(records))
    row = trainer.train_dataset[0]
    assert (row["input_ids"], row["labels"]) == (case["input_ids"], case["labels"])
    before = trainer.evaluate(trainer.train_dataset)["eval_loss"]
    assert before == pytest.approx(case["loss"], abs=2e-5)
    trainer.train()
    assert trainer.evaluate(trainer.train_dataset)["eval_loss"] < before


@pytest.mark.parametrize(
    ("arguments", "more", "message"),
    [
        ({"packing": True, "max_length": 64}, {}, "Packing is not supported for datasets with images"),
        ({"eval_packing": True, "max_length": 64}, {}, "Packing is not supported for datasets with images"),
        ({}, {"formatting_func": lambda record: "A wall."}, "the images of the dataset would be left out"),
    ],
    ids=["packing", "packed evaluation", "formatting"],
)
def test_arguments_that_would_leave_images_out_are_refused(folder, tmp_path, arguments, more, message):
    records = {"messages": [[USER, ANSWER]] * 2, "images": [[pil.open(folder / "p1_64x48.png")]] * 2}
    args = options(SFTConfig, tmp_path, **arguments)
    with pytest.raises(ValueError, match=message):
        SFTTrainer(str(folder / "model"), args=args, train_dataset=Dataset.from_dict(records), **more)


def in_parts(messages: list[dict[str, Any]], image: Path | None = None) -> list[dict[str, Any]]:
    """Return messages whose contents are lists of parts; the first one begins with the image."""
    parts = [[{"type": "text", "text": one["content"], "image": None}] for one in messages]
    if image is not None:
        parts[0].insert(0, {"type": "image", "text": None, "image": str(image)})
    return [{"role": one["role"], "content": own} for one, own in zip(messages, parts, strict=True)]


def record_of(kind: str, image: Path | None) -> dict[str, Any]:
    answer = in_parts([ANSWER])
    if kind == "sft":
        return {"messages": in_parts([USER, ANSWER], image)}
    pair = {"chosen": answer, "rejected": in_parts([{**ANSWER, "content": "A door."}])}
    return {"prompt": in_parts([USER], image), **pair}


@pytest.mark.parametrize(
    ("kind", "trainer", "config"), [("sft", SFTTrainer, SFTConfig), ("dpo", DPOTrainer, DPOConfig)]
)
@pytest.mark.parametrize("is_evaluation", [False, True], ids=["training", "evaluation"])
def test_images_of_later_records_are_read(folder, tmp_path, kind, trainer, config, is_evaluation):
    first, second = (record_of(kind, image) for image in (None, folder / "p1_64x48.png"))
    datasets = {"train_dataset": Dataset.from_list([first] if is_evaluation else [first, second])}
    if is_evaluation:
        datasets["eval_dataset"] = Dataset.from_list([second])
    found = trainer(str(folder / "model"), args=options(config, tmp_path), **datasets)
    rows = [*found.train_dataset, *(found.eval_dataset or ())]
    assert sorted(len(row["images"] or ()) for row in rows) == [0, 1]
    ids = [row["input_ids" if kind == "sft" else "prompt_ids"] for row in rows if row["images"]]
    assert ids[0].count(found.family.placeholder_id) == 4


def test_images_of_an_evaluation_set_with_a_column_are_read(folder, tmp_path):
    whole = {"messages": [USER, ANSWER]}
    evaluated = Dataset.from_list([{**whole, "images": [str(folder / "p1_64x48.png")]}])
    trainer = SFTTrainer(
        str(folder / "model"), args=options(SFTConfig, tmp_path), train_dataset=Dataset.from_list([whole]),
        eval_dataset=evaluated,
    )  # fmt: skip
    assert [len(row["images"]) for row in trainer.eval_dataset] == [1]
    text = SFTTrainer(
        str(folder / "model"), args=options(SFTConfig, tmp_path), train_dataset=Dataset.from_list([whole])
    )
    with pytest.raises(ValueError, match='eval dataset has the column "images"'):
        text.evaluate(evaluated)


def test_images_of_later_records_are_refused_for_a_text_model(folder, tmp_path):
    records = Dataset.from_list([record_of("sft", None), record_of("sft", folder / "p1_64x48.png")])
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), num_key_value_heads=2, **sizes))
    with pytest.raises(ValueError, match=r"record 2.*\n?.*contains an image or a video"):
        SFTTrainer(model, args=options(SFTConfig, tmp_path), train_dataset=records, processing_class=tokenizer)


def test_images_of_later_records_of_a_stream_are_refused(folder, tmp_path):
    records = [record_of("sft", None), record_of("sft", folder / "p1_64x48.png")]
    stream = Dataset.from_list(records).to_iterable_dataset()
    trainer = SFTTrainer(str(folder / "model"), args=options(SFTConfig, tmp_path), train_dataset=stream)
    with pytest.raises(ValueError, match=r"record 2.*\n?.*contains an image or a video"):
        list(trainer.train_dataset)


def test_encoded_images_of_an_image_feature_are_not_decoded_again(folder, tmp_path):
    features = Features({"prompt": Value("string"), "images": List(Image())})
    records = {"prompt": ["x", "y"], "images": [[str(folder / "p1_64x48.png")], [str(folder / "p4_48x48.png")]]}
    whole = Dataset.from_dict(records, features=features).map(
        lambda one: {"prompt": [{"role": "user", "content": one["prompt"]}], "completion": [ANSWER]}
    )
    trainer = SFTTrainer(str(folder / "model"), args=options(SFTConfig, tmp_path), train_dataset=whole)
    paths = sorted(row["images"][0]["path"] for row in trainer.train_dataset)
    assert [Path(path).read_bytes()[:4] for path in paths] == [b"\x89PNG"] * 2
    placeholder = trainer.family.placeholder_id
    assert all(placeholder not in row["labels"] for row in trainer.train_dataset)


def test_preference_images_are_in_the_prompt(folder, tmp_path):
    image, other = pil.open(folder / "p1_64x48.png"), {"role": "assistant", "content": "A door."}
    pairs = Dataset.from_dict(
        {"prompt": [[USER]] * 2, "chosen": [[ANSWER]] * 2, "rejected": [[other]] * 2, "images": [[image]] * 2}
    )
    trainer = DPOTrainer(str(folder / "model"), args=options(DPOConfig, tmp_path), train_dataset=pairs)
    trainer.train()
    logged = [one["loss"] for one in trainer.state.log_history if "loss" in one]
    assert logged[0] == pytest.approx(0.6931, abs=1e-3)
    assert logged[1] < logged[0]
    second = DPOTrainer(
        str(folder / "model"), ref_model=AutoModelForImageTextToText.from_pretrained(folder / "model"),
        args=options(DPOConfig, tmp_path), train_dataset=pairs,
    )  # fmt: skip
    second.train()
    assert [one["loss"] for one in second.state.log_history if "loss" in one] == pytest.approx(logged, abs=1e-4)
    unpaired = Dataset.from_dict(
        {"prompt": [[USER]] * 2, "completion": [[ANSWER], [other]], "label": [True, False], "images": [[image]] * 2}
    )
    KTOTrainer(str(folder / "model"), args=options(KTOConfig, tmp_path), train_dataset=unpaired).train()


def test_training_all_tokens_excludes_placeholders_and_reports_it(folder, tmp_path, caplog):
    records = {"messages": [[USER, ANSWER]] * 2, "images": [[pil.open(folder / "p1_64x48.png")]] * 2}
    trainer = SFTTrainer(
        str(folder / "model"), args=options(SFTConfig, tmp_path), train_dataset=Dataset.from_dict(records)
    )
    row = trainer.train_dataset[0]
    unlearned = {token for token, label in zip(row["input_ids"], row["labels"], strict=True) if label == IGNORE_INDEX}
    assert unlearned == {trainer.family.placeholder_id}


def records_of(folder: Path) -> Dataset:
    images = [[str(folder / name)] for name in ("p1_64x48.png", "p4_48x48.png")]
    return Dataset.from_dict({"messages": [[USER, ANSWER]] * 2, "images": images})


def test_image_is_decoded_once_and_a_frozen_tower_runs_once(folder, tmp_path, monkeypatch):
    decoded, towers = [], []
    tensors, features = ImageProcessor.tensors, image_features_module.image_features
    monkeypatch.setattr(ImageProcessor, "tensors", lambda *given: decoded.append(1) or tensors(*given))
    monkeypatch.setattr(image_features_module, "image_features", lambda *given: towers.append(1) or features(*given))
    results = []
    for number, frozen in enumerate((True, False)):
        model = AutoModelForImageTextToText.from_pretrained(folder / "model")
        if frozen:
            model.model.visual.requires_grad_(False)
        args = options(SFTConfig, tmp_path / str(number), max_length=None)
        tokenizer = AutoTokenizer.from_pretrained(folder / "model")
        trainer = SFTTrainer(model, args=args, train_dataset=records_of(folder), processing_class=tokenizer)
        decoded.clear()
        towers.clear()
        trainer.train()
        results.append((len(decoded), len(towers)))
    assert results == [(2, 2), (2, 2)]  # a trained tower computes both images in one call per step


def test_override_gets_the_tensors_of_images(folder, tmp_path):
    seen = []

    class CustomTrainer(SFTTrainer):
        def compute_loss(self, model, inputs, *args, **kwargs):
            seen.append(inputs["pixel_values"].shape)
            return super().compute_loss(model, inputs, *args, **kwargs)

    CustomTrainer(str(folder / "model"), args=options(SFTConfig, tmp_path), train_dataset=records_of(folder)).train()
    assert len(seen) == 2


@pytest.fixture(scope="module")
def llava(tmp_path_factory):
    """Create a saved LLaVA model, whose processor does not need torchvision, and an image."""
    folder = tmp_path_factory.mktemp("llava")
    model, composed = image_models().build("llava")
    model.save_pretrained(folder / "model")
    image_models().save_processor(composed, folder / "model")
    image_models().write_images(folder, ["p1_64x48.png"])
    return folder


def conversations(folder: Path, image: str = "p1_64x48.png") -> Dataset:
    """Return two conversations with content parts and an ``Image`` feature, like llava-instruct-mix-vsft."""
    question = {"role": "user", "content": [part("text", "What is it?"), part("image", None)]}
    answer = {"role": "assistant", "content": [part("text", "A wall of bricks.")]}
    records = {"messages": [[question, answer]] * 2, "images": [[str(folder / image)]] * 2}
    return Dataset.from_dict(records).cast_column("images", List(Image()))


def part(kind: str, text: str | None) -> dict[str, Any]:
    return {"index": None, "text": text, "type": kind}


def collate_with(processor: Any) -> Any:
    """Return the collator of TRL's examples, which converts conversations and images to padded tensors."""

    def collate(examples: list[dict[str, Any]]) -> Any:
        texts = [processor.apply_chat_template(example["messages"], tokenize=False) for example in examples]
        batch = processor(text=texts, images=[example["images"][0] for example in examples], return_tensors="pt")
        return batch | {"labels": batch["input_ids"].clone()}

    return collate


@pytest.mark.parametrize("keeps_columns", [True, False])
def test_collator_of_a_script_gets_the_records_with_images(llava, tmp_path, keeps_columns):
    processor = AutoProcessor.from_pretrained(llava / "model")
    args = options(SFTConfig, tmp_path, remove_unused_columns=not keeps_columns)
    data = conversations(llava)
    trainer = SFTTrainer(
        str(llava / "model"), args=args, train_dataset=data, eval_dataset=data, processing_class=processor,
        data_collator=collate_with(processor),
    )  # fmt: skip
    assert trainer.train_dataset.column_names == ["messages", "images"]
    trainer.train()
    assert trainer.evaluate()["eval_loss"] > 0


def test_dataset_with_images_is_prepared_unless_the_script_collates_it(llava, tmp_path):
    args = options(SFTConfig, tmp_path, dataset_kwargs={"skip_prepare_dataset": True})
    trainer = SFTTrainer(str(llava / "model"), args=args, train_dataset=conversations(llava))
    assert {"input_ids", "labels", "images"} <= {*trainer.train_dataset.column_names}
    trainer.train()


OWN_TEMPLATE = (
    "{% for message in messages %}[{{ message['role'] }}] {% for item in message['content'] %}"
    "{{ '<image>' if item['type'] == 'image' else item['text'] }}{% endfor %} {% endfor %}"
)


def test_chat_template_of_the_processor_is_used(llava, tmp_path):
    processor = AutoProcessor.from_pretrained(llava / "model")
    processor.chat_template = OWN_TEMPLATE
    args = options(SFTConfig, tmp_path)
    trainer = SFTTrainer(
        str(llava / "model"), args=args, train_dataset=conversations(llava), processing_class=processor
    )
    text = processor.tokenizer.decode(trainer.train_dataset[0]["input_ids"])
    assert "[user] What is it?" in text
    assert "[assistant] A wall of bricks." in text
    image = pil.open(llava / "p1_64x48.png")
    prompt = [{"role": "user", "content": "What is it?"}]
    pairs = Dataset.from_dict(
        {
            "prompt": [prompt],
            "chosen": [[ANSWER]],
            "rejected": [[{**ANSWER, "content": "A door."}]],
            "images": [[image]],
        }
    )
    trainer = DPOTrainer(
        str(llava / "model"), args=options(DPOConfig, tmp_path), train_dataset=pairs, processing_class=processor
    )
    assert "[user] " in processor.tokenizer.decode(trainer.train_dataset[0]["prompt_ids"])


def test_chat_template_file_replaces_that_of_the_processor(llava, tmp_path):
    (tmp_path / "own.jinja").write_text(OWN_TEMPLATE)
    processor = AutoProcessor.from_pretrained(llava / "model")
    args = options(SFTConfig, tmp_path, chat_template_path=str(tmp_path / "own.jinja"))
    trainer = SFTTrainer(
        str(llava / "model"), args=args, train_dataset=conversations(llava), processing_class=processor
    )
    assert "[user] " in processor.tokenizer.decode(trainer.train_dataset[0]["input_ids"])


@pytest.mark.parametrize("adapter", [False, True])
def test_saved_model_has_the_image_processor(folder, tmp_path, adapter):
    args = options(SFTConfig, tmp_path, save_strategy="steps", save_steps=2)
    lora = LoraConfig(target_modules=["q_proj"]) if adapter else None
    trainer = SFTTrainer(str(folder / "model"), args=args, train_dataset=records_of(folder), peft_config=lora)
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    for saved in (tmp_path / "saved", tmp_path / "out" / "checkpoint-2"):
        for name in ("preprocessor_config.json", "processor_config.json"):
            assert (saved / name).read_bytes() == (folder / "model" / name).read_bytes()


def test_padding_of_gemma_is_not_counted(tmp_path):
    model, composed = image_models().build("gemma3")
    model.save_pretrained(tmp_path / "model")
    image_models().save_processor(composed, tmp_path / "model")
    image_models().write_images(tmp_path, ["p1_64x48.png"])
    short = [USER, {"role": "assistant", "content": "A wall."}]
    records = {"messages": [[USER, ANSWER], short], "images": [[str(tmp_path / "p1_64x48.png")]] * 2}
    args = options(SFTConfig, tmp_path)
    trainer = SFTTrainer(str(tmp_path / "model"), args=args, train_dataset=Dataset.from_dict(records))
    trainer.train()
    lengths = [len(row["input_ids"]) for row in trainer.train_dataset]
    assert lengths[0] != lengths[1]
    counted = [entry["num_tokens"] for entry in trainer.state.log_history if "num_tokens" in entry]
    assert counted[0] == sum(lengths)


def test_model_is_saved_after_its_folder_was_removed(llava, tmp_path):
    shutil.copytree(llava / "model", tmp_path / "model")
    args = options(SFTConfig, tmp_path, max_length=None)
    trainer = SFTTrainer(str(tmp_path / "model"), args=args, train_dataset=conversations(llava))
    shutil.rmtree(tmp_path / "model")
    trainer.save_model(str(tmp_path / "saved"))
    assert (tmp_path / "saved" / "model.safetensors").exists()


OTHER = {"role": "assistant", "content": "A door."}


def padded_collator(processor: Any, has_labels: bool, seen: list[Any]) -> Any:
    """Return a collator for TRL's padded batches with images; chosen responses come before rejected ones."""

    def collate(examples: list[dict[str, Any]]) -> dict[str, Any]:
        seen.extend(examples)
        sides = ["completion"] if has_labels else ["chosen", "rejected"]
        batch = sequences_of([example[side] for side in sides for example in examples], examples * len(sides))
        if not has_labels:
            return batch
        shifted_completions = [example["completion"] for example in examples[-1:] + examples[:-1]]
        text = ("input_ids", "attention_mask", "completion_mask")
        mismatched = sequences_of(shifted_completions, examples)
        label = torch.tensor([example["label"] for example in examples])
        return {**batch, **{f"KL_{name}": mismatched[name] for name in text}, "label": label}

    def sequences_of(answers: list[Any], examples: list[dict[str, Any]]) -> dict[str, Any]:
        prompts = [with_parts(example["prompt"], len(example["images"])) for example in examples]
        prompt_texts = [render(prompt, add_generation_prompt=True) for prompt in prompts]
        texts = [render(prompt + answer) for prompt, answer in zip(prompts, answers, strict=True)]
        images = [image for example in examples for image in example["images"]]
        arguments = {"padding": True, "return_tensors": "pt", "add_special_tokens": False}
        batch = dict(processor(text=texts, images=images, **arguments))
        mask = batch["attention_mask"].clone()
        for line, begin, example in zip(mask, prompt_texts, examples, strict=True):
            ids = processor(text=[begin], images=example["images"], **arguments)["input_ids"]
            line[: ids.shape[1]] = 0
        return {**batch, "completion_mask": mask}

    def render(chat: list[Any], **more: Any) -> str:
        return str(processor.apply_chat_template(chat, tokenize=False, **more))

    def with_parts(prompt: list[Any], count: int) -> list[Any]:
        parts = [{"type": "image"}] * count + [{"type": "text", "text": prompt[0]["content"]}]
        return [{"role": "user", "content": parts}]

    return collate


def pairs_with_images(folder: Path) -> Dataset:
    """Return two pairs, one with one image and one with two."""
    image_models().write_images(folder, ["p4_48x48.png", "p7_40x30.png"])
    first, *rest = [pil.open(folder / name) for name in ("p1_64x48.png", "p4_48x48.png", "p7_40x30.png")]
    return Dataset.from_dict(
        {"prompt": [[USER]] * 2, "chosen": [[ANSWER]] * 2, "rejected": [[OTHER]] * 2, "images": [[first], rest]}
    )


def labelled_examples_with_images(folder: Path) -> Dataset:
    dataset = pairs_with_images(folder).rename_column("chosen", "completion").remove_columns("rejected")
    second = {**dataset[1], "completion": [OTHER]}
    return Dataset.from_list(
        [{**dataset[0], "label": True}, {**second, "label": False}],
        features=Features({**dataset.features, "label": Value("bool")}),
    )


class OverridingTrainer(DPOTrainer):
    """A trainer with an override, for which batches are padded."""

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return super().compute_loss(*args, **kwargs)


@pytest.mark.sample(1)
@pytest.mark.parametrize("keeps_columns", [True, False])
@pytest.mark.parametrize(
    ("kind", "config"), [(DPOTrainer, DPOConfig), (KTOTrainer, KTOConfig), (OverridingTrainer, DPOConfig)]
)
def test_collator_of_a_preference_script_gets_the_records_with_images(llava, tmp_path, kind, config, keeps_columns):
    processor, seen = AutoProcessor.from_pretrained(llava / "model"), list[Any]()
    has_labels = kind is KTOTrainer
    dataset = labelled_examples_with_images(llava) if has_labels else pairs_with_images(llava)
    more = {"remove_unused_columns": not keeps_columns, "train_sampling_strategy": "sequential"}

    def losses(kind: Any, **given: Any) -> list[float]:
        args = options(config, tmp_path, **more)
        trainer = kind(
            str(llava / "model"), args=args, train_dataset=dataset, eval_dataset=dataset, processing_class=processor,
            **given,
        )  # fmt: skip
        if given:
            assert trainer.train_dataset is dataset
        trainer.train()
        logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        return [*logged, trainer.evaluate()["eval_loss"], trainer.evaluate(dataset)["eval_loss"]]

    its = losses(kind, data_collator=padded_collator(processor, has_labels, seen))
    assert [*seen[0]] == dataset.column_names
    assert its[1] != its[0]
    assert its == pytest.approx(losses(DPOTrainer if kind is OverridingTrainer else kind), abs=1e-5)


def test_placeholders_without_tensors_of_images_are_refused(llava, tmp_path):
    processor = AutoProcessor.from_pretrained(llava / "model")
    collate = padded_collator(processor, False, [])
    trainer = DPOTrainer(
        str(llava / "model"), args=options(DPOConfig, tmp_path), train_dataset=pairs_with_images(llava),
        processing_class=processor,
        data_collator=lambda rows: {name: v for name, v in collate(rows).items() if name != "pixel_values"},
    )  # fmt: skip
    with pytest.raises(ValueError, match="Received: placeholders without tensors of images"):
        trainer.train()


@pytest.mark.parametrize(
    ("kind", "config", "more", "message"),
    [
        (DPOTrainer, DPOConfig, {"precompute_ref_log_probs": True}, "Set `precompute_ref_log_probs=False`"),
        (KTOTrainer, KTOConfig, {"kl_pairing": "group"}, "`kl_pairing"),
        (KTOTrainer, KTOConfig, {}, "must have the columns `completion` and `label`"),
    ],
)
def test_arguments_that_need_prepared_rows_are_refused_with_a_collator(llava, tmp_path, kind, config, more, message):
    processor = AutoProcessor.from_pretrained(llava / "model")
    with pytest.raises(ValueError, match=message):
        kind(
            str(llava / "model"), args=options(config, tmp_path, **more), train_dataset=pairs_with_images(llava),
            processing_class=processor, data_collator=padded_collator(processor, False, []),
        )  # fmt: skip


@pytest.mark.parametrize(
    ("images", "content", "message"),
    [
        (["no.png"], "Hi", "Use absolute paths, or paths relative to the working directory."),
        (["a.png"], [{"type": "image"}, {"type": "image"}, {"type": "text", "text": "Hi"}], '2 parts of type "image"'),
    ],
)
def test_errors_about_images_of_a_script_name_no_option_of_yaml(
    folder, tmp_path, monkeypatch, images, content, message
):
    monkeypatch.chdir(tmp_path)
    pil.new("RGB", (30, 30)).save("a.png")
    messages = [{"role": "user", "content": content}, {"role": "assistant", "content": "Ho"}]
    messages = [{**one, "content": [{"type": "text", "text": one["content"]}]} if isinstance(content, list) and
                isinstance(one["content"], str) else one for one in messages]  # fmt: skip
    rows = Dataset.from_list([{"messages": messages, "images": images}])
    with pytest.raises(ValueError, match=message) as raised:
        SFTTrainer(str(folder / "model"), args=options(SFTConfig, tmp_path), train_dataset=rows)
    assert "media_dir" not in str(raised.value)


def test_vision_model_without_classifier_is_no_reward_model(folder, tmp_path):
    rows = Dataset.from_list([{"prompt": "a", "chosen": "b", "rejected": "c"}])
    with pytest.raises(ValueError, match="no sequence classifier for models of type qwen2_5_vl"):
        RewardTrainer(str(folder / "model"), args=options(RewardConfig, tmp_path), train_dataset=rows)
