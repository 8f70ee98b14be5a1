"""Overridden methods: each method that the docstring of ``Trainer`` lists is called."""

import inspect
import json
import re
import textwrap
import warnings
from collections import UserDict, defaultdict
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import pytest
import torch
import transformers
from torch.utils.data import DataLoader, SequentialSampler

import burnish
from burnish import Trainer, UserError
from burnish.trainer.constructor import PEER_METHODS, warn_about_unused_overrides
from tiny_models import tiny_model
from trainer_run import (
    Regression,
    arguments,
    gpt2,
    losses,
    make_trainer,
    points,
    same,
    text_rows,
    transformers_arguments,
    weights,
)

pytestmark = pytest.mark.run


def trained(folder, kind=Trainer, **options):
    trainer = make_trainer(folder, kind, **options)
    trainer.train()
    return trainer


def test_docstring_lists_the_tested_overrides():
    tests = inspect.getsource(inspect.getmodule(trained))
    for name in Trainer.__doc__.split("which the run calls:")[1].split("``")[1::2]:
        assert name in tests, name


class Pair(NamedTuple):
    x: torch.Tensor
    labels: torch.Tensor


class Movable:
    """A custom batch class that records how it is moved."""

    def __init__(self, x, labels, moves=0):
        self.x, self.labels, self.moves = x, labels, moves

    def to(self, device):
        return Movable(self.x.to(device), self.labels.to(device), self.moves + 1)


class Named(dict):
    def __init__(self, values, tag):
        super().__init__(values)
        self.tag = tag


BATCHES = {
    "a tuple": lambda x, labels: (x, labels),
    "a named tuple": Pair,
    "an object": Movable,
    "a named tuple inside": lambda x, labels: {"pair": Pair(x, labels), "labels": labels},
    "an object inside": lambda x, labels: {"pair": [Movable(x, labels)], "labels": labels},
    "a dict with a factory": lambda x, labels: defaultdict(list, x=x, labels=labels),
    "a dict with arguments of its own": lambda x, labels: Named({"x": x, "labels": labels}, "tag"),
    "a dict by another name": lambda x, labels: UserDict(x=x, labels=labels),
    "a mapping that cannot be changed": lambda x, labels: MappingProxyType({"x": x, "labels": labels}),
}


