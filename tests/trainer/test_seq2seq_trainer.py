"""Seq2SeqTrainer: evaluation and prediction with generation, compared with transformers."""

import functools

import numpy as np
import pytest
import torch
import transformers
from transformers import GenerationConfig

import burnish
from burnish import EvalPrediction, Seq2SeqTrainer, Seq2SeqTrainingArguments, UserError
from representative import representative_slow
from tiny_models import tiny_model
from trainer_run import gpt2, parity

pytestmark = pytest.mark.run

PADDING, END = 0, 1


def padded(rows, name, value):
    longest = max(len(row[name]) for row in rows)
    return torch.tensor([row[name] + [value] * (longest - len(row[name])) for row in rows])


def collator(model):
    """Return a collator that adds decoder inputs, the shifted labels."""

    def collate(rows):
        ids, labels = padded(rows, "input_ids", PADDING), padded(rows, "labels", -100)
        started = model.prepare_decoder_input_ids_from_labels(labels)
        return {
            "input_ids": ids, "attention_mask": (ids != PADDING).long(), "labels": labels, "decoder_input_ids": started
        }  # fmt: skip

    return collate


class Tokenizer:
    pad_token_id, eos_token_id = PADDING, END


def pairs(number=7):
    draw = torch.Generator().manual_seed(1)
    sizes = torch.randint(3, 9, (number, 2), generator=draw).tolist()
    return [
        {"input_ids": torch.randint(2, 40, (i,), generator=draw).tolist(),
         "labels": torch.randint(2, 40, (o,), generator=draw).tolist()} for i, o in sizes
    ]  # fmt: skip


def make(folder, library=burnish, trainer=None, **options):
    """Create a trainer of burnish or transformers for a small T5."""
    torch.manual_seed(0)
    model = parity.t5()
    defaults = {"use_cpu": True, "disable_tqdm": True, "report_to": "none", "per_device_eval_batch_size": 3}
    arguments = library.Seq2SeqTrainingArguments(str(folder), **{**defaults, "predict_with_generate": True, **options})
    defaults = {"data_collator": collator(model), "processing_class": Tokenizer()}
    return library.Seq2SeqTrainer(model, arguments, **{**defaults, **(trainer or {})})


def shape_of_predictions(prediction: EvalPrediction):
    return {"rows": prediction.predictions.shape[0], "written": int((prediction.predictions > 0).sum())}


@pytest.mark.parametrize(
    ("arguments", "call"),
    [
        ({"per_device_eval_batch_size": 8}, {}),
        ({"generation_max_length": 6}, {}),
        ({"generation_max_length": 6, "generation_num_beams": 2}, {}),
        ({"generation_max_length": 6}, {"max_new_tokens": 3}),
        ({"generation_config": GenerationConfig(max_new_tokens=30, decoder_start_token_id=0, pad_token_id=0)}, {}),
        ({"predict_with_generate": False}, {}),
    ],
)
def test_predictions_and_metrics_match_transformers(tmp_path, arguments, call):
    rows, results = pairs(), []
    for library in (burnish, transformers):
        trainer = make(tmp_path, library, **arguments)
        results.append(trainer.predict(rows, **call))
    ours, theirs = results
    first = [
        result.predictions[0] if isinstance(result.predictions, tuple) else result.predictions for result in results
    ]
    np.testing.assert_allclose(first[0], first[1], atol=1e-5)
    np.testing.assert_array_equal(ours.label_ids, theirs.label_ids)
    assert ours.metrics.keys() | {"test_model_preparation_time"} == theirs.metrics.keys()


def test_loss_next_to_generated_text_is_the_label_loss(tmp_path):
    written = make(tmp_path).evaluate(pairs())["eval_loss"]
    assert written == pytest.approx(
        make(tmp_path, predict_with_generate=False).evaluate(pairs())["eval_loss"], rel=1e-6
    )


def test_all_return_sequences_of_a_row_are_counted(tmp_path):
    trainer = make(tmp_path, trainer={"compute_metrics": shape_of_predictions})
    metrics = trainer.evaluate(pairs(7), num_beams=3, num_return_sequences=3, max_length=5)
    assert metrics["eval_rows"] == 21


def test_generation_arguments_of_a_call_apply_to_every_dataset_of_it_only(tmp_path):
    trainer = make(
        tmp_path, trainer={"compute_metrics": shape_of_predictions, "eval_dataset": {"a": pairs(3), "b": pairs(4)}}
    )
    short = trainer.evaluate(min_new_tokens=1, max_new_tokens=1)
    assert short["eval_a_written"] <= 3
    assert short["eval_b_written"] <= 4
    assert trainer.evaluate(min_new_tokens=9)["eval_b_written"] >= 9 * 4
    assert trainer._gen_kwargs is None


