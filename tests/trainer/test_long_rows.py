"""Rows longer than the position embeddings of a model are rejected before training, with a remedy."""

import warnings
from pathlib import Path

import pytest
import transformers
from datasets import Dataset, disable_progress_bars
from peft import LoraConfig, get_peft_model
from tests.helpers.tiny_shapes import tiny
from transformers import AutoTokenizer

import burnish
from burnish.config.errors import UserError
from burnish.data.sets.trl import trl_layout
from burnish.data.stats import DataStats
from burnish.trainer.inspection import num_positions
from burnish.trainer.trl.prepared import EncodeRecords
from burnish.utils.library_warnings import hide_library_warnings

disable_progress_bars()
DEMO = Path(burnish.__file__).parent / "demo" / "model"
POSITIONS = 24
PAIRS = [{"prompt": f"Add {n}. ", "chosen": "ten " * (12 + n), "rejected": "no"} for n in range(4)]
TEXTS = [{"prompt": row["prompt"], "completion": row["chosen"]} for row in PAIRS]
RATED = [{**row, "label": n % 2 == 0} for n, row in enumerate(TEXTS)]
SHORT = [{"prompt": "Hi ", "completion": "a"}] * 4


def rate_length(completions, **columns):
    return [float(len(text)) for text in completions]


def gpt2(**changes):
    return tiny("gpt2", n_positions=POSITIONS, vocab_size=326, **changes)


def make(method, folder, rows, evals=None, **options):
    fixed = {"use_cpu": True, "bf16": False, "disable_tqdm": True, "save_strategy": "no", "max_steps": 1,
             "report_to": "none", "gradient_checkpointing": False}  # fmt: skip
    arguments = getattr(burnish, f"{method}Config")(str(folder), **fixed, **options)
    return getattr(burnish, f"{method}Trainer")(
        model=gpt2(), args=arguments, train_dataset=Dataset.from_list(rows),
        eval_dataset=evals and Dataset.from_list(evals), processing_class=AutoTokenizer.from_pretrained(DEMO),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("method", "rows", "options"),
    [
        ("SFT", TEXTS, {}), ("SFT", TEXTS, {"packing": True, "max_length": 64}), ("DPO", PAIRS, {}),
        ("KTO", RATED, {}), ("Reward", PAIRS, {}), ("ORPO", PAIRS, {}), ("CPO", PAIRS, {}),
    ],
    ids=["SFT", "packed", "DPO", "KTO", "Reward", "ORPO", "CPO"],
)  # fmt: skip
def test_row_longer_than_the_positions_is_refused_before_training(tmp_path, method, rows, options):
    with pytest.raises(UserError, match=rf"longest row of the train dataset has \d+ tokens, .*{POSITIONS} positions"):
        make(method, tmp_path, rows, **options)


def test_long_evaluation_rows_are_refused_and_truncation_accepts_them(tmp_path):
    with pytest.raises(UserError, match=f"the eval dataset .*\n.*max_length to {POSITIONS} or less"):
        make("SFT", tmp_path, SHORT, TEXTS)
    trainer = make("SFT", tmp_path, TEXTS, TEXTS, max_length=POSITIONS)
    assert trainer.train().training_loss > 0
    assert trainer.evaluate()["eval_loss"] > 0


def test_long_batch_of_a_plain_trainer_is_explained(tmp_path):
    ids = list(range(POSITIONS + 1))
    arguments = burnish.TrainingArguments(str(tmp_path), use_cpu=True, bf16=False, disable_tqdm=True, max_steps=1)
    trainer = burnish.Trainer(gpt2(), arguments, train_dataset=[{"input_ids": ids, "labels": ids}] * 2)
    with pytest.raises(UserError, match=f"a batch has {POSITIONS + 1} tokens, .*{POSITIONS} positions"):
        trainer.train()


def test_room_for_prompts_is_named_if_completions_fill_the_context(tmp_path):
    options = {"num_generations": 2, "per_device_train_batch_size": 2, "use_cpu": True, "bf16": False}

    def grpo(prompt, length):
        arguments = burnish.GRPOConfig(str(tmp_path), max_completion_length=length, **options)
        rows = Dataset.from_list([{"prompt": prompt}] * 2)
        burnish.GRPOTrainer(gpt2(), rate_length, arguments, rows, processing_class=AutoTokenizer.from_pretrained(DEMO))

    with pytest.raises(UserError, match=f"max_completion_length must be below {POSITIONS}"):
        grpo("Hi", 64)
    with pytest.raises(UserError, match="longer than 14 tokens, the model's context less max_completion_length"):
        grpo("ten " * 40, 10)


@pytest.mark.parametrize("family", ["gpt2", "opt", "llama", "bloom", "gpt_neox", "gptj"])
def test_learned_positions_are_recognized(family):
    assert num_positions(tiny(family)) == (256 if family in ("gpt2", "opt") else None)
    bert = transformers.BertModel(transformers.BertConfig(
        vocab_size=50, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8,
        max_position_embeddings=40,
    ))  # fmt: skip
    assert num_positions(bert) == 40


def test_warnings_point_to_the_script_and_not_to_burnish(tmp_path):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        burnish.SFTConfig(str(tmp_path), warmup_ratio=0.1)
        burnish.SFTTrainer(
            gpt2(), train_dataset=Dataset.from_list(SHORT), tokenizer=AutoTokenizer.from_pretrained(DEMO),
            args=burnish.SFTConfig(str(tmp_path), use_cpu=True, bf16=False),
        )  # fmt: skip
    assert {one.filename for one in caught if one.category is FutureWarning} == {__file__}
    assert len(caught) == 2


def test_adapters_cause_no_warnings_of_libraries_about_each_other(caplog):
    hide_library_warnings()
    with warnings.catch_warnings(record=True) as caught:
        hide_library_warnings()
        model = get_peft_model(tiny("llama"), LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"))
        assert model.is_gradient_checkpointing is False
        warnings.warn("shown", FutureWarning, stacklevel=1)
    assert [str(one.message) for one in caught] == ["shown"]
    headless = tiny("llama")
    headless.loss_type = None
    assert headless.loss_function is not None
    assert not caplog.records


def test_long_records_of_a_script_are_encoded_in_smaller_batches(monkeypatch):
    monkeypatch.setattr("burnish.data.rows.encode.BATCH_CHARACTERS", 100)
    batches = []

    def encode(examples, stats):
        batches.append([len(example.text) for example in examples])
        return [{"input_ids": [len(example.text)]} for example in examples]

    records = EncodeRecords(trl_layout("texts", {"text": ""}, "text", None), encode, ("input_ids",), None)
    located = [({"text": "x" * size}, "train dataset", size) for size in (60, 50, 101, 20, 30)]
    rows = records(located, DataStats())
    assert batches == [[60], [50], [101], [20, 30]]
    assert [row["input_ids"][0] for row in rows] == [60, 50, 101, 20, 30]
