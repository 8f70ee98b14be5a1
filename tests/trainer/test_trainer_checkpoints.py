"""Checkpoints of Trainer: exact resume, and exchange with transformers in both directions."""

import copy
import json
import math
import os
import random
import shutil
import signal
import threading
import time

import datasets
import numpy as np
import pytest
import torch
import transformers
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, Sampler
from transformers import EarlyStoppingCallback, PrinterCallback, TrainerCallback

from burnish import Trainer, UserError
from burnish.checkpoint import checkpoint
from burnish.trainer.training import requested_checkpoint
from representative import representative_slow
from trainer_run import (
    Regression,
    arguments,
    gpt2,
    losses,
    make_trainer,
    parity,
    points,
    same,
    text_rows,
    transformers_arguments,
    weights,
)  # fmt: skip

pytestmark = pytest.mark.run

SAVED = {"save_strategy": "steps", "save_steps": 3, "max_steps": 9, "learning_rate": 1e-2}


def trained(folder, resume=None, kind=Trainer, **options):
    trainer = make_trainer(folder, kind, **{"model": gpt2(), "train": text_rows(), **SAVED, **options})
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def without_times(trainer):
    keep = [entry for entry in trainer.state.log_history if "train_runtime" not in entry]
    return [{k: v for k, v in entry.items() if "runtime" not in k and "per_second" not in k} for entry in keep]


@pytest.mark.sample(2)
@pytest.mark.parametrize("step", [3, 6])
@pytest.mark.parametrize("grouped", [{}, {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 3}])
def test_resumed_run_is_bitwise_equal(tmp_path, step, grouped):
    """With dropout, resumed within the first epoch and within the second."""
    whole = trained(tmp_path / "a", **grouped)
    shutil.copytree(tmp_path / "a" / f"checkpoint-{step}", tmp_path / "b" / f"checkpoint-{step}")
    resumed = trained(tmp_path / "b", resume=True, **grouped)
    assert same(weights(whole), weights(resumed))
    assert without_times(whole) == without_times(resumed)


