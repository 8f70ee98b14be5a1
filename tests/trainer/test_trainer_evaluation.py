"""evaluate() and predict(): losses, metrics, and gathered outputs."""

import numpy as np
import pytest
import torch
import transformers
from transformers import TrainerCallback

from burnish import EvalPrediction, Trainer
from trainer_run import Regression, gpt2, make_trainer, points, text_rows, transformers_arguments

pytestmark = pytest.mark.run


def accuracy(prediction: EvalPrediction):
    predictions, labels = prediction
    return {"near": float((np.abs(predictions - labels) < 1).mean())}


def evaluated(folder, rows=7, eval_set=None, trainer=None, **options):
    result = make_trainer(folder, model=Regression(1.5, 2.5), per_device_eval_batch_size=3,
                          trainer={"eval_dataset": eval_set or points(rows), **(trainer or {})}, **options)  # fmt: skip
    return result, result.evaluate()


def test_loss_is_mean_over_dataset_and_metrics_have_their_prefix(tmp_path):
    _, metrics = evaluated(tmp_path, trainer={"compute_metrics": accuracy})
    x = torch.stack([row["x"] for row in points(7)])
    assert metrics["eval_loss"] == pytest.approx(float((1.5 * x + 2.5 - 2 * x - 3).square().mean()), rel=1e-5)
    assert metrics["eval_near"] == pytest.approx(float(((-0.5 * x - 0.5).abs() < 1).float().mean()))
    assert {"eval_runtime", "eval_samples_per_second", "eval_steps_per_second"} <= set(metrics)


def test_metrics_match_transformers(tmp_path):
    _, ours = evaluated(tmp_path, trainer={"compute_metrics": accuracy})
    theirs = transformers.Trainer(Regression(1.5, 2.5), transformers_arguments(tmp_path, per_device_eval_batch_size=3),
                                  eval_dataset=points(7), compute_metrics=accuracy).evaluate()  # fmt: skip
    assert next(iter(ours)) == next(iter(theirs)) == "eval_loss"
    for name in ("eval_loss", "eval_near"):
        assert ours[name] == pytest.approx(theirs[name], rel=1e-6)


def test_language_model_loss_does_not_depend_on_batch_size(tmp_path):
    result = [
        make_trainer(tmp_path, model=gpt2(), per_device_eval_batch_size=size).evaluate(text_rows(9))["eval_loss"]
        for size in (1, 2, 9)
    ]
    assert result == pytest.approx([result[0]] * 3, rel=1e-5)


def decoder(name):
    kind = getattr(transformers, f"{name}ForCausalLM")
    config = getattr(transformers, f"{name}Config")(
        vocab_size=64, d_model=16, decoder_layers=1, decoder_attention_heads=2, decoder_ffn_dim=16, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, max_position_embeddings=32, max_target_positions=32, dropout=0.0,
    )  # fmt: skip
    torch.manual_seed(0)
    return kind(config)


@pytest.mark.parametrize("name", ["Whisper", "Bart"])
def test_decoder_that_does_not_shift_its_labels_has_its_own_loss(name, tmp_path):
    model, rows = decoder(name), text_rows(6)
    with torch.no_grad():
        own = [model(**{key: torch.as_tensor(value)[None] for key, value in row.items()}).loss for row in rows]
    trainer = make_trainer(tmp_path, model=model, per_device_eval_batch_size=2)
    counts = torch.tensor([sum(label != -100 for label in row["labels"]) for row in rows])
    expected = (torch.stack(own) * counts).sum() / counts.sum()
    assert trainer.evaluate(rows)["eval_loss"] == pytest.approx(expected.item(), rel=1e-5)


