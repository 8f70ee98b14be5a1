"""The Trainer: arguments, rejections, training, row order, and loss normalization."""

import importlib
import importlib.util
import json
import warnings
from dataclasses import dataclass, replace
from types import SimpleNamespace

import datasets
import numpy as np
import pytest
import torch
import transformers
from torch.utils.data import Dataset, IterableDataset
from transformers import DataCollatorWithPadding, default_data_collator

import burnish
from burnish import Trainer, TrainingArguments, UserError
from burnish.reexports import OWNER_OF, UNSUPPORTED
from burnish.trainer import reporting
from representative import representative_slow
from trainer_run import (
    Regression,
    arguments,
    bert,
    classes,
    gpt2,
    losses,
    make_trainer,
    parity,
    points,
    same,
    smooths_a_whole_step,
    text_rows,
    tiny_tokenizer,
    transformers_arguments,
    weights,
)  # fmt: skip

pytestmark = pytest.mark.run

BY_NAME = {case.name: case for case in parity.CASES}


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "name",
    [
        "causal LM, no dropout", "causal LM, accumulation, ragged last group",
        pytest.param("causal LM, label smoothing", marks=smooths_a_whole_step),
        pytest.param("classification, label smoothing", marks=smooths_a_whole_step),
        *representative_slow(
            ["causal LM, evaluation in between", "LoRA through peft", "a plain nn.Module",
             "causal LM, compute_loss_func", "causal LM, rows without a length", "several labels",
             "token classification", "question answering", "sequence to sequence", "schedule polynomial",
             "optimizer sgd, not clipped"], 3,
        ),
    ],
)  # fmt: skip
def test_training_matches_transformers_up_to_rounding(name):
    """The tolerance is that of float32 rounding. Losses and norms are compared instead of weights, because Adam
    amplifies rounding where the gradient is zero (docs/parity.md)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = parity.compare(BY_NAME[name], num_steps=12)
    assert result.steps == 12
    assert result.loss < 1e-5
    assert result.grad_norm < 1e-4
    assert result.learning_rate < 1e-12


@pytest.mark.parametrize(("name", "message"), [("parity", ["--only", "LoRA"]), ("parity_sft", ["text"])])
def test_parity_table_is_written_completely_or_not_at_all(name, message, monkeypatch):
    script = importlib.import_module(name)  # scripts/ is importable because of trainer_run
    monkeypatch.setattr(script, "table", lambda *_: pytest.fail("a part of the table was made"))
    with pytest.raises(SystemExit) as refused:
        script.main([*message, "--write"])
    assert refused.value.code


@pytest.mark.parametrize("name", [case.name for case in parity.CASES if case.differs and "ragged" not in case.name])
def test_accumulation_matches_one_large_batch(name):
    case = BY_NAME[name]
    whole = parity.Case(name, case.model, case.rows, {"per_device_train_batch_size": 6}, case.trainer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cut = parity.train(with_model(case), Trainer, TrainingArguments, 6)[0]
        large = parity.train(with_model(whole), Trainer, TrainingArguments, 6)[0]
    assert [entry["loss"] for entry in cut] == pytest.approx([entry["loss"] for entry in large], rel=1e-4)


def test_label_smoothing_with_accumulation_matches_one_large_batch():
    """With a label smoother that counts the labels of the step, and with one that does not."""
    case = BY_NAME["causal LM, label smoothing"]
    large = {**case.arguments, "per_device_train_batch_size": 6, "gradient_accumulation_steps": 1}
    made = [
        parity.train(with_model(replace(case, arguments=options)), Trainer, TrainingArguments, 6)[0]
        for options in (case.arguments, large)
    ]
    cut, whole = ([entry["loss"] for entry in entries] for entries in made)
    assert cut == pytest.approx(whole, rel=1e-4)
    assert case.arguments["gradient_accumulation_steps"] * case.arguments["per_device_train_batch_size"] == 6


def without_dropout(make):
    model = make()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return model


def with_model(case):
    return parity.Case(case.name, lambda: without_dropout(case.model), case.rows, case.arguments, case.trainer)


# --- accepted arguments -----------------------------------------------------------------------------------------------


def test_trainer_inherits_nothing_from_transformers_trainer():
    assert all("transformers" not in base.__module__ for base in Trainer.__mro__)


def test_torch_dataset_of_tensors_is_accepted(tmp_path):
    class Sentences(Dataset):
        def __len__(self):
            return 5

        def __getitem__(self, index):
            return {"input_ids": torch.tensor([1, index, 2]), "labels": torch.tensor(index % 3)}

    trainer = make_trainer(tmp_path, model=bert(), train=Sentences())
    assert trainer.train().global_step == 4


def test_columns_not_accepted_by_the_model_are_removed(tmp_path):
    import datasets

    rows = datasets.Dataset.from_list([{"x": float(i), "label": 2.0 * i, "note": "unused"} for i in range(8)])
    trainer = make_trainer(tmp_path, train=rows)
    assert set(next(iter(trainer.get_train_dataloader()))) == {"x", "labels"}
    trainer.train()
    plain = make_trainer(tmp_path, train=[{**row, "note": "unused"} for row in points()])
    assert set(next(iter(plain.get_train_dataloader()))) == {"x", "labels"}


def test_dataset_without_model_columns_is_rejected(tmp_path):
    import datasets

    trainer = make_trainer(tmp_path, train=datasets.Dataset.from_list([{"text": "a"}]))
    with pytest.raises(ValueError, match="No columns in the dataset match"):
        trainer.train()


def test_iterable_dataset_is_repeated_until_max_steps(tmp_path):
    class Rows(IterableDataset):
        def __iter__(self):
            return iter(points(6))

    trainer = make_trainer(tmp_path, train=Rows(), max_steps=5, num_train_epochs=1)
    trainer.train()
    assert trainer.state.global_step == 5
    with pytest.raises(ValueError, match="set `max_steps`"):
        make_trainer(tmp_path, train=Rows())


@pytest.mark.parametrize("max_steps", [-1, 2])
@pytest.mark.parametrize(("count", "drops"), [(0, False), (0, True), (3, True)])
def test_data_loader_without_batches_is_rejected(tmp_path, count, drops, max_steps):
    options = {"per_device_train_batch_size": 4, "dataloader_drop_last": drops, "max_steps": max_steps}
    with pytest.raises(ValueError, match="The training data loader has no batches") as caught:
        make_trainer(tmp_path, train=points(count) if count else [], **options).train()
    assert ("dataloader_drop_last" in str(caught.value)) is drops


def test_empty_iterable_dataset_stops_with_a_warning(tmp_path):
    class EmptyStream(IterableDataset):
        def __iter__(self):
            return iter(())

    assert make_trainer(tmp_path, train=EmptyStream(), max_steps=5).train().global_step == 0


def test_collator_is_derived_from_processing_class(tmp_path, recwarn):
    tokenizer = tiny_tokenizer()
    assert isinstance(
        make_trainer(tmp_path, trainer={"processing_class": tokenizer}).data_collator, DataCollatorWithPadding
    )
    with pytest.warns(FutureWarning, match="processing_class"):
        assert make_trainer(tmp_path, trainer={"tokenizer": tokenizer}).processing_class is tokenizer


def test_transformers_arguments_are_accepted(tmp_path):
    theirs = transformers.TrainingArguments(str(tmp_path), use_cpu=True, learning_rate=0.3, report_to="none")
    trainer = Trainer(Regression(), theirs, train_dataset=points())
    assert (trainer.args.learning_rate, trainer.args.use_cpu) == (0.3, True)


def test_checkpointing_of_arguments_before_transformers_5_23_is_kept(tmp_path):
    theirs = SimpleNamespace(output_dir=str(tmp_path), use_cpu=True, gradient_checkpointing=True)
    assert Trainer(Regression(), theirs, train_dataset=points()).args.activation_checkpointing


def test_own_fields_and_attributes_of_transformers_arguments_are_kept(tmp_path):
    @dataclass
    class WithField(transformers.TrainingArguments):
        scale: float = 1.0

    class WithArgument(transformers.TrainingArguments):
        def __init__(self, *args, scale=1.0, **kwargs):
            super().__init__(*args, **kwargs)
            self.scale = scale

    for kind in (WithField, WithArgument):
        theirs = kind(str(tmp_path), scale=0.5, use_cpu=True, report_to="none")
        theirs.added_later = [1]
        args = Trainer(Regression(), theirs, train_dataset=points()).args
        assert isinstance(args, TrainingArguments)
        assert (args.scale, args.added_later) == (0.5, [1])


def test_model_init_creates_a_new_model_for_every_training(tmp_path):
    trainer = Trainer(args=arguments(tmp_path, max_steps=3), train_dataset=points(), model_init=lambda: Regression())
    trainer.train()
    first = weights(trainer)
    trainer.train()
    assert same(first, weights(trainer))


def test_gradients_of_parameters_without_an_optimizer_are_dropped(tmp_path):
    """A script may give its optimizer only some of the trainable parameters, without freezing the others."""
    model = Regression()
    optimizer = torch.optim.SGD([model.a], lr=0.0)
    of_b = []

    class Gradients(transformers.TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
            of_b.append(model.b.grad.item())

    trainer = make_trainer(
        tmp_path, model=model, train=points(4), num_train_epochs=3,
        trainer={"optimizers": (optimizer, None), "callbacks": [Gradients()]},
    )  # fmt: skip
    trainer.train()
    norms = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
    assert len(norms) == 3
    assert of_b == pytest.approx([of_b[0]] * 3)
    assert norms == pytest.approx([norms[0]] * 3)


def test_given_optimizers_are_used(tmp_path):
    model = Regression()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    trainer = make_trainer(tmp_path, model=model, max_steps=2, trainer={"optimizers": (optimizer, schedule)})
    trainer.train()
    assert trainer.optimizer is optimizer
    assert [entry["learning_rate"] for entry in trainer.state.log_history[:2]] == [1.0, 0.5]
    by_class = make_trainer(tmp_path, max_steps=1, trainer={"optimizer_cls_and_kwargs": (torch.optim.SGD, {"lr": 0.7})})
    by_class.train()
    assert by_class.optimizer.param_groups[0]["initial_lr"] == 0.7


# --- rejected arguments -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({}, RuntimeError, "either `model` or `model_init`"),
        ({"model": Regression(), "model_init": Regression}, ValueError, "but not both"),
        ({"model_init": lambda: Regression(), "optimizers": (torch.optim.SGD([torch.zeros(1)]), None)}, RuntimeError,
          "model_init"),
        ({"model": Regression(), "optimizers": (torch.optim.SGD([torch.zeros(1)]), None),
          "optimizer_cls_and_kwargs": (torch.optim.SGD, {})}, RuntimeError, "optimizer_cls_and_kwargs"),
        ({"model": Regression(), "data_collator": object()}, TypeError, "must be a function, or"),
        ({"model_init": lambda a, b: Regression()}, RuntimeError, "0 or 1 argument"),
        ({"model_init": lambda: None}, RuntimeError, "should not return None"),
    ],
)  # fmt: skip
def test_contradictory_trainer_arguments_are_rejected(tmp_path, options, error, message):
    with pytest.raises(error, match=message):
        Trainer(args=arguments(tmp_path), train_dataset=points(), **options)


def test_eval_strategy_requires_a_dataset_and_so_does_training(tmp_path):
    with pytest.raises(ValueError, match="`eval_strategy` is steps, but `eval_dataset` is missing"):
        make_trainer(tmp_path, eval_strategy="steps", eval_steps=2)
    with pytest.raises(ValueError, match="training requires a train_dataset"):
        Trainer(Regression(), arguments(tmp_path)).train()
    with pytest.raises(ValueError, match="evaluation requires an eval_dataset"):
        make_trainer(tmp_path).evaluate()


def test_train_rejects_unknown_keywords(tmp_path):
    with pytest.raises(TypeError, match="modle_path"):
        make_trainer(tmp_path).train(modle_path="x")
    with pytest.warns(FutureWarning, match="resume_from_checkpoint"), pytest.raises(ValueError, match="Can't find"):
        make_trainer(tmp_path).train(model_path=str(tmp_path / "none"))


def test_model_without_loss_is_rejected_with_its_outputs(tmp_path):
    rows = [{"x": row["x"]} for row in points()]
    with pytest.raises(ValueError, match="did not return a loss from the inputs, only the following keys: logits"):
        make_trainer(tmp_path, train=rows).train()


@pytest.mark.parametrize("is_evaluated", [False, True])
def test_out_of_range_ids_and_labels_are_reported_with_a_remedy(tmp_path, is_evaluated):
    def run(model, rows):
        trainer = make_trainer(tmp_path, model=model, train=rows, trainer={"eval_dataset": rows})
        trainer.evaluate() if is_evaluated else trainer.train()

    words = [{"input_ids": [1, 2, 10_000], "labels": [1, 2, 3]}] * 4
    with pytest.raises(UserError, match=r"input_ids must be below \d+, .*: 10000\.\n.*resize_token_embeddings"):
        run(gpt2(), words)
    with pytest.raises(UserError, match=r"labels must be below 3, .*num_labels\. Received: 5\.\n.*num_labels=6"):
        run(bert(), [{"input_ids": [1, 2, 3], "labels": 5}] * 4)


def test_dict_of_train_datasets_is_rejected_with_its_names(tmp_path):
    rows = datasets.DatasetDict({"train": datasets.Dataset.from_list([{"x": 1.0, "labels": 2.0}]), "test": None})
    with pytest.raises(UserError, match=r"Received: DatasetDict with the splits train, test\.\n.*dataset\[\"train\"\]"):
        make_trainer(tmp_path, train=rows)


def test_unsupported_sampling_is_rejected_by_name(tmp_path):
    with pytest.raises(ValueError, match="batch_rebalance"):
        make_trainer(tmp_path, train_sampling_strategy="batch_rebalance").train()


# --- order, steps, state ----------------------------------------------------------------------------------------------


def test_order_does_not_depend_on_global_generator_state(tmp_path):
    plain = make_trainer(tmp_path)
    plain.train()
    disturbed = make_trainer(tmp_path)
    torch.manual_seed(123)
    disturbed.train()
    assert losses(plain) == losses(disturbed)


def test_data_seed_overrides_seed_for_the_order(tmp_path):
    def order(**options):
        trainer = make_trainer(tmp_path, **options)
        return [float(x) for batch in trainer.get_train_dataloader() for x in batch["x"]]

    assert order(data_seed=7, seed=1) == order(data_seed=7, seed=2) != order(seed=1)


def test_steps_and_epochs_are_counted_as_in_transformers(tmp_path):
    trainer = make_trainer(tmp_path, gradient_accumulation_steps=4, per_device_train_batch_size=2, num_train_epochs=1.5)
    trainer.train()
    # 11 micro-batches make 3 groups, the last of 3; 1.5 epochs are 5 steps, begun in 2 epochs.
    assert (trainer.state.max_steps, trainer.state.num_train_epochs) == (5, 2)
    assert [round(entry["epoch"], 4) for entry in trainer.state.log_history[:5]] == [
        0.3636,
        0.7273,
        1.0,
        1.3636,
        1.7273,
    ]


def test_optimizer_and_scheduler_are_none_before_training(tmp_path):
    trainer = make_trainer(tmp_path, max_steps=1)
    assert trainer.optimizer is None
    assert trainer.lr_scheduler is None
    assert not trainer.is_in_train
    trainer.train()
    assert trainer.optimizer is not None
    assert trainer.lr_scheduler is not None
    assert not trainer.is_in_train


def test_train_returns_its_summary(tmp_path):
    output = make_trainer(tmp_path).train()
    assert output.global_step == 12
    assert output.training_loss == pytest.approx(output.metrics["train_loss"])
    assert {"train_runtime", "train_samples_per_second", "train_steps_per_second", "total_flos", "epoch"} <= set(
        output.metrics
    )


class Detached(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return super().compute_loss(model, inputs).detach()


@pytest.mark.parametrize("kind", [Trainer, Detached])
def test_loss_without_a_gradient_is_rejected_with_the_remedy(kind, tmp_path):
    trainer = make_trainer(tmp_path, kind)
    trainer.model.requires_grad_(kind is Detached)
    with pytest.raises(UserError, match="does not depend on any trainable parameter") as caught:
        trainer.train()
    assert "requires_grad" in str(caught.value)


def test_tokens_are_counted_on_request(tmp_path):
    rows = [{**row, "attention_mask": torch.tensor([1] * 8 + [0] * 4)} for row in text_rows(8)]
    every = make_trainer(tmp_path, model=gpt2(), train=rows, num_train_epochs=1, include_num_input_tokens_seen=True)
    every.train()
    real = make_trainer(
        tmp_path, model=gpt2(), train=rows, num_train_epochs=1, include_num_input_tokens_seen="non_padding"
    )
    real.train()
    assert every.state.log_history[-1]["num_input_tokens_seen"] == 8 * 12
    assert real.state.log_history[-1]["num_input_tokens_seen"] == 8 * 8
    assert "train_tokens_per_second" in every.state.log_history[0]


def test_tokens_are_counted_up_to_an_evaluation_and_a_checkpoint_between_two_logs(tmp_path):
    seen = []

    class TokenReader(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            seen.append(state.num_input_tokens_seen)

    trainer = make_trainer(
        tmp_path, model=gpt2(), train=text_rows(8), num_train_epochs=1, logging_steps=4,
        per_device_train_batch_size=2, eval_strategy="steps", eval_steps=3, save_strategy="steps", save_steps=3,
        include_num_input_tokens_seen=True, trainer={"callbacks": [TokenReader()], "eval_dataset": text_rows(2)},
    )  # fmt: skip
    trainer.train()
    evaluation = next(log for log in trainer.state.log_history if "eval_loss" in log)
    assert (evaluation["step"], evaluation["num_input_tokens_seen"]) == (3, 3 * 2 * 12)
    saved = json.loads((tmp_path / "checkpoint-3" / "trainer_state.json").read_text())
    assert saved["num_input_tokens_seen"] == 3 * 2 * 12
    assert seen == [24, 48, 72, 96]
    assert trainer.state.num_input_tokens_seen == 96


def test_padding_is_identified_by_token_id_without_a_mask(tmp_path):
    class Padding:
        pad_token_id = 0

    rows = [{name: row[name].clone() for name in ("input_ids", "labels")} for row in text_rows(8)]
    for row in rows:
        row["input_ids"][:8].clamp_(min=1)
        row["input_ids"][8:] = 0
    options = {"model": gpt2(), "train": rows, "num_train_epochs": 1, "include_num_input_tokens_seen": "non_padding"}
    trainer = make_trainer(
        tmp_path, trainer={"processing_class": Padding(), "data_collator": default_data_collator}, **options
    )
    trainer.train()
    assert trainer.state.num_input_tokens_seen == 8 * 8


def test_all_tokens_are_counted_with_one_note_if_padding_is_unknown(tmp_path, monkeypatch):
    message: list[str] = []
    monkeypatch.setattr(transformers.logging.get_logger("transformers.trainer"), "warning", message.append)
    trainer = make_trainer(
        tmp_path, model=gpt2(), train=text_rows(8), num_train_epochs=1, include_num_input_tokens_seen="non_padding"
    )
    trainer.train()
    assert trainer.state.num_input_tokens_seen == 8 * 12
    assert ["Non-padding tokens cannot be counted" in sentence for sentence in message] == [True]


@pytest.mark.slow
def test_memory_metrics_of_every_stage_are_reported_on_request(tmp_path):
    trainer = make_trainer(tmp_path, skip_memory_metrics=False, num_train_epochs=1)
    assert {"init_mem_cpu_alloc_delta", "train_mem_cpu_alloc_delta"} <= set(trainer.train().metrics)
    assert "eval_mem_cpu_alloc_delta" in trainer.evaluate(points(4))
    assert "test_mem_cpu_alloc_delta" in trainer.predict(points(4)).metrics


def test_model_wrapped_by_torch_is_unwrapped(tmp_path):
    trainer = make_trainer(tmp_path)
    assert trainer.accelerator.unwrap_model(torch.nn.DataParallel(trainer.model)) is trainer.model


def test_accelerate_num_steps_sets_accumulation_unless_both_are_given(tmp_path):
    by_accelerate = {"gradient_accumulation_kwargs": {"num_steps": 3}}
    trainer = make_trainer(tmp_path, accelerator_config=by_accelerate)
    trainer.train()
    plain = make_trainer(tmp_path, gradient_accumulation_steps=3)
    plain.train()
    assert trainer.args.gradient_accumulation_steps == 3
    assert same(weights(trainer), weights(plain))
    with pytest.raises(ValueError, match="names of the same option"):
        make_trainer(tmp_path, accelerator_config=by_accelerate, gradient_accumulation_steps=2)


def test_model_split_over_devices_is_rejected(tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM

    small = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1, "num_key_value_heads": 1}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=8, num_hidden_layers=1, **small))
    model._tp_size = 2  # as after from_pretrained(tp_plan="auto")
    with pytest.raises(ValueError, match="over 2 processes"):
        Trainer(model, TrainingArguments(str(tmp_path), use_cpu=True))


def test_accelerate_settings_are_readable_from_accelerator(tmp_path):
    defaults = make_trainer(tmp_path).accelerator
    assert (defaults.split_batches, defaults.dispatch_batches, defaults.even_batches) == (False, None, True)
    with pytest.warns(UserWarning, match="no effect"):
        options = make_trainer(tmp_path, accelerator_config={"dispatch_batches": True, "use_seedable_sampler": False})
    assert (options.accelerator.dispatch_batches, options.accelerator.use_seedable_sampler) == (True, False)


def test_floating_point_operations_are_counted(tmp_path):
    trainer = make_trainer(tmp_path, model=gpt2(), train=text_rows(8), num_train_epochs=1)
    trainer.train()
    assert trainer.state.total_flos == 6 * 8 * 12 * trainer.model.num_parameters(exclude_embeddings=True)


def test_non_finite_step_is_skipped_reported_and_not_logged(tmp_path, monkeypatch):
    message = []
    monkeypatch.setattr(reporting.logger, "warning", message.append)
    rows = points()
    rows[5] = {"x": torch.tensor(float("nan")), "labels": torch.tensor(0.0)}
    filtered = make_trainer(tmp_path, train=rows)
    filtered.train()
    assert [words.split(":")[0] for words in message] == [
        f"1 of the most recent optimizer steps (up to step {entry['step']}) was skipped"
        for entry in filtered.state.log_history if "skipped_steps" in entry
    ]  # fmt: skip
    assert len(message) == 2  # once in each epoch
    assert np.isfinite(losses(filtered)).all()
    assert all(torch.isfinite(w) for w in weights(filtered).values())
    shown = make_trainer(tmp_path, train=rows, logging_nan_inf_filter=False)
    shown.train()
    assert np.isnan(losses(shown)).sum() == 2  # once in each epoch


def test_out_of_memory_halves_micro_batches_and_keeps_the_step(tmp_path):
    class OutOfMemory(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.train_batch_size >= 16:
                raise RuntimeError("CUDA out of memory.")

    def made(callbacks, **options):
        trainer = make_trainer(tmp_path, max_steps=4, trainer={"callbacks": callbacks}, train=points(64), **options)
        trainer.train()
        return trainer

    halved = made([OutOfMemory()], per_device_train_batch_size=16, auto_find_batch_size=True)
    assert halved._train_batch_size == 8
    assert losses(halved) == pytest.approx(losses(made([], per_device_train_batch_size=16)), rel=1e-5)


def test_out_of_memory_is_reported_without_auto_find_batch_size(tmp_path):
    class OutOfMemory(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            raise RuntimeError("CUDA out of memory.")

    with pytest.raises(RuntimeError, match="out of memory"):
        make_trainer(tmp_path, trainer={"callbacks": [OutOfMemory()]}).train()


def test_embedding_noise_is_removed_after_training(tmp_path):
    trainer = make_trainer(tmp_path, model=gpt2(), train=text_rows(8), max_steps=2, neftune_noise_alpha=5.0)
    trainer.train()
    assert not trainer.model.get_input_embeddings()._forward_hooks


def test_gradient_checkpointing_changes_only_memory(tmp_path):
    def made(**options):
        trainer = make_trainer(tmp_path, model=gpt2(), train=text_rows(8), max_steps=3, learning_rate=1e-2, **options)
        trainer.train()
        return losses(trainer)

    assert made(activation_checkpointing=True) == pytest.approx(made(), rel=1e-5)


def test_group_by_length_is_supported(tmp_path):
    rows = [{"input_ids": [1] * n, "labels": n % 3} for n in (3, 9, 5, 12, 4, 8, 7, 6)]
    trainer = make_trainer(tmp_path, model=bert(), train=rows, train_sampling_strategy="group_by_length",
                           per_device_train_batch_size=1)  # fmt: skip
    lengths = [batch["input_ids"].shape[1] for batch in trainer.get_train_dataloader()]
    assert lengths[0] == 12
    assert sorted(lengths) == [3, 4, 5, 6, 7, 8, 9, 12]
    assert trainer.train().global_step == 16


def test_classification_is_learned(tmp_path):
    trainer = make_trainer(tmp_path, model=bert(), train=classes(), learning_rate=1e-2, num_train_epochs=15)
    trainer.train()
    assert losses(trainer)[-1] < losses(trainer)[0] / 2


# --- other methods ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("extractor", "column", "value"),
    [
        (transformers.Wav2Vec2FeatureExtractor, "input_values", [0.5] * 40),
        (transformers.CLIPImageProcessor, "pixel_values", [[[0.5] * 4] * 4] * 3),
    ],
)
def test_processing_class_without_tokens_is_saved(tmp_path, extractor, column, value):
    class Mean(transformers.PreTrainedModel):
        config_class = transformers.PreTrainedConfig

        def __init__(self, config):
            super().__init__(config)
            self.scale = torch.nn.Parameter(torch.ones(()))

        def forward(self, labels=None, **inputs):
            means = self.scale * inputs[column].flatten(1).mean(1)
            return {"loss": (means - labels).square().mean(), "logits": means}

    trainer = make_trainer(
        tmp_path, model=Mean(transformers.PreTrainedConfig()), train=[{column: value, "labels": 1.0}] * 8,
        trainer={"processing_class": extractor()}, remove_unused_columns=False, max_steps=2, save_strategy="steps",
    )  # fmt: skip
    assert trainer.train().global_step == 2
    assert (tmp_path / "checkpoint-2" / "preprocessor_config.json").is_file()


def test_metrics_are_printed_and_saved(tmp_path, capsys):
    import json

    trainer = make_trainer(tmp_path, max_steps=2)
    metrics = trainer.train().metrics
    trainer.log_metrics("train", metrics)
    trainer.save_metrics("train", metrics)
    trainer.save_state()
    assert "***** train metrics *****" in capsys.readouterr().out
    assert json.loads((tmp_path / "train_results.json").read_text())["train_loss"] == metrics["train_loss"]
    assert json.loads((tmp_path / "trainer_state.json").read_text())["global_step"] == 2
    assert trainer.metrics_format({"train_runtime": 61.0})["train_runtime"] == "0:01:01.00"


@pytest.mark.parametrize("name", [*UNSUPPORTED, "Trainers"])
def test_unavailable_name_is_rejected_with_an_alternative(name):
    with pytest.raises(ImportError, match=name) as refused:
        exec(f"from burnish import {name}")  # as in a script
    message = str(refused.value)
    assert "{" not in message
    assert name == "Trainers" or "cannot import name" not in message
    assert not hasattr(burnish, name)
    with pytest.raises(AttributeError, match=name):
        getattr(burnish, name)


@pytest.mark.parametrize(
    ("name", "library"), [("BertForSequenceClassification", "transformers"), ("IA3Config", "peft")]
)
def test_import_of_a_name_of_another_library_is_rejected_with_the_import(name, library):
    with pytest.raises(ImportError, match=f"from {library} import {name}"):
        exec(f"from burnish import {name}")
    assert not hasattr(burnish, name)


def test_import_of_a_name_of_no_library_is_rejected():
    with pytest.raises(
        ImportError, match=r"cannot import name 'MiniLLMTrainer' .*transformers.* have no such name.*version"
    ):
        exec("from burnish import MiniLLMTrainer")


@pytest.mark.parametrize(("name", "library"), OWNER_OF.items())
def test_reexported_name_is_the_object_of_its_library(name, library):
    if importlib.util.find_spec(library) is None:
        with pytest.raises(ImportError, match=f"pip install {library}"):
            getattr(burnish, name)
    else:
        assert getattr(burnish, name) is getattr(importlib.import_module(library), name)


def test_positional_arguments_match_transformers(tmp_path):
    args = burnish.TrainingArguments(str(tmp_path), 4, 2.0)
    assert (args.per_device_train_batch_size, args.num_train_epochs) == (4, 2.0)
    with pytest.raises(TypeError, match="multiple values for argument 'per_device_train_batch_size'"):
        burnish.TrainingArguments(str(tmp_path), 4, per_device_train_batch_size=2)


def test_attributes_read_by_scripts_exist(tmp_path, capsys):
    trainer = make_trainer(tmp_path, max_steps=1)
    trainer.train()
    capsys.readouterr()
    assert trainer.current_flos == 0  # moved to the state by store_flos
    state = trainer.args.distributed_state
    assert (state.num_processes, state.process_index, state.is_main_process, state.use_distributed) == (
        1,
        0,
        True,
        False,
    )
    with state.main_process_first():
        state.wait_for_everyone()
    with state.split_between_processes({"a": [1, 2]}) as part:
        assert part == {"a": [1, 2]}
    assert state.on_main_process(lambda: "main")() == "main"
    assert state.on_process(process_index=1)(lambda: "second")() is None
    state.print("of one process")
    assert capsys.readouterr().out == "of one process\n"
    accelerate = pytest.importorskip("accelerate")
    assert [name for name in dir(accelerate.PartialState) if name[0] != "_" and not hasattr(state, name)] == []


def test_accelerator_has_public_names_of_accelerate(tmp_path):
    accelerate = pytest.importorskip("accelerate")
    accelerator = make_trainer(tmp_path, max_steps=1).accelerator
    ran = []
    accelerator.on_main_process(lambda: ran.append("main"))()
    accelerator.on_process(process_index=1)(lambda: ran.append("second"))()
    assert ran == ["main"]
    with accelerator.split_between_processes([1, 2, 3]) as part:
        assert part == [1, 2, 3]
    accelerator.set_trigger()
    assert (accelerator.check_trigger(), accelerator.check_trigger()) == (True, False)
    accelerator.save_model(torch.nn.Linear(2, 3), tmp_path / "saved")
    assert (tmp_path / "saved" / "model.safetensors").is_file()
    accelerator.save({"a": 1}, tmp_path / "a.pt")
    assert torch.load(tmp_path / "a.pt", weights_only=True) == {"a": 1}
    for refused, message in (
        (lambda: accelerator.load_state("x"), "during training"),
        (lambda: accelerator.register_for_checkpointing(object()), "state_dict and load_state_dict. Received: object"),
        (accelerator.register_save_state_pre_hook, "The trainer saves and loads checkpoints itself"),
    ):
        with pytest.raises(ValueError, match=message):
            refused()
    names = {name for name in dir(accelerate.Accelerator) if name[0] != "_"}
    assert sorted(name for name in names if not hasattr(accelerator, name)) == []
    states = {name for name in dir(accelerate.state.AcceleratorState) if name[0] != "_" and "select" not in name}
    names = states | {"device", "distributed_type", "num_processes", "process_index", "parallelism_config"}
    assert sorted(name for name in names if not hasattr(accelerator.state, name)) == []
    assert (accelerator.state.is_main_process, accelerator.state.mixed_precision) == (True, "no")


def test_trainer_query_methods_work(tmp_path):
    trainer = make_trainer(tmp_path, max_steps=1)
    assert trainer.is_world_process_zero()
    assert trainer.is_local_process_zero()
    assert trainer.num_examples(trainer.get_train_dataloader()) == 22
    assert trainer.get_train_dataloader().total_batch_size == 4
    assert trainer.get_num_trainable_parameters() == 2
    with pytest.raises(ValueError, match="no optimizer yet"):
        trainer.get_learning_rates()
    trainer.train()
    assert len(trainer.get_learning_rates()) == 2
    assert trainer.accelerator.unwrap_model(trainer.model) is trainer.model
    assert trainer.accelerator.is_main_process
    assert (trainer.deepspeed, trainer.is_deepspeed_enabled, trainer.is_fsdp_enabled) == (None, False, False)
    teacher = torch.nn.Linear(1, 1)
    trainer._move_model_to_device(teacher, trainer.args.device)
    assert teacher.weight.device == trainer.args.device


def test_model_card_is_written(tmp_path):
    trainer = make_trainer(tmp_path, model=bert(), train=classes(), max_steps=1)
    trainer.train()
    trainer.create_model_card(model_name="tiny", dataset="toy")
    assert "tiny" in (tmp_path / "README.md").read_text()


def test_model_card_names_source_folder_of_the_model(tmp_path):
    bert().save_pretrained(tmp_path / "beginning")
    model = type(bert()).from_pretrained(tmp_path / "beginning")
    rows = datasets.Dataset.from_list(list(classes()))
    trainer = make_trainer(tmp_path / "end", model=model, train=rows, max_steps=1)
    trainer.create_model_card()
    card = (tmp_path / "end" / "README.md").read_text()
    assert "A model created from `beginning` by training on an unnamed dataset." in card
    assert "model = BertForSequenceClassification.from_pretrained(folder)" in card


def test_push_to_hub_uploads_saved_model(tmp_path, monkeypatch):
    import huggingface_hub

    uploaded = {}
    monkeypatch.setattr(huggingface_hub, "create_repo", lambda name, **kw: type("Repo", (), {"repo_id": f"me/{name}"}))
    monkeypatch.setattr(huggingface_hub.HfApi, "upload_folder", lambda self, **kwargs: uploaded.update(kwargs))
    trainer = make_trainer(tmp_path, model=bert(), train=classes(), max_steps=1, push_to_hub=True, hub_model_id="tiny")
    trainer.train()
    trainer.push_to_hub()
    assert uploaded["repo_id"] == "me/tiny"
    assert (tmp_path / "model.safetensors").is_file()
    assert (tmp_path / "README.md").is_file()


def test_hyperparameter_search_without_library_suggests_installation(tmp_path):
    trainer = Trainer(args=arguments(tmp_path), train_dataset=points(), model_init=lambda: Regression())
    with pytest.raises(ValueError, match="ray"):
        trainer.hyperparameter_search(backend="ray")
    with pytest.raises(RuntimeError, match="model_init"):
        make_trainer(tmp_path).hyperparameter_search()


def test_hyperparameter_search_finds_the_better_learning_rate(tmp_path):
    pytest.importorskip("optuna")
    trainer = Trainer(args=arguments(tmp_path, max_steps=8), train_dataset=points(), eval_dataset=points(8),
                      model_init=lambda: Regression())  # fmt: skip
    best = trainer.hyperparameter_search(
        lambda trial: {"learning_rate": trial.suggest_categorical("learning_rate", [1e-6, 0.3])}, n_trials=4
    )
    assert best.hyperparameters == {"learning_rate": 0.3}


@pytest.mark.parametrize("options", [{}, {"max_steps": 7}, {"gradient_accumulation_steps": 4, "num_train_epochs": 1.5}])
def test_initial_training_values_match_transformers(tmp_path, options):
    ours = make_trainer(tmp_path, **options)
    defaults = {"per_device_train_batch_size": 4, "num_train_epochs": 2}
    theirs = transformers.Trainer(
        Regression(), transformers_arguments(tmp_path, **{**defaults, **options}), train_dataset=points()
    )
    values = [
        trainer.set_initial_training_values(trainer.args, trainer.get_train_dataloader()) for trainer in (ours, theirs)
    ]
    assert values[0] == values[1]


def test_hyperparameter_search_prunes_trials_and_separates_their_files(tmp_path):
    optuna = pytest.importorskip("optuna")
    options = {"max_steps": 8, "eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 4}
    trainer = Trainer(args=arguments(tmp_path, **options), train_dataset=points(), eval_dataset=points(8),
                      model_init=lambda trial: Regression())  # fmt: skip
    best = trainer.hyperparameter_search(
        lambda trial: {"learning_rate": trial.suggest_categorical("learning_rate", [1e-6, 0.3])}, n_trials=4,
        hp_name=lambda trial: f"trial-{trial.number}", study_name="a study", storage=f"sqlite:///{tmp_path}/study.db",
        sampler=optuna.samplers.GridSampler({"learning_rate": [1e-6, 0.3]}),
        pruner=optuna.pruners.ThresholdPruner(upper=10.5),
    )  # fmt: skip
    trials = optuna.load_study(study_name="a study", storage=f"sqlite:///{tmp_path}/study.db").trials
    states = {trial.params["learning_rate"]: trial.state.name for trial in trials}
    assert states == {1e-6: "PRUNED", 0.3: "COMPLETE"}
    (finished,) = (trial for trial in trials if trial.state.name == "COMPLETE")
    assert (best.run_id, best.objective) == (str(finished.number), finished.value)
    assert (tmp_path / f"trial-{finished.number}" / "checkpoint-8").is_dir()
    assert not trainer.is_in_train
    trainer.train()  # after the search
    assert not trainer.state.is_hyper_param_search
    assert (tmp_path / "checkpoint-8").is_dir()


def test_tracker_that_does_not_exist_is_a_blank_one(tmp_path):
    pytest.importorskip("accelerate")
    tracker = make_trainer(tmp_path, max_steps=1).accelerator.get_tracker("wandb")
    assert type(tracker).__name__ == "GeneralTracker"