def test_background_save_is_finished_when_the_run_fails(tmp_path, monkeypatch):
    """Otherwise the next run in this folder could find an active writer."""

    class FailingCallback(transformers.TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step == 3:
                raise RuntimeError("the script fails")

    whole = checkpoint.write_manifest

    def slow(*arguments, **options):
        time.sleep(0.5)
        return whole(*arguments, **options)

    monkeypatch.setattr(checkpoint, "write_manifest", slow)
    trainer = make_trainer(tmp_path, trainer={"callbacks": [FailingCallback()]}, save_in_background=True, **SAVED)
    with pytest.raises(RuntimeError, match="the script fails"):
        trainer.train()
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-3"]
    assert "burnish-checkpoint" not in [thread.name for thread in threading.enumerate()]


def test_run_resumes_at_last_step_of_an_epoch(tmp_path):
    whole = trained(tmp_path / "a", save_strategy="epoch", max_steps=-1)
    shutil.copytree(tmp_path / "a" / "checkpoint-6", tmp_path / "b" / "checkpoint-6")
    resumed = trained(tmp_path / "b", resume=True, save_strategy="epoch", max_steps=-1)
    assert same(weights(whole), weights(resumed))


def test_custom_shuffled_dataloader_resumes_at_its_position(tmp_path):
    """Its order comes from the global generator, whose state at the start of the epoch is restored."""

    class CustomTrainer(Trainer):
        def get_train_dataloader(self):
            return DataLoader(text_rows(), batch_size=4, shuffle=True, collate_fn=self.data_collator)

    whole = trained(tmp_path / "a", kind=CustomTrainer)
    shutil.copytree(tmp_path / "a" / "checkpoint-3", tmp_path / "b" / "checkpoint-3")
    resumed = trained(tmp_path / "b", resume=True, kind=CustomTrainer)
    assert same(weights(whole), weights(resumed))


class ShuffledSampler(Sampler):
    """A sampler that uses Python's or numpy's generator."""

    def __init__(self, draw):
        self.draw = draw

    def __len__(self):
        return len(text_rows())

    def __iter__(self):
        order = list(range(len(self)))
        self.draw(order)
        return iter(order)


@pytest.mark.sample(1)
@pytest.mark.parametrize("step", representative_slow([3, 6, 8], 1))
@pytest.mark.parametrize("order", ["generator of the loader", "generator of a sampler", "python", "numpy"])
def test_orders_from_other_generators_resume_at_their_position(tmp_path, order, step):
    """Resumed in the first epoch, in the second, and between them."""

    class CustomTrainer(Trainer):
        def get_train_dataloader(self):
            own = torch.Generator().manual_seed(5)
            ways = {
                "generator of the loader": {"shuffle": True, "generator": own},
                "generator of a sampler": {"sampler": RandomSampler(text_rows(), generator=own)},
                "python": {"sampler": ShuffledSampler(random.shuffle)},
                "numpy": {"sampler": ShuffledSampler(np.random.shuffle)},
            }
            return DataLoader(text_rows(), batch_size=4, collate_fn=self.data_collator, **ways[order])

    whole = trained(tmp_path / "a", kind=CustomTrainer, save_steps=1)
    shutil.copytree(tmp_path / "a" / f"checkpoint-{step}", tmp_path / "b" / f"checkpoint-{step}")
    resumed = trained(tmp_path / "b", resume=True, kind=CustomTrainer, save_steps=1)
    assert same(weights(whole), weights(resumed))


def test_optimizer_state_of_another_optimizer_is_rejected(tmp_path):
    trained(tmp_path)
    with pytest.raises(UserError, match="contains the state of a different optimizer"):
        trained(tmp_path, resume=True, optim="sgd", max_steps=8)


def test_rows_without_length_resume_at_their_position(tmp_path):
    class Rows(IterableDataset):
        def __iter__(self):
            return iter(text_rows(10))

    whole = trained(tmp_path / "a", train=Rows())
    shutil.copytree(tmp_path / "a" / "checkpoint-6", tmp_path / "b" / "checkpoint-6")
    assert same(weights(whole), weights(trained(tmp_path / "b", resume=True, train=Rows())))


class StatefulStream(IterableDataset):
    """A stream with a saved position. Counts the rows that are read."""

    def __init__(self):
        self.rows, self.at, self.read = text_rows(32), 0, 0

    def __iter__(self):
        while self.at < len(self.rows):
            self.at, self.read = self.at + 1, self.read + 1
            yield self.rows[self.at - 1]
        self.at = 0

    def state_dict(self):
        return {"at": (self.at, torch.ones(2))}

    def load_state_dict(self, state):
        self.at = state["at"][0]

    def of_shards(self, shards):
        for shard in shards:
            for row in self.rows[shard * 8 : shard * 8 + 8]:
                self.read += 1
                yield row

    def of_datasets(self):
        dataset = datasets.IterableDataset.from_generator(self.of_shards, gen_kwargs={"shards": [0, 1, 2, 3]})
        return dataset.with_format("torch").map(lambda row: row)

    def shuffled(self):
        return self.of_datasets().shuffle(seed=3, buffer_size=6)


STREAMED = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 14}


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ["__call__", "of_datasets", "shuffled"])
@pytest.mark.parametrize("step", representative_slow([12, 3], 1))
def test_stateful_stream_resumes_from_its_state(tmp_path, kind, step):
    """Four rows per step, 32 per epoch: step 3 is in the second of four shards, step 12 in the second epoch. The state
    does not contain the shuffle buffer, so a shuffled stream is reread. All runs are bitwise equal."""

    def stream(source):
        return source if kind == "__call__" else getattr(source, kind)()

    source = StatefulStream()
    whole = trained(tmp_path / "a", train=stream(StatefulStream()), **STREAMED)
    shutil.copytree(tmp_path / "a" / f"checkpoint-{step}", tmp_path / "b" / f"checkpoint-{step}")
    resumed = trained(tmp_path / "b", resume=True, train=stream(source), **STREAMED)
    assert same(weights(whole), weights(resumed))
    left, again = 4 * (14 - step), {"__call__": 0, "of_datasets": 8, "shuffled": 32}[kind]
    assert left <= source.read <= left + again