@pytest.mark.parametrize("kind", BATCHES)
def test_compute_loss_receives_batch_class_of_the_collator(kind, tmp_path):
    recorded = []

    class CustomTrainer(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            recorded.append(inputs)
            result = inputs["pair"] if isinstance(inputs, dict) and "pair" in inputs else inputs
            result = result[0] if isinstance(result, list) else result
            assert getattr(result, "moves", 1) == 1
            named = isinstance(result, Mapping)
            x, labels = (
                (result["x"], result["labels"])
                if named
                else result
                if type(result) is tuple
                else (result.x, result.labels)
            )
            return model(x, labels)["loss"]

    def collate(rows):
        stacked = [torch.stack([torch.as_tensor(row[name]) for row in rows]) for name in ("x", "labels")]
        return BATCHES[kind](*stacked)

    options = {"remove_unused_columns": False, "max_steps": 2, "gradient_accumulation_steps": 2}
    ours = make_trainer(tmp_path, CustomTrainer, trainer={"data_collator": collate}, **options)
    ours.train()
    assert all(type(batch) is type(BATCHES[kind](torch.ones(1), torch.ones(1))) for batch in recorded)
    assert losses(ours) == pytest.approx(losses(trained(tmp_path, max_steps=2, gradient_accumulation_steps=2)))


def test_compute_loss_mean_is_weighted_by_its_share_of_the_step(tmp_path):
    class AbsoluteError(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            outputs = model(inputs["x"])
            loss = (outputs["logits"] - inputs["labels"]).abs().mean()
            return (loss, outputs) if return_outputs else loss

    cut = trained(tmp_path, AbsoluteError, per_device_train_batch_size=3, gradient_accumulation_steps=2, optim="sgd")
    whole = trained(tmp_path, AbsoluteError, per_device_train_batch_size=6, optim="sgd")
    assert losses(cut) == pytest.approx(losses(whole))
    assert losses(cut) != pytest.approx(losses(trained(tmp_path, per_device_train_batch_size=6, optim="sgd")))


def test_compute_loss_with_legacy_signature_works(tmp_path):
    class LegacySignature(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False):
            return super().compute_loss(model, inputs, return_outputs)

    assert losses(trained(tmp_path, LegacySignature)) == losses(trained(tmp_path))


def test_compute_loss_can_normalize_by_num_items_in_batch(tmp_path):
    recorded = []

    class CustomTrainer(Trainer):
        loss_is_scaled_for_ga = True

        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            recorded.append(float(num_items_in_batch))
            error = model(inputs["x"])["logits"] - inputs["labels"]
            return error.square().sum() / num_items_in_batch

    def made(kind, **options):
        trainer = make_trainer(tmp_path, kind, per_device_train_batch_size=3, max_steps=4, optim="sgd", **options)
        trainer.model_accepts_loss_kwargs = kind is CustomTrainer
        trainer.train()
        return losses(trainer)

    assert made(CustomTrainer, gradient_accumulation_steps=2) == pytest.approx(
        made(Trainer, gradient_accumulation_steps=2)
    )
    assert recorded == [6, 6] * 3 + [4, 4]  # the items of the entire step; of 22 rows, the last step has 4


def test_training_step_can_call_backward_itself(tmp_path):
    class Half(Trainer):
        def training_step(self, model, inputs, num_items_in_batch=None):
            model.train()
            loss = self.compute_loss(model, self._prepare_inputs(inputs)) / 2
            self.accelerator.backward(loss)
            return loss.detach()

    half = trained(tmp_path, Half, optim="sgd", learning_rate=0.2, max_grad_norm=0)
    whole = trained(tmp_path, optim="sgd", learning_rate=0.1, max_grad_norm=0)
    assert [2 * loss for loss in losses(half)] == pytest.approx(losses(whole))


def test_prediction_step_override_provides_predictions(tmp_path):
    class Shifted(Trainer):
        def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
            loss, logits, labels = super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
            return loss, logits + 100, labels

    plain = make_trainer(tmp_path).predict(points(5)).predictions
    assert make_trainer(tmp_path, Shifted).predict(points(5)).predictions == pytest.approx(plain + 100)


def test_evaluation_loop_evaluate_and_predict_overrides_are_called(tmp_path):
    recorded = []

    class CallRecorder(Trainer):
        def evaluation_loop(self, dataloader, description, *args, **kwargs):
            recorded.append(description)
            return super().evaluation_loop(dataloader, description, *args, **kwargs)

        def evaluate(self, *args, **kwargs):
            metrics = super().evaluate(*args, **kwargs)
            recorded.append("evaluate")
            return {**metrics, "eval_own": self.state.global_step}

        def predict(self, *args, **kwargs):
            recorded.append("predict")
            return super().predict(*args, **kwargs)

    trainer = make_trainer(tmp_path, CallRecorder, eval_strategy="steps", eval_steps=5, max_steps=5,
                           save_strategy="best",
                           metric_for_best_model="own", trainer={"eval_dataset": points(4)})  # fmt: skip
    trainer.train()
    assert recorded == ["Evaluation", "evaluate"]
    assert trainer.state.best_metric == 5
    trainer.predict(points(3))
    assert recorded[2:] == ["predict", "Prediction"]


def test_get_train_dataloader_override_is_used_unchanged(tmp_path):
    rows, recorded = points(8), []

    class CustomTrainer(Trainer):
        def get_train_dataloader(self):
            return DataLoader(rows, batch_size=3, collate_fn=self.data_collator)

        def training_step(self, model, inputs, num_items_in_batch=None):
            recorded.extend(inputs["x"].tolist())
            return super().training_step(model, inputs, num_items_in_batch)

    trainer = trained(tmp_path, CustomTrainer, num_train_epochs=1)
    assert recorded == [float(row["x"]) for row in rows]
    assert trainer.state.global_step == 3


def test_get_eval_and_test_dataloader_and_num_examples_overrides(tmp_path):
    class CustomTrainer(Trainer):
        def get_eval_dataloader(self, eval_dataset=None):
            return DataLoader(points(6), batch_size=2, collate_fn=self.data_collator)

        def get_test_dataloader(self, test_dataset):
            return DataLoader(points(7), batch_size=2, collate_fn=self.data_collator)

        def num_examples(self, dataloader):
            sizes.append(super().num_examples(dataloader))
            return sizes[-1]

    sizes = []
    trainer = make_trainer(tmp_path, CustomTrainer)
    trainer.evaluate(points(2))
    assert len(trainer.predict(points(2)).predictions) == 7
    assert sizes == [6, 7]


def test_get_train_sampler_override_determines_order(tmp_path):
    class InOrder(Trainer):
        def _get_train_sampler(self, train_dataset=None):
            return SequentialSampler(self.train_dataset)

    ordered = trained(tmp_path, InOrder, num_train_epochs=1)
    assert losses(ordered) == losses(trained(tmp_path, train_sampling_strategy="sequential", num_train_epochs=1))


def test_sampler_override_without_a_dataset_determines_order(tmp_path):
    class InOrder(Trainer):
        def _get_train_sampler(self):
            return SequentialSampler(self.train_dataset)

    ordered = trained(tmp_path, InOrder, num_train_epochs=1)
    assert losses(ordered) == losses(trained(tmp_path, train_sampling_strategy="sequential", num_train_epochs=1))


def test_overrides_of_earlier_versions_are_called_as_they_expect(tmp_path):
    class Earlier(Trainer):
        def log(self, logs):
            super().log({**logs, "twice": 2 * logs.get("loss", 0)})

        def _save_checkpoint(self, model, trial, metrics=None):
            super()._save_checkpoint(model, trial, metrics=metrics)

    trainer = trained(tmp_path, Earlier, max_steps=2, save_strategy="steps", save_steps=2)
    assert [log["twice"] for log in trainer.state.log_history[:2]] == [2 * loss for loss in losses(trainer)]
    assert (tmp_path / "checkpoint-2").is_dir()


def test_create_optimizer_and_create_scheduler_overrides(tmp_path):
    class CustomTrainer(Trainer):
        def create_optimizer(self, model=None):
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5)
            return self.optimizer

        def create_scheduler(self, num_training_steps, optimizer=None):
            self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
            return self.lr_scheduler

    trainer = trained(tmp_path, CustomTrainer, max_steps=3)
    assert [entry["learning_rate"] for entry in trainer.state.log_history[:3]] == [0.5, 0.25, 0.125]
    assert isinstance(trainer.optimizer, torch.optim.SGD)


def test_create_optimizer_and_scheduler_override(tmp_path):
    class CustomTrainer(Trainer):
        def create_optimizer_and_scheduler(self, num_training_steps):
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)
            self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1 / num_training_steps)

    trainer = trained(tmp_path, CustomTrainer, max_steps=4)
    assert {entry["learning_rate"] for entry in trainer.state.log_history[:4]} == {0.25}


