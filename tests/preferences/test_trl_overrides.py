"""Overridden methods of TRL's preference trainers receive TRL's batch and the model itself; an override that only
calls the original changes nothing.
"""

import json
import math
import os
from pathlib import Path

import pytest
import torch
from peft import LoraConfig
from script_runs import as_dataset, labelled_examples, losses, make, pairs, weights
from test_collators import KINDS
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

import burnish
from pair_runs import make_pair_workspace
from representative import representative_slow
from two_processes import in_two_processes

pytestmark = pytest.mark.run

TRAINERS = ["DPOTrainer", "KTOTrainer", "RewardTrainer", "ORPOTrainer", "CPOTrainer"]
PADDED = {
    "DPOTrainer": {"input_ids", "attention_mask", "completion_mask"},
    "KTOTrainer": {"input_ids", "attention_mask", "completion_mask", "KL_input_ids", "KL_attention_mask",
                   "KL_completion_mask", "label"},
    "RewardTrainer": {"input_ids", "attention_mask", "margin"},
    **dict.fromkeys(
        ("ORPOTrainer", "CPOTrainer"),
        {f"{side}_{name}" for side in ("chosen", "rejected") for name in ("input_ids", "attention_mask", "labels")}
        | {"prompt_input_ids", "prompt_attention_mask", "prompt", "chosen", "rejected"},
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_pair_workspace(tmp_path_factory.mktemp("overrides"))


def trainer_with(kind, bases, folder, output, trainer_args=None, **arguments):
    """Create a trainer of a subclass with the methods of ``bases``."""
    subclass = type("Mine", (bases, getattr(burnish, kind)), {})
    rows = labelled_examples() if kind == "KTOTrainer" else pairs()
    return make(kind, folder / "model", output, rows, trainer_args, subclass, **arguments)


class NoOverride:
    """No override."""


class Recording:
    """Each method records its arguments and calls the original."""

    def _record(self, name, model=None, batch=None):
        vars(self).setdefault("seen", {})[name] = (model, None if batch is None else set(batch))


def recording(name, is_given_model=True):
    def method(self, *args, **kwargs):
        self._record(name, *(args[:2] if is_given_model else ()))
        return getattr(super(kind, self), name)(*args, **kwargs)

    kind = type("Noting" + name, (Recording,), {name: method})
    return kind


def run(kind, bases, folder, output, **arguments):
    rows = as_dataset(labelled_examples(5) if kind == "KTOTrainer" else pairs(5))
    trainer = trainer_with(
        kind, bases, folder, output, {"eval_dataset": rows}, per_device_eval_batch_size=2, **arguments
    )
    result = losses(trainer)
    metrics = {name: v for name, v in trainer.evaluate().items() if "runtime" not in name and "per_second" not in name}
    return trainer, result, metrics


@pytest.mark.parametrize("name", ["compute_loss", "training_step", "prediction_step"])
@pytest.mark.parametrize("kind", representative_slow(TRAINERS, ("DPOTrainer",)))
def test_override_receives_trl_batch_and_model_and_changes_nothing(kind, name, folder, tmp_path):
    custom, result, evaluated = run(kind, recording(name), folder, tmp_path / "mine")
    _, defaults, expected = run(kind, NoOverride, folder, tmp_path / "usual")
    model, names = custom.seen[name]
    assert model.config.vocab_size == model.get_input_embeddings().num_embeddings
    assert names == PADDED[kind]
    assert result == pytest.approx(defaults, rel=1e-5)
    assert evaluated == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("kind", ["DPOTrainer", "KTOTrainer", "RewardTrainer"])
def test_collator_of_a_script_gets_further_columns(kind, is_streamed, folder, tmp_path):
    """As in scripts that weight pairs."""

    class Weighted:
        def compute_loss(self, model, inputs, *args, **kwargs):
            seen.append(inputs["weight"].tolist())
            return super().compute_loss(model, inputs, *args, **kwargs)

    records = [
        {**record, "weight": float(n)}
        for n, record in enumerate(labelled_examples(4) if kind == "KTOTrainer" else pairs(4))
    ]
    rows = as_dataset(records)
    rows = rows.to_iterable_dataset() if is_streamed else rows
    subclass = type("Mine", (Weighted, getattr(burnish, kind)), {})
    options = {"train_sampling_strategy": "sequential", "max_steps": 1, "remove_unused_columns": False}
    trainer = make(kind, folder / "model", tmp_path, rows, {}, subclass, **options)
    pad, seen = trainer.data_collator, []
    trainer.data_collator = lambda rows: {**pad(rows), "weight": torch.tensor([row["weight"] for row in rows])}
    trainer.train()
    assert seen == [[0, 1], [2, 3]]


@pytest.mark.parametrize("kind", ["ORPOTrainer", "CPOTrainer"])
@pytest.mark.parametrize("name", ["get_batch_loss_metrics", "tokenize_row"])
def test_batches_have_the_texts_and_the_columns_of_the_dataset(kind, name, folder, tmp_path):
    class Keeps:
        def get_batch_loss_metrics(self, model, batch, train_eval="train"):
            seen.append(batch)
            return super().get_batch_loss_metrics(model, batch, train_eval)

    seen, records = [], [{**pair, "weight": float(n)} for n, pair in enumerate(pairs(4))]
    more = {} if name != "tokenize_row" else {name: lambda self, *args: super(subclass, self).tokenize_row(*args)}
    subclass = type("Mine", (Keeps, getattr(burnish, kind)), more)
    options = {"train_sampling_strategy": "sequential", "max_steps": 1}
    trainer = make(kind, folder / "model", tmp_path, records, {}, subclass, **options)
    trainer.train()
    assert [weight for batch in seen for weight in batch["weight"]] == [0, 1, 2, 3]
    tokenizer = trainer.processing_class
    for n, batch in enumerate(seen):
        for at in (0, 1):
            record = records[2 * n + at]
            whole = tokenizer.apply_chat_template(record["prompt"] + record["rejected"], tokenize=False)
            assert batch["prompt"][at] + batch["rejected"][at] == whole
            assert record["chosen"][0]["content"] in batch["chosen"][at]


TRL_METHODS = {
    "DPOTrainer": ["_compute_loss"],
    "KTOTrainer": ["_compute_loss"],
    "ORPOTrainer": ["get_batch_loss_metrics", "concatenated_forward"],
    "CPOTrainer": ["get_batch_loss_metrics", "concatenated_forward"],
}
OTHER_METHODS = {
    "DPOTrainer": ["_prepare_dataset"],
    "KTOTrainer": ["_prepare_dataset"],
    "RewardTrainer": ["_prepare_dataset"],
    "ORPOTrainer": ["odds_ratio_loss", "store_metrics", "tokenize_row", "build_tokenized_answer", "get_batch_logps"],
    "CPOTrainer": ["cpo_loss", "store_metrics", "tokenize_row", "build_tokenized_answer", "get_batch_logps"],
}


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("kind", "name", "takes_model"),
    [
        (kind, name, is_own)
        for is_own, table in ((True, TRL_METHODS), (False, OTHER_METHODS))
        for kind in table
        for name in table[kind]
    ],
)
def test_trl_method_override_is_called_and_changes_nothing(kind, name, takes_model, folder, tmp_path):
    custom, result, evaluated = run(kind, recording(name, takes_model), folder, tmp_path / "mine")
    _, defaults, expected = run(kind, NoOverride, folder, tmp_path / "usual")
    assert name in custom.seen
    assert result == pytest.approx(defaults, rel=1e-4)
    assert evaluated["eval_loss"] == pytest.approx(expected["eval_loss"], rel=1e-4)
    if takes_model:
        assert custom.seen[name][1] == PADDED[kind]


@pytest.mark.sample(1)
@pytest.mark.parametrize("loss_type", ["sigmoid", "hinge", "ipo", "simpo"])
def test_cpo_losses_equal_those_of_its_method(loss_type, folder, tmp_path):
    options = {"loss_type": loss_type, "label_smoothing": 0.1 if loss_type == "sigmoid" else 0.0}
    _, result, _ = run("CPOTrainer", recording("cpo_loss", False), folder, tmp_path / "mine", **options)
    _, defaults, _ = run("CPOTrainer", NoOverride, folder, tmp_path / "usual", **options)
    assert result == pytest.approx(defaults, rel=1e-4)


@pytest.mark.parametrize("kind", ["DPOTrainer", "KTOTrainer"])
def test_constant_loss_override_is_reported(kind, folder, tmp_path):
    class ConstantLoss:
        def _compute_loss(self, model, inputs, return_outputs):
            loss = model(inputs["input_ids"]).logits.sum() * 0 + 42.0
            return (loss, None) if return_outputs else loss

    trainer = trainer_with(kind, ConstantLoss, folder, tmp_path)
    assert losses(trainer) == [42.0] * 3
    assert trainer.evaluate(as_dataset(labelled_examples(4) if kind == "KTOTrainer" else pairs(4)))["eval_loss"] == 42.0


def test_custom_loss_can_read_model_and_reference(folder, tmp_path):
    """DPO's formula over TRL's batch gives burnish's losses."""

    class CustomLoss:
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            labels = inputs["input_ids"].masked_fill(inputs["completion_mask"] == 0, -100)
            requested = {name: inputs[name] for name in ("input_ids", "attention_mask")}

            def logps(one):
                logits = one(**requested).logits[:, :-1].log_softmax(-1)
                chosen = logits.gather(-1, labels[:, 1:].clamp(min=0).unsqueeze(-1)).squeeze(-1)
                return (chosen * (labels[:, 1:] != -100)).sum(-1)

            with torch.no_grad():
                reference = logps(self.ref_model)
            one, other = (logps(model) - reference).chunk(2)
            self._metrics["train"]["mine"].append(float(len(one)))
            return -torch.nn.functional.logsigmoid(self.beta * (one - other)).mean()

    custom, defaults = (
        trainer_with("DPOTrainer", bases, folder, tmp_path / bases.__name__) for bases in (CustomLoss, NoOverride)
    )
    assert losses(custom) == pytest.approx(losses(defaults), rel=1e-4)
    assert custom.state.log_history[0]["mine"] == 2.0


def test_batch_changed_by_a_script_is_trained(folder, tmp_path):
    class SwappedBatch:
        def compute_loss(self, model, inputs, *args, **kwargs):
            for name, value in inputs.items():
                inputs[name] = torch.cat(value.chunk(2)[::-1])
            return super().compute_loss(model, inputs, *args, **kwargs)

    options = {"learning_rate": 1e-2}
    custom, defaults = (
        trainer_with("DPOTrainer", bases, folder, tmp_path / bases.__name__, **options)
        for bases in (SwappedBatch, NoOverride)
    )
    custom.train(), defaults.train()
    assert custom.state.log_history[1]["rewards/margins"] < 0 < defaults.state.log_history[1]["rewards/margins"]


@pytest.mark.parametrize("kind", representative_slow(TRAINERS, ("CPOTrainer",)))
def test_batch_replaced_in_prepare_inputs_is_trained(kind, folder, tmp_path):
    class CopiedBatch:
        def _prepare_inputs(self, inputs):
            return {**super()._prepare_inputs(inputs)}

    _, result, evaluated = run(kind, CopiedBatch, folder, tmp_path / "mine")
    _, defaults, expected = run(kind, NoOverride, folder, tmp_path / "usual")
    assert result == pytest.approx(defaults, rel=1e-4)
    assert evaluated == {name: pytest.approx(value, rel=1e-3, abs=1e-5) for name, value in expected.items()}


def test_baseline_override_is_used_by_kto(folder, tmp_path):
    class ShiftedBaseline:
        def _compute_kl_logps(self, model, batch):
            result = super()._compute_kl_logps(model, batch)
            return result + (0 if model is self.ref_model or getattr(self, "is_second", False) else 3.0)

    trainer = trainer_with(
        "KTOTrainer",
        ShiftedBaseline,
        folder,
        tmp_path,
        {"ref_model": AutoModelForCausalLM.from_pretrained(folder / "model")},
    )
    losses(trainer)
    assert trainer.state.log_history[0]["kl"] == pytest.approx(3.0, abs=1e-4)


@pytest.mark.parametrize("kind", ["DPOTrainer", "KTOTrainer"])
def test_reference_log_probabilities_of_a_script_are_used(kind, folder, tmp_path):
    class ShiftedReference:
        def compute_ref_log_probs(self, model, inputs):
            return tuple(one + 2.0 * index for index, one in enumerate(super().compute_ref_log_probs(model, inputs)))

    trainer = trainer_with(kind, ShiftedReference, folder, tmp_path, precompute_ref_log_probs=True)
    first = losses(trainer)[0]
    if kind == "DPOTrainer":
        assert first == pytest.approx(math.log1p(math.exp(-0.1 * 2.0)), rel=1e-4)
    else:
        defaults = trainer_with(kind, NoOverride, folder, tmp_path, precompute_ref_log_probs=True)
        assert list(trainer.train_dataset["reference_kl_logps"]) == pytest.approx(
            [value + 2.0 for value in defaults.train_dataset["reference_kl_logps"]], rel=1e-5
        )


def test_rows_tokenized_by_override_are_trained(folder, tmp_path):
    class ShortRows:
        def tokenize_row(self, feature, model=None):
            assert isinstance(feature["prompt"], str)
            row = super().tokenize_row(feature, model)
            return {name: ids[-4:] if "prompt" not in name else ids for name, ids in row.items()}

    trainer = trainer_with("ORPOTrainer", ShortRows, folder, tmp_path)
    assert {len(row["chosen_input_ids"]) for row in trainer.train_dataset} == {4}
    assert all(map(math.isfinite, losses(trainer)))


def test_static_methods_are_called_with_the_keywords_of_trl(folder, tmp_path):
    class KeywordOnly:
        @staticmethod
        def concatenated_inputs(batch, *, is_encoder_decoder, padding_value, device):
            return burnish.ORPOTrainer.concatenated_inputs(batch, is_encoder_decoder, padding_value, device)

        @staticmethod
        def get_batch_logps(logits, labels, *, average_log_prob, is_encoder_decoder):
            return burnish.ORPOTrainer.get_batch_logps(logits, labels, average_log_prob, is_encoder_decoder)

    custom, defaults = (
        losses(trainer_with("ORPOTrainer", one, folder, tmp_path / one.__name__)) for one in (KeywordOnly, NoOverride)
    )
    assert custom == pytest.approx(defaults, rel=1e-4)


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ["DPOTrainer", "KTOTrainer"])
def test_prepare_input_receives_trl_batch(kind, folder, tmp_path):
    class InputRecorder(Recording):
        def _prepare_input(self, data):
            if isinstance(data, dict):
                self._record("_prepare_input", None, data)
            return super()._prepare_input(data)

    trainer, custom, metrics = run(kind, InputRecorder, folder, tmp_path / "own")
    _, defaults, expected_metrics = run(kind, NoOverride, folder, tmp_path / "usual")
    assert trainer.seen["_prepare_input"][1] >= PADDED[kind]
    assert custom == pytest.approx(defaults, rel=1e-4)
    assert metrics["eval_loss"] == pytest.approx(expected_metrics["eval_loss"], rel=1e-4)


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", TRAINERS)
def test_loaders_of_a_script_have_padded_batches_that_its_own_loop_can_train(kind, folder, tmp_path):
    rows = as_dataset(labelled_examples(5) if kind == "KTOTrainer" else pairs(5))
    trainer = trainer_with(kind, NoOverride, folder, tmp_path, {"eval_dataset": rows}, max_steps=1)
    loaders = trainer.get_train_dataloader(), trainer.get_eval_dataloader()
    for loader in (*loaders, trainer.get_test_dataloader(trainer.eval_dataset)):
        batch = trainer._prepare_inputs(next(iter(loader)))
        assert batch.keys() == PADDED[kind]
        trainer.model.train()
        loss = trainer.compute_loss(trainer.model, batch)
        loss.backward()
        assert any(p.grad is not None for p in trainer.model.parameters())
        trainer.model.eval()
        evaluated, *_ = trainer.prediction_step(trainer.model, batch, prediction_loss_only=True)
        assert evaluated.item() == pytest.approx(loss.item(), rel=1e-4)
    expected = trainer.evaluate()["eval_loss"]
    output = trainer.evaluation_loop(trainer.get_eval_dataloader(), "Evaluation", prediction_loss_only=True)
    assert output.metrics["eval_loss"] == pytest.approx(expected)


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", TRAINERS)
def test_own_loaders_with_the_collator_of_the_trainer_change_nothing(kind, folder, tmp_path):
    class OwnLoaders:
        def get_train_dataloader(self):
            size, sampler = self.args.train_batch_size, self._get_train_sampler()
            return DataLoader(self.train_dataset, size, sampler=sampler, collate_fn=self.data_collator)

        def get_eval_dataloader(self, eval_dataset=None):
            return DataLoader(self.eval_dataset, self.args.eval_batch_size, collate_fn=self.data_collator)

    _, custom, metrics = run(kind, OwnLoaders, folder, tmp_path / "own")
    _, defaults, expected_metrics = run(kind, NoOverride, folder, tmp_path / "usual")
    assert custom == pytest.approx(defaults, rel=1e-4)
    assert metrics["eval_loss"] == pytest.approx(expected_metrics["eval_loss"], rel=1e-4)