def test_stream_with_unserializable_state_is_read_again(tmp_path):
    class Odd(StatefulStream):
        def state_dict(self):
            return {"at": object()}

    with pytest.warns(UserWarning, match="The state of Odd cannot be saved: at contains an object of type object"):
        whole = trained(tmp_path / "a", train=Odd(), **STREAMED)
    shutil.copytree(tmp_path / "a" / "checkpoint-6", tmp_path / "b" / "checkpoint-6")
    source = Odd()
    with pytest.warns(UserWarning, match="The first 12 micro-batches of the epoch are loaded and skipped"):
        resumed = trained(tmp_path / "b", resume=True, train=source, **STREAMED)
    assert same(weights(whole), weights(resumed))
    assert source.read == 56


def test_lora_resumes_bitwise_equal_and_is_saved_in_peft_format(tmp_path):
    from peft import PeftModel

    lora = parity.seeded(parity.with_lora)
    whole = trained(tmp_path / "a", model=lora())
    shutil.copytree(tmp_path / "a" / "checkpoint-3", tmp_path / "b" / "checkpoint-3")
    resumed = trained(tmp_path / "b", resume=True, model=lora())
    assert same(weights(whole), weights(resumed))
    loaded = PeftModel.from_pretrained(parity.seeded(parity.gpt2)(), str(tmp_path / "a" / "checkpoint-9"))
    own = {name: p for name, p in whole.model.named_parameters() if "lora_" in name}
    assert all(torch.equal(p, own[name]) for name, p in loaded.named_parameters() if "lora_" in name)
    assert not (tmp_path / "a" / "checkpoint-9" / "model.safetensors").exists()


def test_checkpoint_is_loaded_by_from_pretrained(tmp_path):
    trainer = trained(tmp_path)
    loaded = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "checkpoint-9")
    assert all(torch.equal(p, dict(loaded.named_parameters())[name]) for name, p in trainer.model.named_parameters())
    state = transformers.TrainerState.load_from_json(str(tmp_path / "checkpoint-9" / "trainer_state.json"))
    assert state.global_step == 9
    assert state.log_history == trainer.state.log_history[:9]


def test_checkpoint_contains_no_pickle(tmp_path):
    trained(tmp_path)
    suffixes = {path.suffix for path in tmp_path.rglob("*") if path.is_file()}
    assert suffixes <= {".json", ".safetensors", ""}


def test_saved_model_is_loaded_by_from_pretrained(tmp_path):
    trainer = trained(tmp_path, max_steps=1)
    trainer.save_model(str(tmp_path / "final"))
    loaded = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "final")
    assert torch.equal(loaded.transformer.wte.weight, trainer.model.transformer.wte.weight)
    plain = make_trainer(tmp_path, max_steps=1)
    plain.save_model(str(tmp_path / "plain"))
    assert (tmp_path / "plain" / "model.safetensors").is_file()


def test_tokenizer_of_the_collator_is_saved(tmp_path):
    from trainer_run import tiny_tokenizer

    tokenizer = tiny_tokenizer()

    class Collator:
        def __init__(self):
            self.tokenizer = tokenizer

        def __call__(self, rows):
            return transformers.default_data_collator(rows)

    make_trainer(
        tmp_path, save_strategy="steps", save_steps=1, max_steps=1, trainer={"data_collator": Collator()}
    ).train()
    assert len(transformers.AutoTokenizer.from_pretrained(tmp_path / "checkpoint-1")) == 4


# --- exchange with transformers ---------------------------------------------------------------------------------------


def train_with_transformers(folder, resume=None, model=None, **options):
    args = transformers_arguments(folder, **{"per_device_train_batch_size": 4, "logging_steps": 1, **SAVED, **options})
    trainer = transformers.Trainer(gpt2() if model is None else model, args, train_dataset=text_rows())
    trainer.remove_callback(PrinterCallback)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def test_transformers_checkpoint_resumes_in_burnish(tmp_path):
    whole = train_with_transformers(tmp_path / "theirs")
    shutil.copytree(tmp_path / "theirs" / "checkpoint-3", tmp_path / "ours" / "checkpoint-3")
    resumed = trained(tmp_path / "ours", resume=True)
    assert resumed.state.global_step == 9
    # Only dropout differs a little, because the generator of transformers is one draw behind at this step.
    assert losses(resumed)[:3] == losses(whole)[:3]
    assert losses(resumed) == pytest.approx(losses(whole), rel=0.05)
    rates = [entry["learning_rate"] for entry in whole.state.log_history[:9]]
    assert [entry["learning_rate"] for entry in resumed.state.log_history[:9]] == pytest.approx(rates)


