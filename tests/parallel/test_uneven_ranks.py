"""Ranks with different numbers of rows: no deadlock, and each row counts once."""

import json
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from burnish import Trainer
from burnish.parallel import selection
from burnish.parallel.ddp import SYNC_BUFFERS_ARGUMENT, syncing_arguments
from burnish.parallel.options import ParallelOptions
from trainer_run import Regression, make_trainer, points
from two_processes import in_two_processes

pytestmark = pytest.mark.run


class Stream(IterableDataset):
    def __iter__(self):
        return iter(points(11))


class StatefulStream(IterableDataset):
    """A stream with a saved position that counts the rows that are read."""

    at = read = 0

    def __iter__(self):
        while self.at < 32:
            self.at, self.read = self.at + 1, self.read + 1
            yield points(32)[self.at - 1]
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


def resumed(folder):
    """Return the weights of a run over a stream and of one resumed at step 2, and the rows that the latter reads."""
    options = {"per_device_train_batch_size": 3, "max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    result = {"read": 0}
    for name, resume in (("whole", None), ("rest", f"{folder}/checkpoint-2")):
        trainer = make_trainer(folder, train=StatefulStream(), learning_rate=0.1, ddp_backend="gloo", **options)
        trainer.train(resume_from_checkpoint=resume)
        result |= {name: [p.item() for p in trainer.model.parameters()], "read": trainer.train_dataset.read}
    return result


class FlopCounter(Trainer):
    """Counts a row as ten floating-point operations."""

    def floating_point_ops(self, inputs):
        return 10 * len(inputs["labels"])


class PreparedLoader(FlopCounter):
    """Creates its dataloader as in accelerate's documentation."""

    def get_train_dataloader(self):
        return self.accelerator.prepare(
            DataLoader(self.train_dataset, batch_size=4, shuffle=True, collate_fn=self.data_collator)
        )


def dataset_means(prediction):
    return {"rows": len(prediction.predictions), "mean": float(np.mean(prediction.label_ids))}


class BatchMeans:
    rows = 0

    def __call__(self, prediction, compute_result):
        self.rows += len(prediction.predictions)
        return {"rows": self.rows} if compute_result else {}


def measured(folder):
    """Evaluate datasets of several sizes and return the results; runs in one process and in each of two."""
    result = {}
    for number in (10, 11, 3, 1):
        trainer = make_trainer(
            folder, model=Regression(1.0, 2.0), per_device_eval_batch_size=2,
            trainer={"eval_dataset": points(number), "compute_metrics": dataset_means},
        )  # fmt: skip
        result[number] = trainer.evaluate()
        result[f"predictions of {number}"] = trainer.predict(points(number)).predictions.tolist()
    trainer = make_trainer(
        folder, model=Regression(1.0, 2.0), per_device_eval_batch_size=2, batch_eval_metrics=True,
        trainer={"eval_dataset": Stream(), "compute_metrics": BatchMeans()},
    )  # fmt: skip
    result["stream"] = trainer.evaluate()
    return {
        name: {key: v for key, v in value.items() if "second" not in key and "runtime" not in key}
        if isinstance(value, dict) else value
        for name, value in result.items()
    }  # fmt: skip


def trained(folder, batch_size, **options):
    """Train two epochs of ten rows. On two ranks, the last step of an epoch has rows for only one of them."""
    weights = {}
    for name, kind in (("own", FlopCounter), ("prepared", PreparedLoader)):
        trainer = make_trainer(
            folder, kind, model=Classifier(), train=RecordingDataset(10), per_device_train_batch_size=batch_size,
            learning_rate=0.1, logging_steps=1, **options,
        )  # fmt: skip
        trainer.train()
        rows = trainer.train_dataset.seen
        weights[name] = [p.detach().tolist() for p in trainer.model.parameters()]
        weights[f"{name} rows"] = sorted(set(rows))
        weights[f"{name} operations"] = trainer.state.total_flos
    return weights


class RecordingDataset(Dataset):
    """A dataset that records the indices that are read."""

    def __init__(self, number):
        self.rows, self.seen = points(number), []

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        self.seen.append(index)
        return {"x": self.rows[index]["x"][None], "labels": (self.rows[index]["x"] > 0).long()}


class Classifier(nn.Module):
    """A model with two classes; the loss of a batch without labels is NaN, as in most models."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(1, 2)
        with torch.no_grad():
            self.linear.weight.copy_(torch.tensor([[0.1], [-0.2]]))
            self.linear.bias.zero_()

    def forward(self, x, labels):
        logits = self.linear(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def write_rank_results(folder):
    import os

    rank = os.environ["RANK"]
    with warnings.catch_warnings(record=True) as message:
        warnings.simplefilter("always")
        result = measured(f"{folder}/two") | {
            "trained": trained(f"{folder}/two", 4, ddp_backend="gloo", evaluation_strategy="no"),
            "resumed": resumed(f"{folder}/streamed"),
        }
    result["said"] = [str(warning.message) for warning in message if "evaluation_strategy" in str(warning.message)]
    with open(f"{folder}/rank{rank}.json", "w") as file:
        json.dump(result, file)


@pytest.fixture(scope="module")
def rank_results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("uneven")
    in_two_processes(write_rank_results, str(folder))
    ranks = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]
    return json.loads(json.dumps(measured(folder / "one"))), *ranks


@pytest.mark.slow
def test_loader_state_of_rank_0_resumes_on_both_ranks(rank_results):
    """Six rows per step: rank 0 has read nine of twelve rows, so both ranks continue with the tenth."""
    for rank, to in zip(rank_results[1:], (21, 24), strict=True):
        assert rank["resumed"]["rest"] == rank["resumed"]["whole"]
        assert rank["resumed"]["read"] == to - 9


@pytest.mark.slow
@pytest.mark.parametrize("number", ["10", "11", "3", "1", "stream"])
def test_evaluation_on_two_ranks_matches_one(rank_results, number):
    one, first, second = (ranks[number] for ranks in rank_results)
    assert first == second
    assert first == pytest.approx(one, rel=1e-5)
    assert one["eval_rows"] == 11 if number == "stream" else one["eval_rows"] == int(number)


@pytest.mark.slow
def test_predictions_are_in_row_order_without_duplicates(rank_results):
    one, first, second = rank_results
    for number in (10, 11, 3, 1):
        name = f"predictions of {number}"
        assert first[name] == second[name] == pytest.approx(one[name], rel=1e-6)
        assert len(first[name]) == number


@pytest.mark.slow
def test_rank_without_rows_adds_nothing_to_a_step(rank_results, tmp_path):
    _, first, second = rank_results
    one = trained(tmp_path, 8)
    for two in (first["trained"], second["trained"]):
        torch.testing.assert_close(torch.tensor(two["own"][0]), torch.tensor(one["own"][0]), rtol=1e-5, atol=1e-6)
        assert all(torch.isfinite(torch.tensor(values)).all() for values in two["prepared"])
    assert first["trained"]["prepared"] == second["trained"]["prepared"]


@pytest.mark.slow
def test_floating_point_operations_of_all_ranks_are_counted(rank_results, tmp_path):
    _, *ranks = (each.get("trained") for each in rank_results)
    for two in ranks:
        assert two["own operations"] == two["prepared operations"] == 2 * 10 * 10  # epochs, rows, operations per row


@pytest.mark.slow
def test_dataloader_prepared_by_a_script_is_sharded_over_ranks(rank_results):
    _, first, second = (ranks.get("trained") for ranks in rank_results)
    for kind in ("own rows", "prepared rows"):
        assert sorted({*first[kind], *second[kind]}) == list(range(10))
    assert len(first["prepared rows"]) < 10 or len(second["prepared rows"]) < 10


@pytest.mark.slow
def test_notes_are_printed_by_rank_0_only(rank_results):
    _, first, second = rank_results
    assert first["said"]
    assert not second["said"]


def test_ddp_defaults_match_transformers_and_torch():
    options = syncing_arguments(ParallelOptions())
    assert options["find_unused_parameters"] is True
    assert SYNC_BUFFERS_ARGUMENT not in options
    assert syncing_arguments(ParallelOptions(gradient_checkpointing=True))["find_unused_parameters"] is False
    overrides = ParallelOptions(ddp_find_unused_parameters=False, ddp_broadcast_buffers=False, ddp_bucket_cap_mb=7)
    assert syncing_arguments(overrides) == {
        "find_unused_parameters": False, SYNC_BUFFERS_ARGUMENT: False, "static_graph": False, "bucket_cap_mb": 7,
        "gradient_as_bucket_view": True,
    }  # fmt: skip


def test_accelerator_methods_used_by_scripts_exist(tmp_path):
    trainer = make_trainer(tmp_path, max_steps=1)
    accelerator, model = trainer.accelerator, trainer.model
    loader = accelerator.prepare(DataLoader(list(range(6)), batch_size=2))
    assert [batch.tolist() for batch in accelerator.skip_first_batches(loader, 2)] == [[4, 5]]
    model(torch.ones(3), torch.ones(3))["loss"].backward()
    with accelerator.accumulate(model):
        accelerator.clip_grad_value_(model.parameters(), 0.01)
    assert all(parameter.grad.abs() <= 0.01 for parameter in model.parameters())
    accelerator.log({"own": 1.0})
    assert trainer.state.log_history[-1]["own"] == 1.0
    with pytest.raises(RuntimeError, match="only be called during training"):
        accelerator.save_state()
    with pytest.raises(ValueError, match="does not accept a folder"):
        accelerator.save_state("elsewhere")
    trainer.train()
    assert (tmp_path / "checkpoint-1" / "manifest.json").is_file() or accelerator.save_state().endswith("checkpoint-1")


def test_engine_depends_on_number_of_processes(monkeypatch):
    assert selection.parallel_name(ParallelOptions()) == "single"
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert selection.parallel_name(ParallelOptions()) == "ddp"
    assert selection.parallel_name(ParallelOptions(engine="accelerate")) == "accelerate"