@pytest.mark.parametrize("kind", ["ORPOTrainer", "CPOTrainer"])
def test_predictions_with_an_overridden_forward_are_mean_logits(kind, folder, tmp_path):
    """As in TRL, there are two values per batch, and the labels are zeros."""
    trainer = trainer_with(kind, recording("concatenated_forward"), folder, tmp_path,
                           {"eval_dataset": as_dataset(pairs(5))}, per_device_eval_batch_size=2)  # fmt: skip
    predictions = trainer.predict(trainer.eval_dataset)
    *_, metrics = trainer.get_batch_loss_metrics(trainer.model, next(iter(trainer.get_eval_dataloader())), "eval")
    assert predictions.predictions.shape == predictions.label_ids.shape
    assert not predictions.label_ids.any()
    means = [metrics["eval_logits/chosen"], metrics["eval_logits/rejected"]]
    assert predictions.predictions[:2] == pytest.approx(means, rel=1e-5)


@pytest.mark.parametrize("kind", ["ORPOTrainer", "CPOTrainer"])
def test_rows_tokenized_by_a_script_are_predicted_unchanged(kind, folder, tmp_path):
    rows = as_dataset(pairs(5))
    trainer = trainer_with(kind, recording("tokenize_row", False), folder, tmp_path, {"eval_dataset": rows})
    expected = trainer.evaluate()["eval_loss"]
    assert trainer.predict(trainer.eval_dataset).metrics["test_loss"] == pytest.approx(expected)
    assert trainer.evaluate(trainer.eval_dataset)["eval_loss"] == pytest.approx(expected)