def test_burnish_checkpoint_resumes_in_transformers_on_request(tmp_path):
    whole = trained(tmp_path / "ours", save_hf_format=True)
    assert (tmp_path / "ours" / "checkpoint-3" / "optimizer.pt").is_file()
    shutil.copytree(tmp_path / "ours" / "checkpoint-3", tmp_path / "theirs" / "checkpoint-3")
    resumed = train_with_transformers(tmp_path / "theirs", resume=True)
    assert losses(resumed) == pytest.approx(losses(whole), rel=0.05)
    assert resumed.state.global_step == 9


@pytest.mark.slow
def test_adapter_checkpoints_resume_in_both_directions(tmp_path):
    lora = parity.seeded(parity.with_lora)
    for begins, is_resuming, more in (
        (train_with_transformers, trained, {}),
        (trained, train_with_transformers, {"save_hf_format": True}),
    ):
        first, second = tmp_path / begins.__name__, tmp_path / f"{is_resuming.__name__} goes on"
        whole = begins(first, model=lora(), **more)
        shutil.copytree(first / "checkpoint-3", second / "checkpoint-3")
        resumed = is_resuming(second, resume=True, model=lora())
        assert resumed.state.global_step == 9
        assert losses(resumed)[:3] == losses(whole)[:3]
        assert losses(resumed) == pytest.approx(losses(whole), rel=0.05)
        moved = [name for name, p in resumed.model.named_parameters() if p.requires_grad]
        assert moved
        assert all("lora_" in name for name in moved)


def test_transformers_checkpoint_without_optimizer_reports_reset_parts(tmp_path, library_log):
    train_with_transformers(tmp_path, save_only_model=True)
    trainer = make_trainer(tmp_path, model=gpt2(), train=text_rows(), **SAVED)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert "not restored" in library_log.text


# --- selection of the checkpoint --------------------------------------------------------------------------------------


def test_later_checkpoints_are_reported(tmp_path, library_log):
    make_trainer(tmp_path, **SAVED).train()
    steps = sorted(int(path.name.rpartition("-")[2]) for path in tmp_path.glob("checkpoint-*"))
    make_trainer(tmp_path, **SAVED).train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{steps[-1]}"))
    assert "later checkpoints" not in library_log.text
    make_trainer(tmp_path, **SAVED).train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{steps[0]}"))
    assert f"contains later checkpoints (checkpoint-{steps[1]}" in library_log.text


def test_missing_checkpoint_is_reported(tmp_path):
    with pytest.raises(ValueError, match="Can't find a valid checkpoint at"):
        make_trainer(tmp_path).train(resume_from_checkpoint=str(tmp_path / "bogus"))
    with pytest.raises(ValueError, match="No valid checkpoint found in output directory"):
        make_trainer(tmp_path / "fresh").train(resume_from_checkpoint=True)


def test_resume_false_or_none_starts_from_scratch(tmp_path):
    trained(tmp_path)
    for resume in (False, None):
        again = trained(tmp_path, resume=resume, max_steps=4)
        assert [entry["step"] for entry in again.state.log_history] == [1, 2, 3, 4, 4]


def test_resume_from_checkpoint_argument_resumes(tmp_path):
    trained(tmp_path, max_steps=3)
    again = trained(tmp_path, max_steps=9, resume=None, save_steps=3)
    assert again.state.log_history[0]["step"] == 1
    trainer = make_trainer(tmp_path, model=gpt2(), train=text_rows(), **{**SAVED, "max_steps": 12}, resume="auto")
    trainer.train()
    assert trainer.state.global_step == 12
    assert len(losses(trainer)) == 12
    with pytest.raises(UserError, match="must"):
        make_trainer(tmp_path / "empty", resume="must").train()


def test_automatic_resume_skips_a_damaged_checkpoint(tmp_path):
    trained(tmp_path)
    (tmp_path / "checkpoint-9" / "optimizer.safetensors").unlink()
    trainer = make_trainer(tmp_path, model=gpt2(), train=text_rows(), **{**SAVED, "max_steps": 9}, resume="auto")
    assert requested_checkpoint(None, str(tmp_path), trainer.args) == tmp_path / "checkpoint-6"