class TinyForCTC(torch.nn.Module):
    """A model whose loss is a mean over rows, although labels are sequences."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor(1.0))

    def forward(self, x, labels=None):
        return {"loss": (self.weight * x).mean(), "logits": self.weight * x, "scalar": self.weight * 1}


def rows_of_ctc(count):
    return [
        {"x": torch.tensor(float(n)), "labels": torch.tensor([1] * (n + 1) + [-100] * (count - n))}
        for n in range(count)
    ]


def test_rows_of_ctc_have_the_same_weight(tmp_path):
    """Independent of the length of their labels, in evaluations and in micro-batches."""
    for size in (1, 3, 6):
        trainer = make_trainer(tmp_path, model=TinyForCTC(), per_device_eval_batch_size=size)
        assert trainer.evaluate(rows_of_ctc(6))["eval_loss"] == pytest.approx(2.5)
    trained = []
    for size, count in ((6, 1), (2, 3)):
        trainer = make_trainer(
            tmp_path, model=TinyForCTC(), train=rows_of_ctc(6), per_device_train_batch_size=size,
            gradient_accumulation_steps=count, max_steps=1, learning_rate=0.1, optim="sgd", max_grad_norm=0,
        )  # fmt: skip
        trainer.train()
        trained.append(trainer.model.weight.item())
    assert trained == pytest.approx([1 - 0.1 * 2.5] * 2)


def test_scalar_outputs_of_one_process_stay_scalars(tmp_path):
    trainer = make_trainer(tmp_path, model=TinyForCTC(), per_device_eval_batch_size=3, eval_do_concat_batches=False)
    output = trainer.predict(rows_of_ctc(6))
    assert [[value.shape for value in batch] for batch in output.predictions] == [[(3,), ()]] * 2


def test_epoch_is_0_until_first_step_has_ended(tmp_path):
    recorded = []

    class ReadEpoch(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            recorded.append(state.epoch)

    trainer = make_trainer(tmp_path, max_steps=2, trainer={"eval_dataset": points(5), "callbacks": [ReadEpoch]})
    assert trainer.evaluate()["epoch"] == trainer.state.epoch == 0
    trainer.train()
    assert recorded == [0, 1 / 6]


def test_named_eval_datasets_are_evaluated_one_by_one(tmp_path):
    trainer, metrics = evaluated(tmp_path, eval_set={"near": points(3), "far": points(5)})
    assert {"eval_near_loss", "eval_far_loss"} <= set(metrics)
    assert len(trainer.state.log_history) == 2
    assert "eval_far_loss" in trainer.evaluate({"far": points(4)})


def test_evaluation_during_training_is_logged_and_used_for_best_model(tmp_path):
    trainer = make_trainer(tmp_path, max_steps=4, eval_strategy="steps", eval_steps=2, metric_for_best_model="near",
                           trainer={"eval_dataset": points(5), "compute_metrics": accuracy})  # fmt: skip
    trainer.train()
    result = [entry["eval_near"] for entry in trainer.state.log_history if "eval_near" in entry]
    assert len(result) == 2
    assert trainer.state.best_metric == max(result)


def test_unknown_metric_is_reported_with_available_ones(tmp_path):
    trainer = make_trainer(tmp_path, max_steps=2, eval_strategy="steps", eval_steps=1, metric_for_best_model="nope",
                           trainer={"eval_dataset": points(5)})  # fmt: skip
    with pytest.raises(KeyError, match="eval_loss"):
        trainer.train()


def test_logits_can_be_preprocessed_before_gathering(tmp_path):
    recorded = []

    def compute(prediction):
        recorded.append(prediction.predictions.shape)
        return {}

    make_trainer(tmp_path, model=gpt2(), per_device_eval_batch_size=2, trainer={
        "eval_dataset": text_rows(5), "compute_metrics": compute,
        "preprocess_logits_for_metrics": lambda logits, labels: logits.argmax(-1),
    }).evaluate()  # fmt: skip
    assert recorded == [(5, 12)]


def test_rows_of_different_lengths_are_padded_with_ignore_index(tmp_path):
    class Echo(torch.nn.Module):
        main_input_name = "x"

        def __init__(self):
            super().__init__()
            self.w = torch.nn.Parameter(torch.ones(()))

        def forward(self, x, labels=None):
            return {"loss": (x * self.w - labels).square().mean(), "logits": x * self.w}

    rows = [{"x": torch.ones(n), "labels": torch.ones(n)} for n in (2, 2, 4)]
    output = make_trainer(tmp_path, model=Echo(), per_device_eval_batch_size=2).predict(rows)
    assert output.predictions.tolist() == [[1, 1, -100, -100], [1, 1, -100, -100], [1, 1, 1, 1]]


def test_metrics_can_be_computed_batch_by_batch(tmp_path):
    calls = []

    def compute(prediction, compute_result):
        calls.append((len(prediction.predictions), compute_result))
        return {"calls": len(calls)} if compute_result else {}

    trainer, metrics = evaluated(tmp_path, trainer={"compute_metrics": compute}, batch_eval_metrics=True)
    assert calls == [(3, False), (3, False), (1, True)]
    assert metrics["eval_calls"] == 3
    output = trainer.predict(points(4))
    assert output.predictions.shape == (4,)
    assert "test_calls" in output.metrics
    with pytest.raises(ValueError, match="compute_result"):
        evaluated(tmp_path, trainer={"compute_metrics": accuracy}, batch_eval_metrics=True)


def test_metrics_can_include_inputs_and_losses(tmp_path):
    recorded = {}

    def compute(prediction):
        recorded.update(inputs=prediction.inputs, losses=prediction.losses)
        return {}

    class NamedInputs(Regression):
        main_input_name = "x"

    make_trainer(tmp_path, model=NamedInputs(), include_for_metrics=["inputs", "loss"],
                 trainer={"eval_dataset": points(5), "compute_metrics": compute}).evaluate()  # fmt: skip
    assert recorded["inputs"].tolist() == [float(row["x"]) for row in points(5)]
    assert recorded["losses"].shape == (5,)


def test_predictions_include_labels_and_metrics_if_available(tmp_path):
    trainer = make_trainer(tmp_path, model=Regression(1.5, 2.5), trainer={"compute_metrics": accuracy})
    output = trainer.predict(points(5))
    assert output.label_ids.shape == output.predictions.shape == (5,)
    assert {"test_loss", "test_near", "test_runtime"} <= set(output.metrics)
    bare = trainer.predict([{"x": row["x"]} for row in points(5)])
    assert bare.label_ids is None
    assert "test_loss" not in bare.metrics
    assert np.allclose(bare.predictions, output.predictions)


def test_predictions_can_stay_unconcatenated_and_be_offloaded_early(tmp_path):
    trainer = make_trainer(
        tmp_path, eval_do_concat_batches=False, eval_accumulation_steps=1, per_device_eval_batch_size=2
    )
    assert [len(part) for part in trainer.predict(points(5)).predictions] == [2, 2, 1]


def test_non_finite_losses_are_excluded_on_request(tmp_path):
    rows = [*points(2), {"x": torch.tensor(float("inf")), "labels": torch.tensor(0.0)}]
    _, metrics = evaluated(tmp_path, eval_set=rows, per_device_train_batch_size=1)
    assert np.isnan(metrics["eval_loss"])  # all three rows are one batch
    single = make_trainer(tmp_path, model=Regression(1.5, 2.5), per_device_eval_batch_size=1)
    assert np.isfinite(single.evaluate(rows)["eval_loss"])


def test_prediction_loss_only_computes_only_the_loss(tmp_path):
    output = make_trainer(tmp_path, prediction_loss_only=True).predict(points(5))
    assert output.predictions is None
    assert "test_loss" in output.metrics


def test_standalone_evaluation_can_run_in_half_precision(tmp_path):
    trainer = make_trainer(tmp_path, bf16_full_eval=True)
    trainer.evaluate(points(5))
    assert trainer.model.a.dtype == torch.bfloat16


def test_model_is_in_eval_mode_during_evaluation(tmp_path):
    class ModeRecorder(Trainer):
        def prediction_step(self, model, *args, **kwargs):
            assert not model.training
            return super().prediction_step(model, *args, **kwargs)

        def compute_loss(self, model, *args, **kwargs):
            modes.append(model.training)
            return super().compute_loss(model, *args, **kwargs)

    modes = []
    trainer = make_trainer(tmp_path, ModeRecorder, model=Regression(dropout=0.5), max_steps=3, eval_strategy="steps",
                           eval_steps=1, trainer={"eval_dataset": points(4)})  # fmt: skip
    trainer.train()
    assert modes == [True, False] * 3


def test_metrics_that_are_no_dict_are_rejected(tmp_path):
    with pytest.raises(TypeError, match=r"compute_metrics must return a dict of metrics by name. Received: 0.5"):
        evaluated(tmp_path, trainer={"compute_metrics": lambda given: 0.5})
