"""Rewards that cannot be computed are rejected before a completion is generated, in YAML and in Python."""

import json
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest
import torch
from datasets import Dataset, IterableDataset
from test_rollout_options import planned
from test_rollout_runs import user
from test_rollout_trainers import folder, prompts, trainer_of, variety  # noqa: F401, a fixture
from transformers import LlamaConfig, LlamaForSequenceClassification

from burnish import GRPOTrainer, UserError, rewards
from burnish.config.options import RawValue
from burnish.explain.explain import explain
from burnish.rollouts.rewards.functions import load_rewards
from burnish.run.plan.plan import plan

FILE = """
def needs_level(completions, level, **kwargs):
    return [0.0] * len(completions)


def needs_state(completions, trainer_state, **kwargs):
    return [0.0] * len(completions)


def needs_environments(completions, environments):
    return [0.0] * len(completions)
"""


@pytest.fixture
def no_math_verify(monkeypatch):
    monkeypatch.setitem(sys.modules, "math_verify", None)


@pytest.mark.parametrize(
    "entry",
    ["accuracy_reward", "reasoning_accuracy_reward", {"cosine_scaled_reward": {"max_len": 3}},
     {"get_cosine_scaled_reward": {"max_len": 3}}],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("stage", ["grpo", "rloo", "ppo"])
def test_missing_library_of_a_reward_is_reported_by_the_plan(tmp_path, no_math_verify, entry, stage):
    name = entry if isinstance(entry, str) else next(iter(entry))
    with pytest.raises(
        UserError, match=rf"{name} requires the library 'math_verify'.*\n.*burnish.*\[rewards\]"
    ) as error:
        planned(tmp_path, stage=stage, reward_funcs=[entry], num_generations=None)
    assert "run.yaml, line 1" in str(error.value)


@pytest.mark.parametrize(
    "function",
    [rewards.accuracy_reward, rewards.get_cosine_scaled_reward(3), "burnish.rewards.accuracy_reward",
     {"accuracy_reward": {"solution": "1"}}],
    ids=["function", "object", "path", "arguments"],
)  # fmt: skip
def test_missing_library_of_a_reward_is_reported_when_it_is_loaded(no_math_verify, function):
    with pytest.raises(UserError, match="requires the library 'math_verify', which is not installed"):
        load_rewards([function])


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"soft_overlong_punishment": {"max_completion_len": 512, "soft_punish_cache": -1}},
         "soft_overlong_punishment: soft_punish_cache must be an integer of at least 0. Received: -1."),
        ({"soft_overlong_punishment": {"max_completion_len": "long", "soft_punish_cache": 8}},
         "max_completion_len must be an integer of at least 1. Received: 'long'."),
        ({"repetition_penalty_reward": {"ngram_size": 0}}, "ngram_size must be an integer of at least 1. Received: 0."),
        ({"repetition_penalty_reward": {"max_penalty": "a"}}, "must be a number of at most 0. Received: 'a'"),
        ({"json_schema_reward": {"schema": "object"}}, "schema must be a dictionary. Received: 'object'."),
        ({"json_schema_reward": {"schema": {"properties": {"a": {"type": "strin"}}}}},
         'type must be one of object, array, string, integer, number, boolean, null. Received: \'strin\'.'),
        ({"json_schema_reward": {"schema": {"required": "a"}}}, "required must be a list. Received: 'a'."),
        ({"json_schema_reward": {"schema": {"items": [1]}}}, "items must be a dictionary. Received: [1]."),
    ],
    ids=str,
)  # fmt: skip
def test_invalid_argument_of_a_built_in_reward_is_reported_when_it_is_loaded(entry, message):
    with pytest.raises(UserError) as error:
        load_rewards([entry])
    assert message in str(error.value)


