"""Five steps equal LLaMA-Factory's and TRL's: losses, logs and weights (tests/golden)."""

import pytest
from golden_run import golden, make_material, run
from transformers import AutoModelForCausalLM

from burnish.config.options import union
from burnish.data.batches.batching import collate_prefix_sharing
from burnish.losses.kto import KtoObjective, KtoOptions
from burnish.losses.lm import LmOptions
from burnish.losses.preference_options import PreferenceOptions
from burnish.losses.reference import SeparateModel
from burnish.models.patches.attention import make_padding_free
from burnish.models.patches.capabilities import find_capabilities
from burnish.parallel.options import ParallelOptions
from burnish.parallel.single import SingleProcess
from burnish.utils.patching import PatchOptions
from representative import representative_slow

pytestmark = [
    pytest.mark.run,
]

Flat = union("Flat", KtoOptions, LmOptions, PreferenceOptions, PatchOptions)
LOSS = 1e-4  # relative: float32 sums of some hundred log-probabilities in another order, through AdamW
NORM = 2e-5
RATE = 1e-3
LLAMAFACTORY_CASES = ["rm", "dpo_sigmoid", "dpo_sigmoid_lora_adapter", "dpo_sigmoid_reference_ftx", "orpo", "simpo"]
TRL_CASES = [
    name
    for name, case in golden().get("runs", {}).get("trl", {}).items()
    if case["settings"]["trainer"] == "DPOTrainer"
]
PER_MICRO_BATCH = {"dpo_sft", "dpo_mpo"}
"""TRL divides their token means by the tokens of a micro-batch, burnish by those of the step."""
LOGGED = ("rewards/chosen", "rewards/rejected", "rewards/accuracies", "rewards/margins", "logps/chosen",
          "logps/rejected", "sft_loss", "odds_ratio_loss", "grad_norm")  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_material(tmp_path_factory.mktemp("golden"))


def assert_same(case, logs, norms, steps=5):
    for step, (ours, theirs) in enumerate(zip(logs[:steps], case["logs"], strict=False)):
        assert ours["loss"] == pytest.approx(case["step_losses"][step], rel=LOSS), f"step {step + 1}"
        for name in LOGGED:
            if name in theirs:
                assert ours[name] == pytest.approx(theirs[name], rel=2e-3, abs=2e-4), f"{name}, step {step + 1}"
    if steps == 5:
        for name, norm in case["weight_norms"].items():
            if not name.endswith("bias"):
                assert norms[name.replace(".default", "")] == pytest.approx(norm, rel=NORM), name


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", representative_slow(LLAMAFACTORY_CASES, ("rm", "dpo_sigmoid")))
def test_five_steps_match_llamafactory(name, folder, monkeypatch):
    case = golden()["runs"]["llamafactory"][name]
    options = {key: value for key, value in case["settings"].items() if key not in ("do_train", "disable_shuffling")}
    if options.get("adapter_name_or_path"):
        options["ref_model"] = "policy"  # in LLaMA-Factory, the reference of a continued adapter is the base model
    assert_same(case, *run(folder, monkeypatch, **options))


def test_first_step_baseline_matches_llamafactory(folder, monkeypatch):
    """Later baselines change with each micro-batch in LLaMA-Factory, and once per step in burnish."""
    case = golden()["runs"]["llamafactory"]["dpo_bco"]
    options = {key: value for key, value in case["settings"].items() if key not in ("do_train", "disable_shuffling")}
    assert_same(case, *run(folder, monkeypatch, **options), steps=1)


@pytest.mark.parametrize("name", representative_slow(TRL_CASES, ("dpo_sigmoid", "dpo_mpo")))
def test_five_steps_match_trl(name, folder, monkeypatch):
    case = golden()["runs"]["trl"][name]
    requested = case["settings"]
    names = {"loss_type": "pref_loss", "beta": "pref_beta", "loss_weights": "pref_loss_weights",
             "label_smoothing": "dpo_label_smoothing", "model": "model_name_or_path"}  # fmt: skip
    left_out = {"trainer", "rows", "adapter", "seed", "model_kwargs"}
    options = {names.get(key, key): value for key, value in requested.items() if key not in left_out}
    if requested.get("adapter"):
        options |= {"adapter_name_or_path": requested["adapter"], "finetuning_type": "lora"}
    steps = 0 if name in PER_MICRO_BATCH else 5
    assert_same(case, *run(folder, monkeypatch, stage="dpo", dataset="dpo_en_demo", **options), steps=steps)


@pytest.mark.parametrize("name", ["reward", "reward_center"])
def test_five_steps_of_a_classifier_match_trl(name, folder, monkeypatch):
    """TRL's minimum and maximum rewards are means over micro-batches."""
    case = golden()["runs"]["trl"][name]
    options = {"stage": "rm", "dataset": "dpo_en_demo", "model_name_or_path": "scorer"}
    centre = case["settings"].get("center_rewards_coefficient")
    logs, norms = run(folder, monkeypatch, center_rewards_coefficient=centre, **options)
    for ours, theirs, loss in zip(logs, case["logs"], case["step_losses"], strict=True):
        assert ours["loss"] == pytest.approx(loss, rel=2e-4)
        assert [ours[name] for name in ("accuracy", "margin", "mean_reward")] == pytest.approx(
            [theirs[name] for name in ("accuracy", "margin", "mean_reward")], abs=2e-3
        )
        assert ours["min_reward"] <= theirs["min_reward"] <= theirs["max_reward"] <= ours["max_reward"]
    for name, norm in case["weight_norms"].items():
        if not name.endswith("bias"):
            assert norms[name] == pytest.approx(norm, rel=5e-5), name


def test_first_micro_batches_of_kto_match_trl(folder):
    """TRL puts mismatched completions after the record's own prompt, and has a baseline per micro-batch."""
    case, records = golden()["runs"]["trl"]["kto"], golden()["runs"]["rows"]["chatml"]["kto"]
    policy, reference = (
        AutoModelForCausalLM.from_pretrained(folder / "models" / name) for name in ("policy", "reference")
    )
    objective, module = configured_kto(policy, reference)
    engine = SingleProcess(ParallelOptions(use_cpu=True))
    for start, expected in zip((0, 2), case["micro_losses"], strict=False):
        rows = [kto_row(record) for record in records[start : start + 2]]
        (batch,) = objective.prepare_step(module, [objective.collate(rows)], engine)
        loss = objective.loss(module, batch).total / objective.num_items(batch)
        assert loss.item() == pytest.approx(expected, rel=LOSS)


def configured_kto(policy, reference):
    options = Flat()
    objective = KtoObjective(options, template=None)
    objective.configure(
        find_capabilities(policy, head_of=policy),
        collate_prefix_sharing if make_padding_free(policy).is_padding_free else None,
    )
    make_padding_free(reference)
    objective.reference = SeparateModel(objective.module_of_reference(reference))
    return objective, objective.module(policy)


def kto_row(record):
    (ids, start), (other, other_start) = (
        (row["input_ids"], row["prompt_length"]) for row in (record["completion"], record["kl"])
    )
    mismatched_ids = ids[:start] + other[other_start:]
    return {
        "input_ids": ids, "labels": [-100] * start + ids[start:], "tag": record["tag"],
        "kl_input_ids": mismatched_ids, "kl_labels": [-100] * start + mismatched_ids[start:],
    }  # fmt: skip