def test_optimizer_is_created_once_if_all_its_methods_are_overridden(tmp_path):
    class CustomTrainer(Trainer):
        def create_optimizer_and_scheduler(self, num_training_steps):
            super().create_optimizer_and_scheduler(num_training_steps)

        def create_optimizer(self, model=None):
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=self.args.learning_rate)
            return self.optimizer

    own = trained(tmp_path, CustomTrainer, lr_scheduler_type="linear")
    rates = [log["learning_rate"] for log in own.state.log_history if "loss" in log]
    assert rates == sorted(rates, reverse=True)
    assert rates[0] > rates[-1]


def test_get_decay_parameter_names_and_get_optimizer_cls_and_kwargs_overrides(tmp_path):
    class CustomTrainer(Trainer):
        def get_decay_parameter_names(self, model):
            return ["b"]

        @staticmethod
        def get_optimizer_cls_and_kwargs(args, model=None):
            return torch.optim.SGD, {"lr": 0.3}

    trainer = trained(tmp_path, CustomTrainer, weight_decay=0.1, max_steps=1)
    decaying, plain = trainer.optimizer.param_groups
    assert decaying["params"] == [trainer.model.b]
    assert (decaying["weight_decay"], plain["weight_decay"], decaying["initial_lr"]) == (0.1, 0.0, 0.3)


def test_log_override_receives_and_can_change_all_logs(tmp_path):
    class CustomTrainer(Trainer):
        def log(self, logs, start_time=None):
            logs["perplexity"] = 2.0
            super().log(logs, start_time)

    trainer = trained(tmp_path, CustomTrainer, max_steps=2)
    assert len(trainer.state.log_history) == 3
    assert all(entry["perplexity"] == 2.0 for entry in trainer.state.log_history)


