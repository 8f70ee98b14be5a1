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
from script_runs import as_set, losses, make, pairs, verdicts, weights
from test_collators import KINDS
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
        | {"prompt_input_ids", "prompt_attention_mask"},
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_pair_workspace(tmp_path_factory.mktemp("overrides"))


def of(kind, bases, folder, output, given=None, **arguments):
    """A trainer of a subclass that has the methods of ``bases``."""
    own = type("Mine", (bases, getattr(burnish, kind)), {})
    rows = verdicts() if kind == "KTOTrainer" else pairs()
    return make(kind, folder / "model", output, rows, given, own, **arguments)


class Usual:
    """No override."""


class Noting:
    """Each method notes what it was given, and calls the original."""

    def _note(self, name, model=None, batch=None):
        vars(self).setdefault("seen", {})[name] = (model, None if batch is None else set(batch))


def noting(name, is_given_model=True):
    def method(self, *args, **kwargs):
        self._note(name, *(args[:2] if is_given_model else ()))
        return getattr(super(kind, self), name)(*args, **kwargs)

    kind = type("Noting" + name, (Noting,), {name: method})
    return kind


def run(kind, bases, folder, output, **arguments):
    rows = as_set(verdicts(5) if kind == "KTOTrainer" else pairs(5))
    trainer = of(kind, bases, folder, output, {"eval_dataset": rows}, per_device_eval_batch_size=2, **arguments)
    result = losses(trainer)
    metrics = {name: v for name, v in trainer.evaluate().items() if "runtime" not in name and "per_second" not in name}
    return trainer, result, metrics


@pytest.mark.parametrize("name", ["compute_loss", "training_step", "prediction_step"])
@pytest.mark.parametrize("kind", representative_slow(TRAINERS, ("DPOTrainer",)))
def test_override_receives_trl_batch_and_model_and_changes_nothing(kind, name, folder, tmp_path):
    mine, result, evaluated = run(kind, noting(name), folder, tmp_path / "mine")
    _, defaults, expected = run(kind, Usual, folder, tmp_path / "usual")
    model, names = mine.seen[name]
    assert model.config.vocab_size == model.get_input_embeddings().num_embeddings
    assert names == PADDED[kind]
    assert result == pytest.approx(defaults, rel=1e-5)
    assert evaluated == pytest.approx(expected, rel=1e-5)


OWN = {
    "DPOTrainer": ["_compute_loss"],
    "KTOTrainer": ["_compute_loss"],
    "ORPOTrainer": ["get_batch_loss_metrics", "concatenated_forward"],
    "CPOTrainer": ["get_batch_loss_metrics", "concatenated_forward"],
}
BESIDE = {
    "DPOTrainer": ["_prepare_dataset"],
    "KTOTrainer": ["_prepare_dataset"],
    "RewardTrainer": ["_prepare_dataset"],
    "ORPOTrainer": ["odds_ratio_loss", "store_metrics", "tokenize_row", "build_tokenized_answer", "get_batch_logps"],
    "CPOTrainer": ["cpo_loss", "store_metrics", "tokenize_row", "build_tokenized_answer", "get_batch_logps"],
}


@pytest.mark.sample(7)
@pytest.mark.parametrize(
    ("kind", "name", "takes_model"),
    [
        (kind, name, is_own)
        for is_own, table in ((True, OWN), (False, BESIDE))
        for kind in table
        for name in table[kind]
    ],
)
def test_trl_method_override_is_called_and_changes_nothing(kind, name, takes_model, folder, tmp_path):
    mine, result, evaluated = run(kind, noting(name, takes_model), folder, tmp_path / "mine")
    _, defaults, expected = run(kind, Usual, folder, tmp_path / "usual")
    assert name in mine.seen
    assert result == pytest.approx(defaults, rel=1e-4)
    assert evaluated["eval_loss"] == pytest.approx(expected["eval_loss"], rel=1e-4)
    if takes_model:
        assert mine.seen[name][1] == PADDED[kind]


@pytest.mark.parametrize("loss_type", ["sigmoid", "hinge", "ipo", "simpo"])
def test_cpo_losses_equal_those_of_its_method(loss_type, folder, tmp_path):
    options = {"loss_type": loss_type, "label_smoothing": 0.1 if loss_type == "sigmoid" else 0.0}
    _, result, _ = run("CPOTrainer", noting("cpo_loss", False), folder, tmp_path / "mine", **options)
    _, defaults, _ = run("CPOTrainer", Usual, folder, tmp_path / "usual", **options)
    assert result == pytest.approx(defaults, rel=1e-4)


@pytest.mark.parametrize("kind", ["DPOTrainer", "KTOTrainer"])
def test_constant_loss_override_is_reported(kind, folder, tmp_path):
    class Own:
        def _compute_loss(self, model, inputs, return_outputs):
            loss = model(inputs["input_ids"]).logits.sum() * 0 + 42.0
            return (loss, None) if return_outputs else loss

    trainer = of(kind, Own, folder, tmp_path)
    assert losses(trainer) == [42.0] * 3
    assert trainer.evaluate(as_set(verdicts(4) if kind == "KTOTrainer" else pairs(4)))["eval_loss"] == 42.0