def test_damaged_checkpoint_is_skipped_but_rejected_by_name(tmp_path):
    trained(tmp_path)
    (tmp_path / "checkpoint-9" / "model.safetensors").write_bytes(b"half")
    resumed = trained(tmp_path, resume=True)
    assert resumed.state.global_step == 9
    (tmp_path / "checkpoint-9" / "model.safetensors").write_bytes(b"half")
    with pytest.raises(UserError, match=r"model\.safetensors"):
        trained(tmp_path, resume=str(tmp_path / "checkpoint-9"))


def test_resuming_a_finished_run_does_nothing(tmp_path):
    whole = trained(tmp_path)
    again = trained(tmp_path, resume=True)
    assert same(weights(whole), weights(again))
    assert again.state.global_step == 9


def test_changed_intervals_and_more_steps_apply_after_resume(tmp_path):
    trained(tmp_path)
    longer = trained(tmp_path, resume=True, max_steps=14, save_steps=2, logging_steps=7)
    assert longer.state.save_steps == 2
    assert longer.state.max_steps == 14
    assert {path.name for path in tmp_path.glob("checkpoint-1*")} == {"checkpoint-10", "checkpoint-12", "checkpoint-14"}


def test_ignore_data_skip_restarts_the_data(tmp_path):
    recorded = []

    class BatchRecorder(Trainer):
        def compute_loss(self, model, inputs, *args, **kwargs):
            recorded.append(float(inputs["x"][0]))
            return super().compute_loss(model, inputs, *args, **kwargs)

    def made(**options):
        return make_trainer(tmp_path, BatchRecorder, num_train_epochs=1, save_strategy="steps", save_steps=3, **options)

    made().train()
    first = recorded.copy()
    recorded.clear()
    made(ignore_data_skip=True, max_steps=5).train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert recorded == first[:2]


# --- best, rotation, state --------------------------------------------------------------------------------------------


def train_with_metric(folder, **options):
    values = iter([3.0, 1.0, 2.0, 4.0])
    trainer = make_trainer(
        folder, max_steps=4, eval_strategy="steps", eval_steps=1, save_strategy="steps", save_steps=1,
        metric_for_best_model="value", greater_is_better=False, load_best_model_at_end=True,
        trainer={"eval_dataset": points(3), "compute_metrics": lambda prediction: {"value": next(values)}}, **options,
    )  # fmt: skip
    trainer.train()
    return trainer


def test_best_weights_are_loaded_at_the_end(tmp_path):
    trainer = train_with_metric(tmp_path)
    assert trainer.state.best_model_checkpoint == str(tmp_path / "checkpoint-2")
    from safetensors.torch import load_file

    best = load_file(tmp_path / "checkpoint-2" / "model.safetensors")
    assert all(torch.equal(best[name], weight) for name, weight in weights(trainer).items())


def test_checkpoint_at_last_step_of_an_epoch_can_be_the_best(tmp_path):
    """It is saved at the end of the step, and evaluated at the end of the epoch."""
    trainer = make_trainer(
        tmp_path, eval_strategy="epoch", save_strategy="steps", save_steps=1, metric_for_best_model="loss",
        num_train_epochs=2, learning_rate=0.01, trainer={"eval_dataset": points(3)},
    )  # fmt: skip
    trainer.train()
    assert trainer.state.best_global_step == trainer.state.max_steps
    assert trainer.state.best_model_checkpoint == str(tmp_path / f"checkpoint-{trainer.state.max_steps}")


def test_save_total_limit_of_one_keeps_only_the_best(tmp_path):
    train_with_metric(tmp_path, save_total_limit=1)
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-2"]


def test_save_total_limit_of_zero_keeps_all(tmp_path):
    """In transformers, 0 and negative values mean no limit."""
    trained(tmp_path, save_steps=1, save_total_limit=0, max_steps=3)
    assert len(list(tmp_path.glob("checkpoint-*"))) == 3