@pytest.mark.parametrize("kind", representative_slow(KINDS, 1))
def test_custom_collator_works_with_an_override(kind, folder, tmp_path):
    options = {"data_collator": KINDS[kind]}
    custom, defaults = (
        trainer_with(kind, bases, folder, tmp_path / bases.__name__, options)
        for bases in (recording("compute_loss"), NoOverride)
    )
    assert losses(custom) == pytest.approx(losses(defaults), rel=1e-5)


def test_adapter_and_precomputed_reference_work_with_an_override(folder, tmp_path):
    result = []
    for bases in (recording("compute_loss"), NoOverride):
        lora = LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")
        for precomputes in (False, True):
            trainer = trainer_with(
                "DPOTrainer", bases, folder, tmp_path, {"peft_config": lora}, precompute_ref_log_probs=precomputes
            )
            result.append((losses(trainer), weights(trainer)))
    for one, moved in result[1:]:
        assert one == pytest.approx(result[0][0], rel=1e-5)
        assert all(torch.allclose(value, result[0][1][name], atol=1e-6) for name, value in moved.items())


def train_and_write(kind, model, output, name):
    """Train and evaluate on seven rows, an unequal number per process; rank 0 writes the results."""
    rows = as_dataset(labelled_examples(7) if kind == "KTOTrainer" else pairs(7))
    count = int(os.environ.get("WORLD_SIZE", "1"))
    subclass = type("Mine", (recording(name), getattr(burnish, kind)), {}) if name else None
    trainer = make(
        kind, model, output, rows, {"eval_dataset": rows}, subclass, per_device_train_batch_size=4 // count,
        max_steps=2, per_device_eval_batch_size=2,
    )  # fmt: skip
    result, evaluated = losses(trainer), trainer.evaluate()
    if trainer.is_world_process_zero():
        Path(output, "found.json").write_text(json.dumps([*result, evaluated["eval_loss"]]))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "name"),
    [("DPOTrainer", "_compute_loss"), ("KTOTrainer", "compute_loss"), ("RewardTrainer", "training_step"),
     ("ORPOTrainer", "concatenated_forward")],
)  # fmt: skip
def test_override_in_two_processes_changes_nothing(kind, name, folder, tmp_path):
    for output in ("one", "two"):
        (tmp_path / output).mkdir()
    train_and_write(kind, folder / "model", tmp_path / "one", None)
    in_two_processes(train_and_write, kind, str(folder / "model"), str(tmp_path / "two"), name)
    one, two = (json.loads((tmp_path / output / "found.json").read_text()) for output in ("one", "two"))
    assert two == pytest.approx(one, rel=1e-4)