def test_invalid_length_of_the_cosine_reward_is_reported():
    with pytest.raises(UserError, match=r"max_len must be an integer of at least 1\. Received: 0\."):
        rewards.get_cosine_scaled_reward(0)
    with pytest.raises(UserError, match=r"min_value_wrong must be a number\. Received: 'a'\."):
        rewards.get_cosine_scaled_reward(3, min_value_wrong="a")


def test_reward_is_loaded_if_its_library_is_installed(monkeypatch):
    library = ModuleType("math_verify")
    library.__spec__ = ModuleSpec("math_verify", None)
    monkeypatch.setitem(sys.modules, "math_verify", library)
    assert [each.name for each in load_rewards(["accuracy_reward"])] == ["accuracy_reward"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("needs_level", 'requires the column "level". The data has: answer, input, instruction, output, solution.'),
        ("needs_state", 'needs_state requires the argument "trainer_state", which only GRPOTrainer and RLOOTrainer in '
         "Python pass.\n  Give the parameter a default value: trainer_state=None."),
        ("needs_environments", 'requires the argument "environments", which only trainers with an environment_factory '
         "pass."),
    ],
)  # fmt: skip
def test_argument_that_is_not_passed_is_reported_by_explain(tmp_path, name, message):
    options = user(tmp_path, reward_funcs=[f"{tmp_path}/my_rewards.py:{name}"])
    (tmp_path / "my_rewards.py").write_text(FILE)
    with pytest.raises(UserError) as error:
        explain(plan({name: RawValue(value, "test") for name, value in options.items()}))
    assert message in str(error.value)


def test_column_that_the_evaluation_dataset_lacks_is_reported_by_explain(tmp_path):
    options = user(
        tmp_path, reward_funcs=[f"{tmp_path}/my_rewards.py:needs_level"], eval_strategy="steps", eval_steps=1
    )
    (tmp_path / "my_rewards.py").write_text(FILE)
    for name, more in (("data", {"level": 1}), ("held_out", {})):
        (tmp_path / f"{name}.json").write_text(json.dumps([{"prompt": "1 + 1?", **more}] * 8))
    options |= {"dataset": str(tmp_path / "data.json"), "eval_dataset": str(tmp_path / "held_out.json")}
    with pytest.raises(UserError, match=r'needs_level requires the column "level"\. The evaluation dataset has'):
        explain(plan({name: RawValue(value, "test") for name, value in options.items()}))


def needs_environments(completions, environments):
    return [0.0] * len(completions)


def needs_answer(completions, answer):
    return [float(each is None) for each in answer]


def test_argument_of_environments_is_rejected_without_them(folder):  # noqa: F811
    with pytest.raises(UserError, match='requires the argument "environments"'):
        trainer_of(folder, rewards=needs_environments)


@pytest.mark.parametrize("is_named", [False, True])
def test_trainer_rejects_an_evaluation_dataset_without_a_required_column(folder, is_named):  # noqa: F811
    held_out = Dataset.from_list([{"prompt": "a"}] * 4)
    given = {"short": prompts(2), "held_out": held_out} if is_named else held_out
    with pytest.raises(UserError, match=f"The {'held_out' if is_named else 'eval'} dataset has: no other columns"):
        trainer_of(folder, rewards=needs_answer, trainer_args={"eval_dataset": given})


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (Dataset.from_list([{"question": "a"}]), 'The eval dataset requires a column "prompt"'),
        (IterableDataset.from_generator(lambda: iter([{"question": "a"}])), 'with the key "prompt"'),
        (({"prompt": "a"},), "must be a `Dataset` or `IterableDataset`. Received: `tuple`"),
    ],
)
def test_trainer_rejects_an_unusable_evaluation_dataset_before_training(folder, dataset, message):  # noqa: F811
    with pytest.raises((UserError, TypeError), match=message):
        trainer_of(folder, trainer_args={"eval_dataset": dataset})


