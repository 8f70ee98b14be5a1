"""Five steps of a TRL script with its import changed: the same losses, logs and weights."""

import pytest
from golden_run import golden, make_material
from trl_runs import golden_set, logs_of, trainer_of

from representative import representative_slow

pytestmark = [
    pytest.mark.run,
]
LOSS, NORM = 1e-4, 2e-5  # relative: float32 sums of some hundred log-probabilities in another order, through AdamW
PER_MICRO_BATCH = {"dpo_mpo", "kto", "orpo"}
"""Here the terms that TRL computes for a micro-batch, or of a prompt too, are those of the step, or of the answer."""
RUNS = [name for name in golden().get("runs", {}).get("trl", {}) if name not in PER_MICRO_BATCH]
LOGGED = ("rewards/chosen", "rewards/rejected", "rewards/accuracies", "rewards/margins", "logps/chosen",
          "logps/rejected", "entropy", "mean_token_accuracy", "accuracy", "margin", "mean_reward", "grad_norm",
          "num_tokens")  # fmt: skip
OWN = ("loss_type", "loss_weights", "label_smoothing", "beta", "simpo_gamma", "cpo_alpha", "center_rewards_coefficient")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_material(tmp_path_factory.mktemp("golden"))


def trainer_like(case, folder, output, **changes):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    requested = case["settings"]
    arguments = {name: requested[name] for name in OWN if name in requested} | changes
    model, options = requested["model"], {}
    if requested.get("ref_model"):
        options["ref_model"] = str(folder / "models" / requested["ref_model"])
    if requested.get("adapter"):
        base = AutoModelForCausalLM.from_pretrained(folder / "models" / model)
        model = PeftModel.from_pretrained(base, folder / "models" / requested["adapter"], is_trainable=True)
    return trainer_of(
        requested["trainer"], folder, output, golden_set(requested["trainer"]), model, options, **arguments
    )


@pytest.mark.parametrize("name", representative_slow(RUNS, 3))
def test_five_steps_match_trl(name, folder, tmp_path):
    case = golden()["runs"]["trl"][name]
    trainer = trainer_like(case, folder, tmp_path)
    for step, (ours, theirs) in enumerate(zip(logs_of(trainer), case["logs"], strict=False)):
        assert ours["loss"] == pytest.approx(case["step_losses"][step], rel=2 * LOSS), f"step {step + 1}"
        for key in LOGGED:
            if key in theirs:
                assert ours[key] == pytest.approx(theirs[key], rel=2e-3, abs=2e-3), f"{key}, step {step + 1}"
    norms = {key: parameter.norm().item() for key, parameter in trainer.model.named_parameters()}
    for key, norm in case["weight_norms"].items():
        if not key.endswith("bias"):
            assert norms[key] == pytest.approx(norm, rel=2 * NORM), key


@pytest.mark.parametrize("name", ["kto", "dpo_mpo"])
def test_first_step_of_one_micro_batch_matches_trl(name, folder, tmp_path):
    """With the mismatched completions that TRL chose, and the values that it computes per micro-batch."""
    case = golden()["runs"]["trl"][name]
    trainer = trainer_like(case, folder, tmp_path, gradient_accumulation_steps=1, max_steps=1)
    (log,) = logs_of(trainer)
    assert log["loss"] == pytest.approx(case["micro_losses"][0], rel=LOSS)