def test_evaluation_during_training_generates(tmp_path):
    sets = {"train_dataset": pairs(), "eval_dataset": pairs(4)}
    trainer = make(tmp_path, eval_strategy="steps", eval_steps=2, max_steps=2, generation_max_length=5,
                   save_strategy="no", trainer={"compute_metrics": shape_of_predictions, **sets})  # fmt: skip
    trainer.train()
    assert [log["eval_rows"] for log in trainer.state.log_history if "eval_rows" in log] == [4]


def test_transformers_arguments_keep_their_generation_settings(tmp_path):
    theirs = transformers.Seq2SeqTrainingArguments(
        str(tmp_path), use_cpu=True, predict_with_generate=True, generation_max_length=7, report_to="none"
    )
    trainer = Seq2SeqTrainer(parity.t5(), theirs)
    assert isinstance(trainer.args, Seq2SeqTrainingArguments)
    assert (trainer.args.predict_with_generate, trainer.args.generation_max_length) == (True, 7)


def test_contradictory_generation_config_is_rejected_at_init(tmp_path):
    with pytest.raises(UserError, match="top_p"):
        make(tmp_path, generation_config=GenerationConfig(do_sample=False, top_p=0.9))


def test_generation_config_is_read_from_a_folder(tmp_path):
    GenerationConfig(max_length=11).save_pretrained(tmp_path)
    for place in (tmp_path, tmp_path / "generation_config.json", str(tmp_path)):
        assert make(tmp_path, generation_config=place).model.generation_config.max_length == 11


def test_decoder_only_model_generates_after_prompt_and_needs_padding_token(tmp_path):
    rows = [{"input_ids": list(range(5, 9))}] * 2
    model, arguments = gpt2(), Seq2SeqTrainingArguments(str(tmp_path), use_cpu=True, predict_with_generate=True)
    trainer = Seq2SeqTrainer(model, arguments)
    with pytest.raises(UserError, match="processing_class"):
        trainer.predict(rows, max_length=6)
    model.config.pad_token_id = 3
    predictions = trainer.predict(rows, max_length=6).predictions
    assert predictions[:, :4].tolist() == [[5, 6, 7, 8]] * 2
    assert predictions[:, 6:].tolist() == [[3] * 14] * 2


def left_padded(rows):
    longest = max(len(row["input_ids"]) for row in rows)
    ids = [[PADDING] * (longest - len(row["input_ids"])) + row["input_ids"] for row in rows]
    return {"input_ids": torch.tensor(ids), "attention_mask": (torch.tensor(ids) != PADDING).long()}


def decoder(folder, library=burnish, **call):
    """Predict with a decoder-only model for prompts of different lengths. Return results and ``generate`` calls."""
    torch.manual_seed(0)
    model, calls = tiny_model("llama"), []
    model.generation_config.update(pad_token_id=PADDING, eos_token_id=list(range(END, 60, 7)))
    model.forward = counted(model.forward, calls)
    arguments = library.Seq2SeqTrainingArguments(
        str(folder), use_cpu=True, disable_tqdm=True, report_to="none", per_device_eval_batch_size=3,
        predict_with_generate=True, remove_unused_columns=False,
    )  # fmt: skip
    trainer = library.Seq2SeqTrainer(model, arguments, data_collator=left_padded, processing_class=Tokenizer())
    rows = [{"input_ids": [2 + (3 * number + 5 * i) % 30 for i in range(2 + number % 6)]} for number in range(50)]
    return trainer.predict(rows, **call).predictions, len(calls)


def counted(forward, calls):
    @functools.wraps(forward)
    def count(*args, **options):
        calls.append(1)
        return forward(*args, **options)

    return count


@pytest.mark.parametrize(
    "call",
    representative_slow([{"max_length": 12}, {"max_new_tokens": 24}, {"max_new_tokens": 9, "min_new_tokens": 5}], 1),
)
def test_decoder_only_model_generates_the_same_ids_over_slots(tmp_path, call):
    ours, passes = decoder(tmp_path, **call)
    theirs, passes_of_theirs = decoder(tmp_path, transformers, **call)
    assert np.array_equal(ours, theirs)
    if call == {"max_new_tokens": 24}:  # long enough that responses end at different steps
        assert passes < 0.8 * passes_of_theirs


@pytest.mark.parametrize(
    "call", [{"max_new_tokens": 6, "num_beams": 2}, {"max_new_tokens": 6, "no_repeat_ngram_size": 2}]
)
def test_unsupported_generation_settings_use_generate(tmp_path, call):
    ours, passes = decoder(tmp_path, **call)
    theirs, passes_of_theirs = decoder(tmp_path, transformers, **call)
    assert np.array_equal(ours, theirs)
    assert passes == passes_of_theirs


def test_sortish_sampler_without_effect_is_reported(tmp_path):
    with pytest.warns(UserWarning, match="group_by_length"):
        Seq2SeqTrainingArguments(str(tmp_path), sortish_sampler=True)