def test_custom_loss_can_read_model_and_reference(folder, tmp_path):
    """DPO's formula over TRL's batch gives burnish's losses."""

    class Own:
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

    mine, defaults = (of("DPOTrainer", bases, folder, tmp_path / bases.__name__) for bases in (Own, Usual))
    assert losses(mine) == pytest.approx(losses(defaults), rel=1e-4)
    assert mine.state.log_history[0]["mine"] == 2.0


def test_batch_changed_by_a_script_is_trained(folder, tmp_path):
    class Swapped:
        def compute_loss(self, model, inputs, *args, **kwargs):
            for name, value in inputs.items():
                inputs[name] = torch.cat(value.chunk(2)[::-1])
            return super().compute_loss(model, inputs, *args, **kwargs)

    options = {"learning_rate": 1e-2}
    mine, defaults = (
        of("DPOTrainer", bases, folder, tmp_path / bases.__name__, **options) for bases in (Swapped, Usual)
    )
    mine.train(), defaults.train()
    assert mine.state.log_history[1]["rewards/margins"] < 0 < defaults.state.log_history[1]["rewards/margins"]


@pytest.mark.parametrize("kind", representative_slow(TRAINERS, ("CPOTrainer",)))
def test_batch_replaced_in_prepare_inputs_is_trained(kind, folder, tmp_path):
    class Same:
        def _prepare_inputs(self, inputs):
            return {**super()._prepare_inputs(inputs)}

    _, result, evaluated = run(kind, Same, folder, tmp_path / "mine")
    _, defaults, expected = run(kind, Usual, folder, tmp_path / "usual")
    assert result == pytest.approx(defaults, rel=1e-4)
    assert evaluated == {name: pytest.approx(value, rel=1e-3, abs=1e-5) for name, value in expected.items()}


def test_baseline_override_is_used_by_kto(folder, tmp_path):
    class Far:
        def _compute_kl_logps(self, model, batch):
            result = super()._compute_kl_logps(model, batch)
            return result + (0 if model is self.ref_model or getattr(self, "is_second", False) else 3.0)

    mine = of(
        "KTOTrainer", Far, folder, tmp_path, {"ref_model": AutoModelForCausalLM.from_pretrained(folder / "model")}
    )
    losses(mine)
    assert mine.state.log_history[0]["kl"] == pytest.approx(3.0, abs=1e-4)


@pytest.mark.parametrize("kind", ["DPOTrainer", "KTOTrainer"])
def test_reference_log_probabilities_of_a_script_are_used(kind, folder, tmp_path):
    class Far:
        def compute_ref_log_probs(self, model, inputs):
            return tuple(one + 2.0 * at for at, one in enumerate(super().compute_ref_log_probs(model, inputs)))

    trainer = of(kind, Far, folder, tmp_path, precompute_ref_log_probs=True)
    first = losses(trainer)[0]
    if kind == "DPOTrainer":
        assert first == pytest.approx(math.log1p(math.exp(-0.1 * 2.0)), rel=1e-4)
    else:
        defaults = of(kind, Usual, folder, tmp_path, precompute_ref_log_probs=True)
        assert list(trainer.train_dataset["reference_kl_logps"]) == pytest.approx(
            [value + 2.0 for value in defaults.train_dataset["reference_kl_logps"]], rel=1e-5
        )


def test_rows_tokenized_by_override_are_trained(folder, tmp_path):
    class Short:
        def tokenize_row(self, feature, model=None):
            assert isinstance(feature["prompt"], str)
            row = super().tokenize_row(feature, model)
            return {name: ids[-4:] if "prompt" not in name else ids for name, ids in row.items()}

    trainer = of("ORPOTrainer", Short, folder, tmp_path)
    assert {len(row["chosen_input_ids"]) for row in trainer.train_dataset} == {4}
    assert all(map(math.isfinite, losses(trainer)))


def test_static_methods_are_called_with_the_keywords_of_trl(folder, tmp_path):
    class Strict:
        @staticmethod
        def concatenated_inputs(batch, *, is_encoder_decoder, padding_value, device):
            return burnish.ORPOTrainer.concatenated_inputs(batch, is_encoder_decoder, padding_value, device)

        @staticmethod
        def get_batch_logps(logits, labels, *, average_log_prob, is_encoder_decoder):
            return burnish.ORPOTrainer.get_batch_logps(logits, labels, average_log_prob, is_encoder_decoder)

    own, usual = (losses(of("ORPOTrainer", one, folder, tmp_path / one.__name__)) for one in (Strict, Usual))
    assert own == pytest.approx(usual, rel=1e-4)


