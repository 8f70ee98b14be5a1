"""``Trainer`` gives the loss and gradient of the model itself, for every causal language model of transformers."""

import pytest
import torch

from every_family import tiny_models
from trainer_run import make_trainer

pytestmark = pytest.mark.run

LENGTHS = (4, 9, 23, 6, 14, 5)


def example_rows():
    generator = torch.Generator().manual_seed(0)
    rows = []
    for length in LENGTHS:
        ids = torch.randint(5, 90, (length,), generator=generator)
        labels = torch.where(torch.arange(length) < length // 3, -100, ids)
        rows.append({"input_ids": ids.tolist(), "labels": labels.tolist(), "attention_mask": [1] * length})
    return rows


def collate(rows):
    width = max(len(row["input_ids"]) for row in rows)
    return {
        name: torch.tensor([row[name] + [filler] * (width - len(row[name])) for row in rows])
        for name, filler in (("input_ids", 0), ("attention_mask", 0), ("labels", -100))
    }


def own_loss_and_gradient(model, rows, num_predicted):
    """Return the mean over all labels of the model's own loss, computed row by row, and its gradient norm."""
    model.eval()
    model.zero_grad()
    total = sum(num_predicted[index] * model(**collate([row])).loss for index, row in enumerate(rows)) / sum(
        num_predicted
    )
    total.backward()
    norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
    model.zero_grad()
    return total.item(), norm.item()


def differing_ratios(model, folder):
    """Return ratios of losses and gradient norms, Trainer to model, that differ from 1."""
    rows, evaluating = example_rows(), {"disable_tqdm": True, "per_device_eval_batch_size": 3}
    trainer = make_trainer(
        folder, model=model, train=rows, per_device_train_batch_size=3, gradient_accumulation_steps=2, max_steps=1,
        logging_steps=1, max_grad_norm=0, learning_rate=0.0, optim="sgd", trainer={"data_collator": collate},
        **evaluating,
    )  # fmt: skip
    num_predicted = [int(trainer._num_items(collate([row]))) for row in rows]
    loss, norm = own_loss_and_gradient(model, rows, num_predicted)
    evaluated = trainer.evaluate(rows)["eval_loss"]
    trainer.train()
    logged = next(entry for entry in trainer.state.log_history if "grad_norm" in entry)
    ratios = {"eval_loss": evaluated / loss, "loss": logged["loss"] / loss, "grad_norm": logged["grad_norm"] / norm}
    return {name: ratio for name, ratio in ratios.items() if abs(ratio - 1) > 1e-3}


@pytest.mark.parametrize("family", ["minicpm3", "whisper", "granite", "xlnet"])
def test_loss_and_gradient_are_those_of_the_model(family, tmp_path):
    models = list(tiny_models([family]))
    if not models:
        pytest.skip(f"{family} is not in this version of transformers")
    assert differing_ratios(models[0][1], tmp_path) == {}


@pytest.mark.slow
def test_loss_and_gradient_of_every_family_are_those_of_the_model(tmp_path):
    differing, names = {}, []
    for family, model in tiny_models():
        if family == "cpmant":
            continue  # their states depend on padding, also in transformers
        try:
            own_loss_and_gradient(model, example_rows()[:1], [1])
        except Exception:  # they cannot be called with ids and a mask only
            continue
        names.append(family)
        if found := differing_ratios(model, tmp_path / family):
            differing[family] = found
    assert differing == {}
    assert len(names) > 80