@pytest.mark.parametrize("name", ["save_model", "_save"])
def test_save_model_override_writes_every_checkpoint(tmp_path, name):
    def own(self, output_dir=None, *args, **kwargs):
        getattr(Trainer, name)(self, output_dir, *args, **kwargs)
        from pathlib import Path

        (Path(output_dir) / "mine.txt").write_text("here")

    trained(tmp_path, type("Own", (Trainer,), {name: own}), save_strategy="steps", save_steps=2, max_steps=4)
    assert (tmp_path / "checkpoint-2" / "mine.txt").read_text() == "here"
    resumed = make_trainer(tmp_path, save_strategy="steps", save_steps=2, max_steps=4)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert resumed.state.global_step == 4


def test_save_checkpoint_override_can_skip_saving(tmp_path):
    class SkippedSaves(Trainer):
        def _save_checkpoint(self, model, trial):
            if self.state.global_step == 4:
                super()._save_checkpoint(model, trial)

    trained(tmp_path, SkippedSaves, save_strategy="steps", save_steps=1, max_steps=5)
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-4"]


def test_prepare_inputs_override_changes_model_inputs(tmp_path):
    class Doubled(Trainer):
        def _prepare_inputs(self, inputs):
            inputs = super()._prepare_inputs(inputs)
            return {**inputs, "x": 2 * inputs["x"]}

    rows = [{**row, "x": 2 * row["x"]} for row in points()]
    assert same(weights(trained(tmp_path, Doubled)), weights(trained(tmp_path, train=rows)))