def test_save_only_model_saves_only_the_model(tmp_path):
    trained(tmp_path, save_only_model=True)
    names = {path.name for path in (tmp_path / "checkpoint-3").iterdir()}
    assert {"model.safetensors", "config.json", "trainer_state.json"} <= names
    assert not any(name.startswith(("optimizer", "rng")) for name in names)


def test_callback_states_are_restored_on_request(tmp_path):
    def made(callbacks, **options):
        return make_trainer(
            tmp_path, eval_strategy="steps", eval_steps=2, save_strategy="steps", save_steps=2, max_steps=2,
            load_best_model_at_end=True, trainer={"eval_dataset": points(3), "callbacks": callbacks}, **options,
        )  # fmt: skip

    made([EarlyStoppingCallback(5, 0.2)]).train()
    stored = json.loads((tmp_path / "checkpoint-2" / "trainer_state.json").read_text())["stateful_callbacks"]
    assert stored["EarlyStoppingCallback"]["args"]["early_stopping_patience"] == 5
    assert stored["TrainerControl"]["args"]["should_training_stop"] is True
    fresh = EarlyStoppingCallback()
    made([fresh], restore_callback_states_from_checkpoint=True).train(str(tmp_path / "checkpoint-2"))
    assert (fresh.early_stopping_patience, fresh.early_stopping_threshold) == (5, 0.2)
    unasked = EarlyStoppingCallback()
    made([unasked]).train(str(tmp_path / "checkpoint-2"))
    assert unasked.early_stopping_patience == 1


def test_two_trainers_cannot_write_into_one_folder(tmp_path):
    class StartSecondTrainer(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            with pytest.raises(UserError, match="another run is writing"):
                make_trainer(tmp_path, save_strategy="steps").train()
            control.should_training_stop = True

    make_trainer(tmp_path, save_strategy="steps", trainer={"callbacks": [StartSecondTrainer()]}).train()


def test_termination_signal_saves_a_checkpoint(tmp_path):
    class StopRequested(transformers.TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step == 4:
                os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    trainer = make_trainer(tmp_path, max_steps=9, save_strategy="steps", save_steps=100, enable_jit_checkpoint=True,
                           trainer={"callbacks": [StopRequested()]})  # fmt: skip
    trainer.train()
    assert trainer.state.global_step == 5
    assert (tmp_path / "checkpoint-5" / "model.safetensors").is_file()
    assert signal.getsignal(signal.SIGTERM) == before


class Signal(transformers.TrainerCallback):
    def __init__(self, number):
        self.number = number

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 4:
            os.kill(os.getpid(), self.number)


@pytest.mark.sample(1)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_saves_a_checkpoint_and_then_ends_the_script(tmp_path, number):
    whole, before = trained(tmp_path / "whole"), signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt):
        trained(tmp_path / "cut", trainer={"callbacks": [Signal(number)]}, save_steps=100)
    assert signal.getsignal(number) == before
    resumed = trained(tmp_path / "cut", resume=str(tmp_path / "cut" / "checkpoint-5"))
    assert same(weights(whole), weights(resumed))
    assert not any(type(c).__name__ == "InterruptCallback" for c in resumed.callback_handler.callbacks)


def test_signal_handled_by_the_script_is_left_to_it(tmp_path):
    received, before = [], signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGTERM, lambda *_: received.append(1))
    try:
        assert trained(tmp_path, trainer={"callbacks": [Signal(signal.SIGTERM)]}).state.global_step == 9
    finally:
        signal.signal(signal.SIGTERM, before)
    assert received == [1]


