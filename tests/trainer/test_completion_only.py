"""``DataCollatorForCompletionOnlyLM`` trains what follows a response template, as in TRL before 0.20."""

import warnings

import pytest
import torch
from datasets import Dataset
from transformers import AutoTokenizer

from burnish import DataCollatorForCompletionOnlyLM, SFTConfig, SFTTrainer
from burnish.loop.types import IGNORE_INDEX
from small_run import make_model

RESPONSE, INSTRUCTION = [5, 6], [8]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    make_model(folder)
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder):
    return AutoTokenizer.from_pretrained(folder)


def trained(collator, *rows):
    """The trained tokens of each row."""
    batch = collator([{"input_ids": row, "labels": [0] * len(row)} for row in rows])
    assert torch.equal(batch["input_ids"][batch["labels"] != IGNORE_INDEX], batch["labels"][batch["labels"] >= 0])
    return [[token for token in labels if token != IGNORE_INDEX] for labels in batch["labels"].tolist()]


def test_everything_after_the_last_response_template_is_trained(tokenizer):
    collator = DataCollatorForCompletionOnlyLM(RESPONSE, tokenizer=tokenizer)
    assert trained(collator, [1, 5, 6, 10, 11, 2], [5, 6, 3, 5, 6, 4]) == [[10, 11, 2], [4]]


def test_every_response_of_a_conversation_is_trained(tokenizer):
    collator = DataCollatorForCompletionOnlyLM(RESPONSE, INSTRUCTION, tokenizer)
    row = [8, 12, 5, 6, 10, 2, 8, 13, 5, 6, 11, 2]
    assert trained(collator, row, [*row, 8, 14]) == [[10, 2, 11, 2]] * 2


@pytest.mark.parametrize(("marker", "row"), [(None, [1, 2, 3]), (INSTRUCTION, [5, 6, 3])])
def test_row_without_a_template_has_no_loss_and_gives_a_warning(tokenizer, marker, row):
    collator = DataCollatorForCompletionOnlyLM(RESPONSE, marker, tokenizer)
    kind = "response" if marker is None else "instruction"
    with pytest.warns(UserWarning, match=f"A row has no loss, because its tokens do not contain the {kind}_template"):
        assert trained(collator, row) == [[]]


def test_padding_free_batch_is_one_row(tokenizer):
    collator = DataCollatorForCompletionOnlyLM(RESPONSE, tokenizer=tokenizer, padding_free=True)
    batch = collator([{"input_ids": [1, 5, 6, 10]}, {"input_ids": [5, 6, 11]}])
    assert batch["input_ids"].tolist() == [[1, 5, 6, 10, 5, 6, 11]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3, 0, 1, 2]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokenizer": None}, "with a padding token. Received: None"),
        ({"mlm": True}, "`mlm` must be False. Received: True"),
        ({"response_template": ""}, "`response_template` must have at least one token"),
    ],
)
def test_invalid_arguments_are_refused(tokenizer, options, message):
    with pytest.raises(ValueError, match=message):
        DataCollatorForCompletionOnlyLM(**{"response_template": RESPONSE, "tokenizer": tokenizer, **options})


@pytest.mark.run
def test_script_with_the_collator_trains_the_completions_alone(folder, tokenizer, tmp_path):
    """As the same rows with the columns ``prompt`` and ``completion``."""

    def losses(rows, collator=None, **options):
        args = SFTConfig(
            tmp_path, use_cpu=True, bf16=False, report_to="none", max_steps=2, logging_steps=1, save_strategy="no",
            learning_rate=1e-3, train_sampling_strategy="sequential", **options,
        )  # fmt: skip
        trainer = SFTTrainer(str(folder), args, collator, Dataset.from_list(rows))
        trainer.train()
        return [log["loss"] for log in trainer.state.log_history if "loss" in log]

    pairs = [(f"Repeat: {word}", f" = {word} {word}") for word in ("red", "stone", "blue", "green", "tree")]
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        collator = DataCollatorForCompletionOnlyLM(tokenizer(" =")["input_ids"], tokenizer=tokenizer)
        found = losses([{"text": prompt + completion} for prompt, completion in pairs], collator)
    expected = losses([{"prompt": f"{prompt} =", "completion": text.removeprefix(" =")} for prompt, text in pairs])
    assert found == pytest.approx(expected, rel=1e-5)