@pytest.mark.parametrize("kind", ["DPOTrainer", "KTOTrainer", "SFTTrainer"])
def test_evaluation_of_the_loss_alone_does_not_ask_for_outputs(kind, folder, tmp_path):
    """As in TRL; so an override that returns only the loss can be evaluated."""

    class LossOnly(getattr(burnish, kind)):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            return super().compute_loss(model, inputs, num_items_in_batch=num_items_in_batch) * 0 + 7

    rows = [{"text": "one two"}] * 4 if kind == "SFTTrainer" else None
    trainer_args = {"eval_dataset": as_dataset(rows or (labelled_examples() if kind == "KTOTrainer" else pairs()))}
    trainer = make(kind, folder / "model", tmp_path, rows, subclass=LossOnly, trainer_args=trainer_args)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(7)


@pytest.mark.parametrize(
    ("kind", "name"), [("DPOTrainer", "dpo_loss"), ("DPOTrainer", "tokenize_row"), ("KTOTrainer", "kto_loss")]
)
def test_method_of_earlier_versions_is_named(kind, name, folder, tmp_path):
    subclass = type("Mine", (getattr(burnish, kind),), {name: lambda self, *args: None})
    with pytest.warns(UserWarning, match=f"Mine overrides {name}, which burnish does not call"):
        make(kind, folder / "model", tmp_path, subclass=subclass)