@pytest.mark.parametrize("is_scripted", [False, True])
def test_prepare_inputs_override_may_mask_labels(tmp_path, is_scripted):
    """If the model averages over labels, its loss is not scaled by the number of masked labels."""

    class TokenMean(torch.nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.embed, self.head = torch.nn.Embedding(8, 8), torch.nn.Linear(8, 8)

        def forward(self, input_ids, labels):
            logits = self.head(self.embed(input_ids))
            return {"loss": torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}

    def masked(self, inputs):
        inputs = super(type(self), self)._prepare_inputs(inputs)
        labels = inputs["labels"].clone()
        labels[:, :4] = -100
        return {**inputs, "labels": labels}

    def compute_loss(self, *arguments, **options):
        return super(type(self), self).compute_loss(*arguments, **options)

    rows = [{"input_ids": torch.arange(8), "labels": torch.arange(8)} for _ in range(8)]
    methods = {"_prepare_inputs": masked, **({"compute_loss": compute_loss} if is_scripted else {})}
    found = {}
    for kind, make in ((Trainer, arguments), (transformers.Trainer, transformers_arguments)):
        options = {"per_device_train_batch_size": 4, "max_steps": 2, "logging_steps": 1, "save_strategy": "no"}
        args = make(tmp_path, learning_rate=0.1, **options)
        trainer = type("Masked", (kind,), methods)(TokenMean(), args, train_dataset=rows)
        trainer.train()
        found[kind] = [(entry["loss"], entry["grad_norm"]) for entry in trainer.state.log_history if "loss" in entry]
    for ours, theirs in zip(*found.values(), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-3)


def test_prepare_input_override_receives_every_tensor(tmp_path):
    class Shifted(Trainer):
        def _prepare_input(self, data):
            return super()._prepare_input(data) + 1 if isinstance(data, torch.Tensor) else super()._prepare_input(data)

    moved = [{name: value + 1 for name, value in row.items()} for row in points()]
    assert losses(trained(tmp_path, Shifted)) == pytest.approx(losses(trained(tmp_path, train=moved)))


def test_get_eval_dataloader_override_receives_the_set(tmp_path):
    class CountingTrainer(Trainer):
        def get_eval_dataloader(self, eval_dataset):
            recorded.append(len(eval_dataset) if isinstance(eval_dataset, list) else eval_dataset)
            return super().get_eval_dataloader(eval_dataset)

    recorded = []
    for rows in (points(4), {"one": points(3)}):
        make_trainer(tmp_path, CountingTrainer, trainer={"eval_dataset": rows}).evaluate()
    assert recorded == [4, "one"]


def test_overrides_can_pass_every_argument_of_transformers_on():
    for name, theirs in inspect.getmembers(transformers.Trainer, inspect.isfunction):
        if name.startswith("__") or not hasattr(Trainer, name):
            continue
        ours = inspect.signature(getattr(Trainer, name)).parameters
        if all(parameter.kind is not parameter.VAR_KEYWORD for parameter in ours.values()):
            assert inspect.signature(theirs).parameters.keys() <= ours.keys(), name


def test_floating_point_ops_override_is_accumulated(tmp_path):
    class CountingTrainer(Trainer):
        def floating_point_ops(self, inputs):
            return 10

    trainer = trained(tmp_path, CountingTrainer, gradient_accumulation_steps=2, max_steps=3)  # 2, 2 and 2 micro-batches
    assert trainer.state.total_flos == 60


def test_floating_point_operations_are_complete_in_checkpoints_between_logs(tmp_path):
    class CountingTrainer(Trainer):
        def floating_point_ops(self, inputs):
            return 10

    options = {"max_steps": 5, "save_strategy": "steps", "save_steps": 2, "logging_steps": 3}
    trained(tmp_path, CountingTrainer, **options)
    saved = json.loads((tmp_path / "checkpoint-4" / "trainer_state.json").read_text())
    assert saved["total_flos"] == 40
    resumed = make_trainer(tmp_path, CountingTrainer, **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert resumed.state.total_flos == 50


def test_compute_loss_context_manager_wraps_forward_pass(tmp_path):
    import contextlib

    entered = []

    class CustomTrainer(Trainer):
        @contextlib.contextmanager
        def compute_loss_context_manager(self):
            entered.append(1)
            yield

    trained(tmp_path, CustomTrainer, max_steps=3)
    assert len(entered) == 3


def test_method_assigned_to_instance_is_used(tmp_path):
    trainer = make_trainer(tmp_path, max_steps=2)
    calls = []
    original = trainer.compute_loss
    trainer.compute_loss = lambda *args, **kwargs: calls.append(1) or original(*args, **kwargs)
    trainer.train()
    assert len(calls) == 2


def test_custom_model_needs_only_a_loss(tmp_path):
    trainer = trained(tmp_path, model=Regression(1.0, 1.0), num_train_epochs=30)
    assert weights(trainer)["a"].item() == pytest.approx(2, abs=0.3)


class RecordingTrainer(Trainer):
    """Overrides of methods that transformers' and TRL's trainers call on themselves; each records its name."""

    def _note(self, name):
        vars(self).setdefault("seen", []).append(name)

    def create_accelerator_and_postprocess(self):
        self._note("create_accelerator_and_postprocess")
        super().create_accelerator_and_postprocess()

    def _validate_args(self):
        self._note("_validate_args")
        super()._validate_args()

    def set_initial_training_values(self, args, dataloader):
        self._note("set_initial_training_values")
        return super().set_initial_training_values(args, dataloader)

    def get_total_train_batch_size(self, args):
        self._note("get_total_train_batch_size")
        return super().get_total_train_batch_size(args)

    def get_batch_samples(self, epoch_iterator, num_batches, device):
        self._note("get_batch_samples")
        return super().get_batch_samples(epoch_iterator, num_batches, device)

    def autocast_smart_context_manager(self, cache_enabled=True):
        self._note("autocast_smart_context_manager")
        return super().autocast_smart_context_manager(cache_enabled)

    def _get_learning_rate(self):
        self._note("_get_learning_rate")
        return super()._get_learning_rate()

    def store_flos(self):
        self._note("store_flos")
        super().store_flos()


@pytest.mark.parametrize("accumulation", [1, 3])
def test_overrides_that_only_call_super_change_nothing(accumulation, tmp_path):
    options = {"num_train_epochs": 2, "gradient_accumulation_steps": accumulation, "save_strategy": "epoch"}
    own, defaults = (trained(tmp_path / kind.__name__, kind, **options) for kind in (RecordingTrainer, Trainer))
    assert {*own.seen} == {name for name in vars(RecordingTrainer) if not name.startswith("__")} - {"_note"}
    logs_and_checkpoints_and_end = len(losses(own)) + 2 + 1
    assert own.seen.count("store_flos") == logs_and_checkpoints_and_end
    assert losses(own) == pytest.approx(losses(defaults), rel=1e-6)
    assert all(torch.allclose(weight, weights(defaults)[name], rtol=1e-6) for name, weight in weights(own).items())


def test_get_batch_samples_of_trainer_does_not_change_language_model(tmp_path):
    from trainer_run import gpt2, text_rows

    options = {"model": None, "train": text_rows(9), "num_train_epochs": 1, "gradient_accumulation_steps": 2,
               "per_device_train_batch_size": 2, "learning_rate": 1e-3}  # fmt: skip
    own, defaults = (
        trained(tmp_path / k.__name__, k, **{**options, "model": gpt2()}) for k in (RecordingTrainer, Trainer)
    )
    assert losses(own) == pytest.approx(losses(defaults), rel=1e-5)


def test_item_count_of_get_batch_samples_divides_the_loss(tmp_path):
    from trainer_run import gpt2, text_rows

    class Doubled(Trainer):
        def get_batch_samples(self, epoch_iterator, num_batches, device):
            samples, count = super().get_batch_samples(epoch_iterator, num_batches, device)
            return samples, 2 * count

    options = {
        "train": text_rows(8),
        "max_steps": 1,
        "gradient_accumulation_steps": 2,
        "per_device_train_batch_size": 2,
    }
    own, defaults = (trained(tmp_path / k.__name__, k, model=gpt2(), **options) for k in (Doubled, Trainer))
    assert losses(own)[0] == pytest.approx(losses(defaults)[0] / 2, rel=1e-5)


def test_get_batch_samples_override_without_a_device_is_called(tmp_path):
    calls = []

    class OfEarlierVersions(Trainer):
        def get_batch_samples(self, epoch_iterator, num_batches):
            calls.append(num_batches)
            return super().get_batch_samples(epoch_iterator, num_batches)

    own = trained(tmp_path / "own", OfEarlierVersions, max_steps=3)
    assert len(calls) == 3
    assert losses(own) == pytest.approx(losses(trained(tmp_path / "usual", max_steps=3)), rel=1e-6)


def test_batches_dropped_by_get_batch_samples_are_not_trained(tmp_path):
    class Half(Trainer):
        def get_batch_samples(self, epoch_iterator, num_batches, device):
            samples, count = super().get_batch_samples(epoch_iterator, num_batches, device)
            return samples[:1], count

    trainer = trained(tmp_path, Half, train=points(16), gradient_accumulation_steps=2, num_train_epochs=1)
    assert trainer.state.global_step == 2
    assert trainer.state.epoch == 1.0


def test_numbers_overridden_by_a_script_are_used_in_training(tmp_path):
    class ShortTraining(Trainer):
        def set_initial_training_values(self, args, dataloader):
            *values, _ = super().set_initial_training_values(args, dataloader)
            return (*values, 3)

        def _get_learning_rate(self):
            return 0.125

    trainer = trained(tmp_path, ShortTraining)
    assert trainer.state.global_step == trainer.state.max_steps == 3
    assert {log["learning_rate"] for log in trainer.state.log_history if "loss" in log} == {0.125}


def test_accelerator_created_by_a_script_is_rejected(tmp_path):
    class CustomTrainer(Trainer):
        def create_accelerator_and_postprocess(self):
            self.accelerator = object()

    with pytest.raises(UserError, match=r"Received: object"):
        make_trainer(tmp_path, CustomTrainer)


def test_validate_args_override_is_called(tmp_path):
    class StrictArguments(Trainer):
        def _validate_args(self):
            raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        make_trainer(tmp_path, StrictArguments)


class PeerCalls(Trainer):
    """Overrides that only accept transformers' arguments, positional or by name."""

    def training_step(self, model, inputs, item_count):
        return super().training_step(model, inputs, item_count)

    def create_scheduler(self, num_training_steps):
        return super().create_scheduler(num_training_steps)

    def evaluation_loop(self, dataloader, *, description, ignore_keys, metric_key_prefix, **more):
        assert more == ({} if description == "Prediction" else {"prediction_loss_only": True})
        return super().evaluation_loop(
            dataloader, description, ignore_keys=ignore_keys, metric_key_prefix=metric_key_prefix, **more
        )

    def evaluate(self, *, eval_dataset=None, ignore_keys=None, metric_key_prefix="eval"):
        return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)

    def _get_dataloader(self, *, dataset, description, batch_size, sampler_fn, is_training=False, dataloader_key=None):
        assert (dataloader_key is None) == (description != "Evaluation")
        return super()._get_dataloader(dataset, description, batch_size, sampler_fn, is_training, dataloader_key)

    def _remove_unused_columns(self, dataset, *, description):
        return super()._remove_unused_columns(dataset, description)


@pytest.mark.parametrize("overrides_pair", [False, True])
def test_overrides_are_called_with_arguments_of_transformers(overrides_pair, tmp_path):
    from datasets import Dataset

    def pair(self, num_training_steps):
        Trainer.create_optimizer_and_scheduler(self, num_training_steps)

    kind = type("Own", (PeerCalls,), {"create_optimizer_and_scheduler": pair} if overrides_pair else {})
    rows = Dataset.from_list([{name: float(value) for name, value in row.items()} for row in points()])
    evals = {"eval_dataset": {"one": rows, "two": rows}}
    options = {"train": rows, "trainer": evals, "eval_strategy": "epoch"}
    own, defaults = (trained(tmp_path / one.__name__, one, **options) for one in (kind, Trainer))
    assert losses(own) == pytest.approx(losses(defaults))
    assert own.evaluate()["eval_two_loss"] == pytest.approx(defaults.evaluate()["eval_two_loss"])
    assert len(own.predict(rows).predictions) == len(rows)


def test_override_moves_each_model_of_model_init(tmp_path):
    class MoveRecorder(Trainer):
        def _move_model_to_device(self, model, device):
            moved.append(model)
            super()._move_model_to_device(model, device)

    moved = []
    trainer = MoveRecorder(
        model_init=lambda: Regression(), args=arguments(tmp_path, max_steps=1), train_dataset=points()
    )
    first = trainer.model
    trainer.train()
    assert moved[0] is first
    assert moved[-1] is trainer.model
    assert len(moved) == 2


def test_process_zero_overrides_set_the_state_of_training(tmp_path):
    class SecondProcess(Trainer):
        def is_world_process_zero(self):
            return False

        def is_local_process_zero(self):
            return False

    state = trained(tmp_path, SecondProcess, max_steps=1).state
    assert not state.is_world_process_zero
    assert not state.is_local_process_zero


def test_override_that_is_never_called_is_named(tmp_path):
    class Older(Trainer):
        def get_tp_size(self):
            raise AssertionError

    with pytest.warns(UserWarning, match="Older overrides get_tp_size, which burnish does not call"):
        make_trainer(tmp_path, kind=Older)


def copied(name):
    """Return a trainer class with a copy of a method of transformers' class, as in scripts."""
    method = inspect.unwrap(getattr(transformers.Trainer, name))
    names = {**vars(transformers.trainer), "Trainer": Trainer}
    exec(f"from __future__ import annotations\n{textwrap.dedent(inspect.getsource(method))}", names)
    return type("Copying", (Trainer,), {name: names[name]})


COPIED = [
    "compute_loss", "training_step", "prediction_step", "evaluation_loop", "evaluate", "predict", "get_batch_samples",
    "_get_num_items_in_batch", "log", "create_optimizer", "get_train_dataloader", "get_total_train_batch_size",
    "_validate_args",
]  # fmt: skip


@pytest.mark.sample(6)
@pytest.mark.parametrize("name", COPIED)
def test_copy_of_a_method_of_transformers_changes_nothing(name, tmp_path):
    results = []
    for kind in (Trainer, copied(name)):
        trainer = trained(
            tmp_path / kind.__name__, kind, model=gpt2(), train=text_rows(8), gradient_accumulation_steps=2,
            trainer={"eval_dataset": text_rows(4), "compute_metrics": lambda given: {"n": len(given.label_ids)}},
            eval_strategy="epoch", num_train_epochs=2,
        )  # fmt: skip
        evaluations = [log["eval_loss"] for log in trainer.state.log_history if "eval_loss" in log]
        assert trainer.state.log_history[-2]["eval_n"] == 4
        results.append([*losses(trainer), *evaluations, trainer.predict(text_rows(2)).metrics["test_loss"]])
    assert results[1] == pytest.approx(results[0], rel=1e-5)


def test_copy_of_a_method_that_saves_names_the_remedy(tmp_path):
    trainer = make_trainer(tmp_path, copied("_save_checkpoint"), save_strategy="epoch", num_train_epochs=1)
    with pytest.raises(AttributeError, match=r"no attribute '_save_optimizer_and_scheduler'.*call super"):
        trainer.train()
    with pytest.raises(AttributeError, match=r"no attribute 'misspelled'$"):
        _ = trainer.misspelled


def test_attribute_error_inside_a_property_keeps_its_name(tmp_path):
    class AttributeMixin:
        def __getattr__(self, name):
            if name == "answer":
                return 42
            raise AttributeError(name)

    class CustomTrainer(Trainer, AttributeMixin):
        @property
        def shown(self):
            return self.args.misspelled

    trainer = make_trainer(tmp_path, CustomTrainer)
    with pytest.raises(AttributeError, match="misspelled"):
        _ = trainer.shown
    assert trainer.answer == 42
    assert not hasattr(trainer, "misspelled")


def test_overridden_count_of_items_divides_the_loss(tmp_path):
    class Half(Trainer):
        def _get_num_items_in_batch(self, batch_samples, device):
            return super()._get_num_items_in_batch(batch_samples, device) * 2

    options = {"train": text_rows(8), "max_steps": 1}
    whole, half = (losses(trained(tmp_path / k.__name__, k, model=gpt2(), **options))[0] for k in (Trainer, Half))
    assert half == pytest.approx(whole / 2, rel=1e-5)


SOURCES = "\n".join(file.read_text() for file in Path(burnish.__file__).parent.rglob("*.py"))
OVERRIDES = json.loads(PEER_METHODS.read_text())


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, names in OVERRIDES.items() for name in names])
def test_peer_override_is_called_or_named_in_a_warning(kind, name):
    """Each method of burnish's class is called somewhere in the package, or marked as for scripts only."""
    original = getattr(burnish, kind)
    subclass = type("Mine", (original,), {name: lambda self, *args, **kwargs: None})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_about_unused_overrides(subclass)
    is_warned = any(f"Mine overrides {name}, which burnish does not call" in str(one.message) for one in caught)
    is_called = hasattr(original, name) and bool(re.search(rf"[.]{name}[(,)]", SOURCES))
    is_called = is_called and name not in getattr(original, "_uncalled", ())
    assert is_warned != is_called