@pytest.mark.parametrize("kind", ["DPOTrainer", "KTOTrainer"])
def test_prepare_input_receives_trl_batch(kind, folder, tmp_path):
    class Noted(Noting):
        def _prepare_input(self, data):
            if isinstance(data, dict):
                self._note("_prepare_input", None, data)
            return super()._prepare_input(data)

    trainer, own, metrics = run(kind, Noted, folder, tmp_path / "own")
    _, usual, usual_metrics = run(kind, Usual, folder, tmp_path / "usual")
    assert trainer.seen["_prepare_input"][1] >= PADDED[kind]
    assert own == pytest.approx(usual, rel=1e-4)
    assert metrics["eval_loss"] == pytest.approx(usual_metrics["eval_loss"], rel=1e-4)


@pytest.mark.parametrize("kind", ["ORPOTrainer", "CPOTrainer"])
def test_predictions_with_an_overridden_forward_are_mean_logits(kind, folder, tmp_path):
    """As TRL returns them: two numbers per batch, and as many zeros as labels."""
    trainer = of(kind, noting("concatenated_forward"), folder, tmp_path, {"eval_dataset": as_set(pairs(5))},
                 per_device_eval_batch_size=2)  # fmt: skip
    found = trainer.predict(trainer.eval_dataset)
    *_, metrics = trainer.get_batch_loss_metrics(trainer.model, next(iter(trainer.get_eval_dataloader())), "eval")
    assert found.predictions.shape == found.label_ids.shape
    assert not found.label_ids.any()
    means = [metrics["eval_logits/chosen"], metrics["eval_logits/rejected"]]
    assert found.predictions[:2] == pytest.approx(means, rel=1e-5)


@pytest.mark.parametrize("kind", ["ORPOTrainer", "CPOTrainer"])
def test_rows_tokenized_by_a_script_are_predicted_unchanged(kind, folder, tmp_path):
    rows = as_set(pairs(5))
    mine = of(kind, noting("tokenize_row", False), folder, tmp_path, {"eval_dataset": rows})
    expected = mine.evaluate()["eval_loss"]
    assert mine.predict(mine.eval_dataset).metrics["test_loss"] == pytest.approx(expected)
    assert mine.evaluate(mine.eval_dataset)["eval_loss"] == pytest.approx(expected)


@pytest.mark.parametrize("kind", representative_slow(KINDS, 1))
def test_custom_collator_works_with_an_override(kind, folder, tmp_path):
    options = {"data_collator": KINDS[kind]}
    mine, defaults = (
        of(kind, bases, folder, tmp_path / bases.__name__, options) for bases in (noting("compute_loss"), Usual)
    )
    assert losses(mine) == pytest.approx(losses(defaults), rel=1e-5)


def test_adapter_and_precomputed_reference_work_with_an_override(folder, tmp_path):
    result = []
    for bases in (noting("compute_loss"), Usual):
        lora = LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")
        for asks in (False, True):
            trainer = of("DPOTrainer", bases, folder, tmp_path, {"peft_config": lora}, precompute_ref_log_probs=asks)
            result.append((losses(trainer), weights(trainer)))
    for one, moved in result[1:]:
        assert one == pytest.approx(result[0][0], rel=1e-5)
        assert all(torch.allclose(value, result[0][1][name], atol=1e-6) for name, value in moved.items())


def of_processes(kind, model, output, name):
    """Seven rows, so that a process has one less than the other; the first writes what was found."""
    rows = as_set(verdicts(7) if kind == "KTOTrainer" else pairs(7))
    count = int(os.environ.get("WORLD_SIZE", "1"))
    own = type("Mine", (noting(name), getattr(burnish, kind)), {}) if name else None
    trainer = make(
        kind, model, output, rows, {"eval_dataset": rows}, own, per_device_train_batch_size=4 // count, max_steps=2,
        per_device_eval_batch_size=2,
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
    of_processes(kind, folder / "model", tmp_path / "one", None)
    in_two_processes(of_processes, kind, str(folder / "model"), str(tmp_path / "two"), name)
    one, two = (json.loads((tmp_path / output / "found.json").read_text()) for output in ("one", "two"))
    assert two == pytest.approx(one, rel=1e-4)


@pytest.mark.parametrize("kind", ["DPOTrainer", "KTOTrainer", "SFTTrainer"])
def test_evaluation_of_the_loss_alone_does_not_ask_for_outputs(kind, folder, tmp_path):
    """As in TRL. So an override that only returns the loss can be evaluated."""

    class Mine(getattr(burnish, kind)):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            return super().compute_loss(model, inputs, num_items_in_batch=num_items_in_batch) * 0 + 7

    rows = [{"text": "one two"}] * 4 if kind == "SFTTrainer" else None
    given = {"eval_dataset": as_set(rows or (verdicts() if kind == "KTOTrainer" else pairs()))}
    trainer = make(kind, folder / "model", tmp_path, rows, own=Mine, given=given)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(7)


@pytest.mark.parametrize(("kind", "name"), [("DPOTrainer", "dpo_loss"), ("KTOTrainer", "kto_loss")])
def test_loss_method_of_earlier_versions_is_named(kind, name, folder, tmp_path):
    mine = type("Mine", (getattr(burnish, kind),), {name: lambda self, *args: None})
    with pytest.warns(UserWarning, match=f"Mine overrides {name}, which burnish does not call"):
        make(kind, folder / "model", tmp_path, own=mine)
