"""Invalid rollout options, row by row, in YAML and in TRL's configs."""

import pytest
from datasets import Dataset
from test_rollout_options import planned
from test_rollout_trainers import folder, trainer_of, variety  # noqa: F401, a fixture

from burnish import GRPOConfig, GRPOTrainer, RLOOConfig
from burnish.config.errors import UserError

BOTH = [
    ({"num_generations": 1}, "num_generations must be at least 2: completions of a prompt are compared. Received: 1."),
    ({"temperature": 0}, "with temperature 0, all completions of a prompt are identical and nothing is learned."),
    ({"temperature": -1}, '"temperature" must be at least 0. Received: -1'),
    ({"per_device_train_batch_size": 6, "gradient_accumulation_steps": 2},
     "6 × 2 = 12 completions per generation batch are not a multiple of num_generations 8.\n  Nearest: 8, 16."),
    ({"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2, "steps_per_generation": 3,
      "num_iterations": 2}, "A generation batch of 3 micro-batches does not fit into steps of"),
    ({"loss_type": "cispo"}, "loss_type cispo requires epsilon_high, the maximum probability ratio."),
    ({"loss_type": "grop"}, 'Received: "grop". Did you mean "grpo"?'),
    ({"beta": -0.1}, '"beta" must be at least 0. Received: -0.1.'),
    ({"epsilon": 1}, '"epsilon" must be greater than 0 and less than 1.'),
    ({"delta": 1}, '"delta" must be greater than 1.'),
    ({"top_entropy_quantile": 0}, '"top_entropy_quantile" must be greater than 0 and at most 1.'),
    ({"entropy_coef_min": 2}, "entropy_coef_min 2 is above entropy_coef_max 1."),
    ({"sync_ref_model": True}, "beta is 0: there is no reference model to update."),
    ({"generation_batch_size": 16, "steps_per_generation": 4}, "set the same number"),
    ({"top_p": 0}, '"top_p" must be greater than 0 and at most 1.'),
    ({"eval_temperature": -1}, '"eval_temperature" must be at least 0.'),
    ({"reward_timeout_s": 0}, '"reward_timeout_s" must be greater than 0'),
    ({"num_iterations": 0}, '"num_iterations" must be at least 1'),
    ({"drop_zero_variance_groups": "fill"}, '"drop_zero_variance_groups" must be one of'),
    ({"scale_rewards": "groups"}, 'Did you mean "group"?'),
    ({"reward_weights": ["a", 1]}, '"reward_weights" must be a list of numbers. Received: \'a\' as element 1.'),
    ({"reward_weights": [float("inf")]}, "reward_weights must be finite numbers. Received: [inf]."),
]  # fmt: skip
YAML_CASES = [
    ({"reward_funcs": None}, "stage: grpo needs a reward."),
    ({"reward_weights": [1, 2]}, "reward_weights must have one weight for each reward. Received: 2 for 1."),
    ({"packing": True}, '"packing" is not supported with stage: grpo'),
    ({"train_on_prompt": True}, '"train_on_prompt" is not supported with stage: grpo'),
    ({"mask_history": True}, '"mask_history" is not supported with stage: grpo'),
    ({"predict_with_generate": True}, '"predict_with_generate" is not supported with stage: grpo'),
    ({"streaming": True, "max_steps": 2}, '"streaming" is not supported with stage: grpo'),
    ({"stage": "ppo", "temperature": 0}, '"temperature" must be greater than 0. Received: 0.'),
    ({"stage": "ppo", "num_generations": 2}, '"num_generations" must be 1 with stage: ppo.'),
    ({"auto_find_batch_size": True}, "auto_find_batch_size"),
]
CONFIG_CASES = [
    (GRPOConfig, {"use_vllm": True}, "Remove use_vllm and vllm_*."),
    (GRPOConfig, {"ds3_gather_for_generation": False}, '"ds3_gather_for_generation" must be True'),
    (GRPOConfig, {"auto_find_batch_size": True}, "a generation batch must consist of whole groups"),
    (GRPOConfig, {"generation_kwargs": {"top": 5}}, '"generation_kwargs" does not accept "top".'),
    (GRPOConfig, {"generation_kwargs": {1: 5}}, '"generation_kwargs" does not accept "1".'),
    *(
        (GRPOConfig, {name: value}, f'"{name}" must be a dictionary, or its JSON text')
        for name in ("generation_kwargs", "chat_template_kwargs")
        for value in ([1], 3, "[1]", "abc", "{bad")
    ),
    (RLOOConfig, {"reward_clip_range": [1.0, 0.0]}, "must be a lower and an upper bound"),
    (RLOOConfig, {"num_generations": 1}, "num_generations must be at least 2"),
]


@pytest.mark.parametrize(("options", "message"), BOTH + YAML_CASES)
def test_invalid_yaml_config_gives_its_error(tmp_path, options, message):
    with pytest.raises(UserError) as error:
        planned(tmp_path, **options)
    assert message in str(error.value)


@pytest.mark.parametrize(("kind", "options", "message"), [(GRPOConfig, *row) for row in BOTH] + CONFIG_CASES)
def test_invalid_python_config_gives_its_error(tmp_path, kind, options, message):
    with pytest.raises((UserError, ValueError)) as error:
        kind(output_dir=str(tmp_path), use_cpu=True, report_to="none", **options)
    assert message in str(error.value).replace("`", '"')


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        ([], "The train dataset contains no records."),
        (Dataset.from_list([]), "The train dataset contains no records."),
        (["a"] * 4, "record 1: it must be a dictionary with the key \"prompt\". Received: 'a'."),
        ([{"prompt": "a"}, {"text": "a"}], 'record 2: it must be a dictionary with the key "prompt"'),
        ([{"prompt": "a", "chat_template_kwargs": "x"}], '"chat_template_kwargs" must be a dictionary'),
    ],
    ids=str,
)
def test_unusable_records_of_a_trainer_are_rejected(folder, dataset, message):  # noqa: F811
    args = GRPOConfig(str(folder / "out"), use_cpu=True, bf16=False, report_to="none", max_completion_length=6)
    with pytest.raises(UserError) as error:
        GRPOTrainer(str(folder / "model"), variety, args, dataset)
    assert message in str(error.value)


def test_one_weight_may_be_a_number(folder):  # noqa: F811
    assert trainer_of(folder, reward_weights=2).reward_weights.tolist() == [2.0]


def test_groups_within_a_process_are_explained(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError) as caught:
        GRPOConfig(str(tmp_path), per_device_train_batch_size=2, num_generations=4, use_cpu=True, bf16=False)
    text = str(caught.value)
    assert "2 × 1 = 2 completions per generation batch and process are not a multiple of num_generations 4" in text
    assert "One process generates all completions of a prompt" in text
    assert "Nearest: 4." in text