def test_callback_can_request_a_checkpoint(tmp_path):
    class SaveNow(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_save = state.global_step == 2

    make_trainer(tmp_path, max_steps=3, trainer={"callbacks": [SaveNow()]}).train()
    assert (tmp_path / "checkpoint-2").is_dir()


def test_trainers_share_no_training_state(tmp_path):
    args = arguments(tmp_path, max_steps=2)
    first, second = (Trainer(Regression(), copy.deepcopy(args), train_dataset=points()) for _ in range(2))
    first.train()
    assert second.state.global_step == 0
    assert math.isclose(second.model.a.item(), 0.0)


class Average:
    """The mean of the weights of all steps, as scripts register it with accelerate."""

    def __init__(self):
        self.total, self.history = torch.zeros(2), []

    def state_dict(self):
        return {"total": self.total, "history": self.history}

    def load_state_dict(self, state):
        self.total, self.history = state["total"], list(state["history"])


class AverageCallback(TrainerCallback):
    def __init__(self, average):
        self.average = average

    def on_step_end(self, args, state, control, model, **kwargs):
        self.average.total += torch.cat([weight.detach().flatten() for weight in model.parameters()])
        self.average.history.append(state.global_step)


@pytest.mark.parametrize("registers_late", [False, True])
def test_registered_objects_are_saved_and_restored(tmp_path, registers_late):
    def run(folder, resume=None):
        average = Average()
        trainer = make_trainer(folder, max_steps=6, save_steps=3, save_strategy="steps")
        trainer.add_callback(AverageCallback(average))
        if registers_late and resume:
            begins = type("Begins", (TrainerCallback,), {
                "on_train_begin": lambda *_, **__: trainer.accelerator.register_for_checkpointing(average)
            })  # fmt: skip
            trainer.add_callback(begins)
        else:
            trainer.accelerator.register_for_checkpointing(average)
        trainer.train(resume_from_checkpoint=resume)
        return average

    whole = run(tmp_path / "whole")
    resumed = run(tmp_path / "resumed", str(tmp_path / "whole" / "checkpoint-3"))
    assert resumed.history == whole.history == [1, 2, 3, 4, 5, 6]
    assert torch.equal(resumed.total, whole.total)


def test_checkpoint_of_other_registered_objects_is_refused(tmp_path):
    trainer = make_trainer(tmp_path, max_steps=2, save_steps=1, save_strategy="steps")
    trainer.accelerator.register_for_checkpointing(Average())
    trainer.train()
    again = make_trainer(tmp_path, max_steps=2)
    again.accelerator.register_for_checkpointing(Average(), Average())
    with pytest.raises(UserError, match=r"the state of 1 objects registered for checkpointing. Registered: 2"):
        again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))


@pytest.mark.parametrize("is_named", [False, True])
def test_accelerator_loads_a_checkpoint_during_training(tmp_path, is_named):
    class Undo(TrainerCallback):
        """Saves after step 2 and goes back to these weights after step 4."""

        def on_step_end(self, args, state, control, model, optimizer, **kwargs):
            now = [weight.detach().clone() for weight in model.parameters()]
            if state.global_step == 2:
                self.folder, self.saved = trainer.accelerator.save_state(), now
                self.moments = [{**entry} for entry in optimizer.state_dict()["state"].values()]
            if state.global_step == 4:
                assert not all(torch.equal(a, b) for a, b in zip(now, self.saved, strict=True))
                trainer.accelerator.load_state(self.folder if is_named else None)
                assert all(torch.equal(a, b) for a, b in zip(model.parameters(), self.saved, strict=True))
                steps = [float(entry["step"]) for entry in optimizer.state_dict()["state"].values()]
                assert {*steps} == {2}
                assert state.global_step == 4

    trainer = make_trainer(tmp_path, max_steps=5, save_strategy="no")
    trainer.add_callback(Undo())
    assert trainer.train().global_step == 5


class EndEpochs(TrainerCallback):
    """Ends epochs after these steps."""

    def __init__(self, steps):
        self.steps = steps

    def on_step_end(self, args, state, control, **kwargs):
        control.should_epoch_stop = state.global_step in self.steps


@pytest.mark.sample(1)
@pytest.mark.parametrize("save_strategy", ["steps", "epoch"])
@pytest.mark.parametrize("steps", [(2, 4), (2,)])
def test_run_that_ends_epochs_early_resumes_to_the_same_weights(tmp_path, steps, save_strategy):
    def run(folder, resume=None):
        trainer = make_trainer(folder, num_train_epochs=3, save_strategy=save_strategy, save_steps=1)
        trainer.add_callback(EndEpochs(steps))
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    whole = run(tmp_path / "whole")
    checkpoints = sorted((tmp_path / "whole").glob("checkpoint-*"))
    assert len(checkpoints) >= 3
    for folder in checkpoints:
        resumed = run(tmp_path / "resumed", str(folder))
        assert resumed.state.global_step == whole.state.global_step
        assert same(weights(resumed), weights(whole))
