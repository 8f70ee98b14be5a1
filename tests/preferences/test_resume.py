"""An interrupted preference run resumes to bitwise equal weights and logs, including its state (a moving baseline, a
reference that is updated, a value head).
"""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

from pair_runs import losses, make_pair_workspace

pytestmark = pytest.mark.run

RUNS = {
    "dpo, lora": {"finetuning_type": "lora"},
    "dpo, full": {},
    "dpo, an adapter that is continued": {"finetuning_type": "lora", "adapter_name_or_path": "adapter"},
    "bco": {"pref_bco_weight": 1.0},
    "a reference that follows": {"sync_ref_model": True, "ref_model_sync_steps": 2},
    "aot": {"pref_loss": "aot"},
    "a second model that follows": {"sync_ref_model": True, "ref_model_sync_steps": 2, "ref_model": "other"},
    "kto, other answers of the step": {"stage": "kto", "kl_pairing": "group"},
    "a reference that is asked beforehand": {"precompute_ref_log_probs": True},
    "kto": {"stage": "kto"},
    "rm": {"stage": "rm"},
    "rm, lora": {"stage": "rm", "finetuning_type": "lora"},
}


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    return make_pair_workspace(tmp_path_factory.mktemp("resume"))


def weights(folder):
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


RARELY = (
    "a reference that follows", "rm",
    "aot", "rm, lora", "dpo, full", "dpo, an adapter that is continued", "a second model that follows", "bco",
    "a reference that is asked beforehand", "kto, other answers of the step",
)  # fmt: skip


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in RARELY else n for n in RUNS])
def test_stopped_run_resumes_to_the_same_weights(workspace, monkeypatch, name):
    made = {**RUNS[name], "max_steps": 5, "save_strategy": "steps", "save_steps": 3}
    if "adapter_name_or_path" in made:
        losses(workspace, monkeypatch, finetuning_type="lora", output_dir=str(workspace / "adapter"))
        made["adapter_name_or_path"] = str(workspace / "adapter")
    whole, resumed = workspace / "whole", workspace / "parted"
    expected = losses(workspace, monkeypatch, **made, output_dir=str(whole))
    losses(workspace, monkeypatch, **made, output_dir=str(resumed))
    for left in resumed.iterdir():  # the state after a kill following step 3
        if left.name != "checkpoint-3":
            shutil.rmtree(left) if left.is_dir() else left.unlink()
    again = losses(workspace, monkeypatch, **made, output_dir=str(resumed), overwrite_output_dir=False)
    assert again == expected
    one, other = weights(whole), weights(resumed)
    assert one.keys() == other.keys()
    for key in one:
        assert torch.equal(one[key], other[key]), key
    logs = [json.loads((folder / "trainer_state.json").read_text())["log_history"][:5] for folder in (whole, resumed)]
    assert logs[0] == logs[1]


@pytest.mark.parametrize("save_only_model", [False, True])
def test_best_reward_model_has_the_head_of_its_step(workspace, monkeypatch, save_only_model):
    folder = workspace / f"best-{save_only_model}"
    losses(
        workspace, monkeypatch, stage="rm", save_only_model=save_only_model, load_best_model_at_end=True,
        metric_for_best_model="loss", greater_is_better=True, eval_dataset=str(workspace / "pairs.json"),
        eval_strategy="steps", eval_steps=1, save_strategy="steps", save_steps=1, output_dir=str(folder),
    )  # fmt: skip
    assert json.loads((folder / "trainer_state.json").read_text())["best_global_step"] == 1
    saved, best, last = (load_file(each / "value_head.safetensors")
                         for each in (folder, folder / "checkpoint-1", folder / "checkpoint-3"))  # fmt: skip
    name = "v_head.summary.weight"
    assert torch.equal(saved[name], best[name])
    assert not torch.equal(saved[name], last[name])