def test_dataset_passed_to_evaluate_needs_the_required_columns(folder):  # noqa: F811
    trainer = trainer_of(folder, rewards=needs_answer)
    with pytest.raises(UserError, match='needs_answer requires the column "answer"'):
        trainer.evaluate(Dataset.from_list([{"prompt": "a"}] * 4))


def test_column_that_some_records_lack_is_none_for_them(folder):  # noqa: F811
    """Also if no record of a generation batch has it."""
    records = [{"prompt": "a", "answer": "b"}, *[{"prompt": "a"}] * 7]
    trainer = trainer_of(folder, rewards=needs_answer, dataset=records, max_steps=8, shuffle_dataset=False)
    trainer.train()
    assert [log["reward"] for log in trainer.state.log_history if "loss" in log] == [0, *[1] * 7]


def test_script_may_pass_other_arguments_to_its_reward_functions(folder):  # noqa: F811
    class CustomTrainer(GRPOTrainer):
        def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
            return super()._calculate_rewards(
                [{**each, "level": 1} for each in inputs], prompts, completions, completion_ids_list
            )

    def graded(completions, level):
        return [each / 10 for each in level]

    trainer = trainer_of(folder, CustomTrainer, rewards=[graded, variety], max_steps=1)
    trainer.train()
    assert trainer.state.log_history[0]["rewards/graded/mean"] == pytest.approx(0.1)


# --- names and models of a trainer ------------------------------------------------------------------------------------


@pytest.mark.parametrize("as_list", [False, True])
def test_trainer_accepts_the_name_of_a_built_in_reward(folder, as_list):  # noqa: F811
    name = "exact_match_reward"
    trainer = trainer_of(folder, rewards=[name] if as_list else name)
    assert trainer.reward_funcs == [rewards.exact_match_reward]
    assert trainer.reward_func_names == [name]


def test_missing_library_of_a_named_reward_is_reported_by_the_trainer(folder, no_math_verify):  # noqa: F811
    for given in ("accuracy_reward", rewards.accuracy_reward):
        with pytest.raises(UserError, match="accuracy_reward requires the library 'math_verify'"):
            trainer_of(folder, rewards=given)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("cosine_scaled_reward", "Pass burnish.rewards.get_cosine_scaled_reward(...)."),
        ("acuracy_reward", 'Did you mean "accuracy_reward"?'),
        ("nowhere/at/all", '"nowhere/at/all" is not a folder.'),
        ("my_rewards.py:exact", "Pass a function, the name of a function of burnish.rewards"),
        ("some/model", 'reward_model "some/model" is not a local folder, is not in the Hub'),
    ],
)  # fmt: skip
def test_trainer_rejects_an_unknown_reward_name(folder, monkeypatch, name, message):  # noqa: F811
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(UserError) as error:
        trainer_of(folder, rewards=[name])
    assert message in str(error.value)


def test_module_of_a_script_is_a_reward_function(folder):  # noqa: F811
    class Length(torch.nn.Module):
        def forward(self, completions, **_):
            return [float(len(completion)) for completion in completions]

    trainer = trainer_of(folder, rewards=Length(), max_steps=1)
    trainer.train()
    assert trainer.state.log_history[0]["rewards/Length/mean"] > 0


def test_reward_model_without_a_known_tokenizer_is_rejected(folder):  # noqa: F811
    config = LlamaConfig(
        vocab_size=32, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, num_labels=1
    )
    with pytest.raises(UserError, match="Pass it in `reward_processing_classes`"):
        trainer_of(folder, rewards=LlamaForSequenceClassification(config))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reward_model": "localhost:8000", "reward_model_type": "api"}, "must be a URL that starts with http://"),
        ({"reward_model": "http://localhost:8000"}, "Set reward_model_type: api."),
    ],
)
def test_type_of_a_reward_model_must_match_its_name(tmp_path, options, message):
    with pytest.raises(UserError) as error:
        planned(tmp_path, **options)
    assert message in str(error.value)