def test_every_trainer_lists_methods_called_by_its_peer():
    assert {name for name in burnish.__all__ if name.endswith("Trainer")} == OVERRIDES.keys()


class Scored(torch.nn.Module):
    """A linear layer; under autocast, its products are in bfloat16."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def forward(self, x, labels=None):
        y = self.layer(x[:, None])[:, 0]
        return {"logits": y} if labels is None else {"loss": (y - labels).square().mean(), "logits": y}


@pytest.mark.parametrize("through", ["compute_loss", "compute_loss_func", "preprocess_logits_for_metrics"])
def test_under_autocast_a_script_reads_float32_outputs(through, tmp_path):
    seen = []

    class CustomTrainer(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            outputs = model(**inputs)
            seen.append(outputs["logits"].dtype)
            return (outputs["loss"], outputs) if return_outputs else outputs["loss"]

    def loss(outputs, labels, num_items_in_batch=None):
        seen.append(outputs["logits"].dtype)
        return (outputs["logits"] - labels).square().mean()

    def logits(logits, labels):
        seen.append(logits.dtype)
        return logits

    functions = {"compute_loss_func": loss, "preprocess_logits_for_metrics": logits}
    trainer_args = {through: functions[through]} if through in functions else {}
    kind = CustomTrainer if through == "compute_loss" else Trainer
    trainer_args |= {"eval_dataset": points(4), "compute_metrics": lambda _: {}}
    trainer = make_trainer(tmp_path, kind, Scored(), trainer=trainer_args, bf16=True, max_steps=1)
    trainer.train()
    trainer.evaluate()
    assert set(seen) == {torch.float32}
    assert not trainer.model._forward_hooks


@pytest.mark.parametrize("options", [{}, {"bf16": True}])
@pytest.mark.parametrize("name", ["compute_loss", "training_step"])
def test_override_that_calls_the_original_keeps_padding_free_batches(name, options, tmp_path, monkeypatch):
    calls = []
    original = burnish.trainer.methods.loss.mean_of_padding_free
    monkeypatch.setattr(
        burnish.trainer.methods.loss, "mean_of_padding_free", lambda *args: calls.append(1) or original(*args)
    )

    def method(self, *args, **kwargs):
        return getattr(Trainer, name)(self, *args, **kwargs)

    rows = [{"input_ids": [1, 2, 3, n], "attention_mask": [1] * 4, "labels": [1, 2, 3, n]} for n in (4, 7, 5, 3)]
    kind = type("Passing", (Trainer,), {name: method})
    make_trainer(tmp_path, kind, tiny_model(), rows, **options).train()
    assert calls


def test_gradients_sync_in_the_last_micro_batch_of_a_step(tmp_path):
    seen = []

    class CustomTrainer(Trainer):
        def training_step(self, model, inputs, num_items_in_batch=None):
            seen.append((self.accelerator.sync_gradients, self.accelerator.gradient_state.sync_gradients))
            return super().training_step(model, inputs, num_items_in_batch)

    trainer = trained(tmp_path, CustomTrainer, gradient_accumulation_steps=3, max_steps=2)
    assert seen == [(False, False), (False, False), (True, True)] * 2
    assert trainer.accelerator.sync_gradients
