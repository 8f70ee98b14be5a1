"""Effects of each rollout option, and conflicting combinations."""

import contextlib
import io
import json
import math
import time
from types import SimpleNamespace

import pytest
import torch
from golden_steps import GoldenCase, make_models
from test_rollout_trainers import folder, prompts, trainer_of, variety  # noqa: F401, a fixture

from burnish import GRPOConfig
from burnish.config.errors import UserError
from burnish.config.options import RawValue
from burnish.losses.rollouts.loss import EntropyController
from burnish.run import rollouts
from burnish.run.plan.plan import plan


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return make_models(tmp_path_factory.mktemp("models"))


ADAPTIVE = {"use_adaptive_entropy": True, "entropy_coef": 0.02, "entropy_target": 20.0}
OF_THE_LOSS = {
    "rl_loss_type": ("grpo", {}), "rl_beta": (0.5, {}), "epsilon": (0.05, {}), "epsilon_high": (0.5, {}),
    "delta": (1.3, {}), "importance_sampling_level": ("sequence", {}),
    "sapo_temperature_pos": (2.0, {"rl_loss_type": "sapo"}), "sapo_temperature_neg": (3.0, {"rl_loss_type": "sapo"}),
    "vespo_k_pos": (1.0, {"rl_loss_type": "vespo"}), "vespo_lambda_pos": (1.0, {"rl_loss_type": "vespo"}),
    "vespo_k_neg": (1.0, {"rl_loss_type": "vespo"}), "vespo_lambda_neg": (1.0, {"rl_loss_type": "vespo"}),
    "use_bias_correction_kl": (False, {"rl_beta": 0.5}), "off_policy_mask_threshold": (0.001, {}),
    "top_entropy_quantile": (0.2, {}), "entropy_coef": (0.5, {}),
    "use_adaptive_entropy": (True, {"entropy_coef": 0.02}),
    "entropy_target": (20.0, {**ADAPTIVE, "entropy_target": 1.0}),
    "entropy_coef_delta": (0.5, ADAPTIVE), "entropy_coef_max": (0.021, ADAPTIVE), "entropy_coef_min": (0.5, ADAPTIVE),
    "multi_objective_aggregation": ("normalize_then_sum", {}), "scale_rewards": ("none", {}),
    "reward_weights": ([0.8, 0.2], {}), "normalize_advantages": (True, {"trainer": "rloo"}),
    "reward_clip_range": ([-0.3, 0.5], {"trainer": "rloo"}), "mask_truncated_completions": (True, {"set": "cut"}),
}  # fmt: skip


def numbers(models, options):
    """Return losses and gradient norms of three steps on the same completions."""
    config = {"rl_beta": 0.0, "num_iterations": 3, **options}
    case = {
        "set": config.pop("set", "a"), "trainer": config.pop("trainer", "grpo"), "model": "policy+reference",
        "per_device_train_batch_size": 16, "gradient_accumulation_steps": 1, "max_steps": 3, "learning_rate": 1.0,
        "config": config,
    }  # fmt: skip
    outcome = GoldenCase(case, models, 64).run()
    return outcome.losses + outcome.norms


@pytest.mark.sample(9)
@pytest.mark.parametrize("name", OF_THE_LOSS)
def test_each_loss_option_changes_the_loss(models, name):
    value, beside = OF_THE_LOSS[name]
    assert numbers(models, {**beside, name: value}) != numbers(models, beside)


def planned(tmp_path, **options):
    (tmp_path / "set.jsonl").write_text(json.dumps({"prompt": "a", "response": "b"}))
    made = {
        "stage": "grpo", "model_name_or_path": "model", "dataset": str(tmp_path / "set.jsonl"), "template": "chatml",
        "output_dir": str(tmp_path / "out"), "use_cpu": True, "reward_funcs": ["exact_match_reward"],
        "per_device_train_batch_size": 8, **options,
    }  # fmt: skip
    return plan({name: RawValue(value, "run.yaml, line 1") for name, value in made.items() if value is not None})


def test_preset_sets_options_that_are_not_given(tmp_path):
    options = planned(tmp_path, rl_preset="gspo").options
    assert (options.rl_loss_type, options.importance_sampling_level, options.epsilon) == ("grpo", "sequence", 3e-4)
    options = planned(tmp_path, rl_preset="grpo", beta=0.1, loss_type="bnpo").options
    assert (options.rl_loss_type, options.rl_beta) == ("bnpo", 0.1)


def test_note_on_a_preset_tells_which_options_are_used(tmp_path):
    made = planned(tmp_path, rl_preset="gspo", epsilon=0.2, epsilon_high=0.5)
    assert (made.options.epsilon, made.options.epsilon_high) == (0.2, 0.5)  # 0.2 is the default without a preset
    expected = (
        "rl_preset gspo sets rl_loss_type: grpo, importance_sampling_level: sequence; it does not change options that "
        "are set: epsilon: 0.2, epsilon_high: 0.5."
    )
    assert expected in made.notes
    made = planned(tmp_path, rl_preset="cispo", rl_loss_type="cispo", epsilon_high=3)
    assert "rl_preset cispo sets rl_loss_type: cispo; it does not change options that are set: epsilon_high: 3." in (
        made.notes
    )
    made = planned(tmp_path, rl_preset="cispo")
    assert "rl_preset cispo sets rl_loss_type: cispo, epsilon_high: 5.0." in made.notes


def test_preset_changes_nothing_under_another_stage(tmp_path):
    plain, made = (planned(tmp_path, stage="rloo", rl_preset=preset) for preset in (None, "dapo"))
    assert {name for name, value in vars(made.options).items() if value != getattr(plain.options, name)} == {
        "rl_preset"
    }
    assert [note for note in made.notes if "rl_preset" in note] == ['"rl_preset" has no effect: stage is rloo.']


def test_stage_has_its_own_defaults(tmp_path):
    options = planned(tmp_path).options
    assert (options.temperature, options.top_p, options.top_k, options.rl_beta) == (1.0, 1.0, 0, 0.0)
    options = planned(tmp_path, stage="rloo").options
    assert (options.num_generations, options.rl_beta) == (2, 0.05)


@pytest.mark.parametrize(("max_new_tokens", "expected"), [(300, 300), (0, 1024), (-1, 1024)])
def test_ppo_limits_completions_if_max_new_tokens_is_not_positive(tmp_path, max_new_tokens, expected):
    options = planned(tmp_path, stage="ppo", max_new_tokens=max_new_tokens).options
    assert options.max_completion_length == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reward_funcs": None}, "stage: grpo needs a reward"),
        ({"num_generations": 1}, "num_generations must be at least 2"),
        ({"per_device_train_batch_size": 6, "gradient_accumulation_steps": 2}, "Nearest: 8, 16."),
        ({"loss_type": "cispo"}, "epsilon_high: 5.0"),
        ({"loss_type": "dapoo"}, '"loss_type" must be one of'),
        ({"rl_loss_type": "dapoo"}, '"rl_loss_type" must be one of'),
        ({"scale_rewards": "all"}, '"scale_rewards" must be one of group, batch, none, true, false. Received: "all".'),
        ({"beta": -1}, '"beta" must be at least 0'),
        ({"beta": 0.1, "rl_beta": 0.2}, "names of the same option"),
        ({"entropy_coef_min": 2}, "is above entropy_coef_max 1"),
        ({"reward_weights": [1, 2]}, "Received: 2 for 1."),
        ({"sync_ref_model": True}, "beta is 0: there is no reference model"),
        ({"packing": True}, '"packing" is not supported'),
        ({"generation_batch_size": 16, "steps_per_generation": 2}, "set the same number"),
        ({"use_vllm": True}, "ompletions are generated in the training process"),
        ({"infer_backend": "vllm"}, "ompletions are generated in the training process"),
        ({"reward_clip_range": [1.0]}, "must be a lower and an upper bound"),
        ({"generation_kwargs": {"top_k": 5}}, "Set temperature, top_p, top_k"),
    ],
)
def test_contradictory_rollout_options_are_rejected(tmp_path, options, message):
    with pytest.raises(UserError) as error:
        planned(tmp_path, **options)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss_type": "sapo", "delta": 1.5}, '"delta" has no effect: loss_type is sapo.'),
        ({"stage": "rloo", "loss_type": "grpo"}, '"loss_type" has no effect: stage is rloo.'),
        ({"stage": "rloo", "entropy_target": 0.3}, '"entropy_target" has no effect: stage is rloo.'),
        ({"stage": "rloo", "vespo_k_pos": 3.0}, '"vespo_k_pos" has no effect: stage is rloo.'),
        ({"ppo_epochs": 2}, '"ppo_epochs" has no effect: stage is grpo.'),
        ({"stage": "sft", "ppo_target": 2.0}, '"ppo_target" has no effect: stage is sft.'),
        ({"max_new_tokens": 7}, '"max_new_tokens" has no effect: completions of stage: grpo are limited by max_comp'),
        ({"do_sample": False}, '"do_sample" has no effect: completions of stage: grpo are sampled token by token'),
        ({"entropy_target": 0.3}, '"entropy_target" has no effect: use_adaptive_entropy is false.'),
        ({"use_bias_correction_kl": False}, '"use_bias_correction_kl" has no effect: beta is 0.'),
        ({"ref_model": "model"}, '"ref_model" has no effect: beta is 0.'),
        ({"vllm_mode": "colocate"}, '"vllm_mode"'),
        ({"learning_rate": 1e-4, "finetuning_type": "full"}, "is high for reinforcement learning"),
        ({"stage": "sft", "num_generations": 4}, '"num_generations" has no effect: stage is sft.'),
    ],
)
def test_options_with_unlikely_values_give_a_note(tmp_path, options, message):
    assert any(message in note for note in planned(tmp_path, **options).notes)


def test_limit_of_new_tokens_is_read_by_ppo(tmp_path):
    options = {"stage": "ppo", "max_new_tokens": 7, "reward_model": None, "num_generations": 1}
    assert not any("max_new_tokens" in note for note in planned(tmp_path, **options).notes)


# --- options of a run -------------------------------------------------------------------------------------------------


def test_generation_options_are_applied(folder):  # noqa: F811
    plain = trainer_of(folder, trainer_args={"eval_dataset": prompts(4)}, num_generations_eval=2)
    other = trainer_of(
        folder, trainer_args={"eval_dataset": prompts(4)}, num_generations_eval=2, max_concurrent_completions=2,
        min_p=0.9, eval_temperature=0.01,
    )  # fmt: skip
    assert (plain.objective.source.limits.slots, other.objective.source.limits.slots) == (4, 2)
    assert plain.evaluate()["eval_reward"] != other.evaluate()["eval_reward"]
    plain.train()
    other.train()
    first, second = (each.state.log_history for each in (plain, other))
    assert [log["reward"] for log in first if "reward" in log] != [log["reward"] for log in second if "reward" in log]


def test_earlier_name_of_max_concurrent_completions_is_accepted(tmp_path):
    with pytest.warns(FutureWarning, match="max_concurrent_completions"):
        assert GRPOConfig(str(tmp_path), kept_seats=2).max_concurrent_completions == 2
    assert planned(tmp_path, stage="grpo", kept_seats="3").options.max_concurrent_completions == 3


def test_slow_reward_function_stops_the_run(folder):  # noqa: F811
    def stuck(completions):
        time.sleep(20)

    with pytest.raises(UserError, match=r"has not returned for 0\.2 s"):
        trainer_of(folder, rewards=stuck, reward_timeout_s=0.2).train()


def test_completions_are_printed_and_saved_according_to_options(folder, tmp_path):  # noqa: F811
    def printed(**options):
        out = tmp_path / str(len(list(tmp_path.iterdir())))
        with contextlib.redirect_stdout(io.StringIO()) as text:
            trainer_of(folder, rewards=variety, output_dir=str(out), max_steps=1, per_device_train_batch_size=8,
                       **options).train()  # fmt: skip
        return text.getvalue().count("completion: ") + text.getvalue().count("│"), (out / "completions.jsonl").is_file()

    (every, written), (two, _) = (
        printed(log_completions=True),
        printed(log_completions=True, num_completions_to_print=2),
    )
    unique, _ = printed(log_completions=True, log_unique_prompts=True)
    assert written
    assert every > two > 0
    assert every > unique > 0
    assert printed() == (0, False)


def test_reward_model_options_are_applied(monkeypatch):
    requests = []

    def load(name, adapters, bits, options):
        requests.append((name, adapters, bits))
        return SimpleNamespace(to=lambda device: SimpleNamespace(__name__=name))

    monkeypatch.setattr(rollouts, "reward_model_of", load)
    options = SimpleNamespace(
        reward_model="judge", reward_model_type="lora", reward_model_adapters=["a"], reward_model_quantization_bit=4,
        reward_weights=[1.0, 0.5], reward_funcs=["exact_match_reward"],
    )  # fmt: skip
    engine = SimpleNamespace(device="cpu")
    assert rollouts.reward_model_function(options, engine).weight == 0.5
    assert requests == [("judge", ["a"], 4)]
    options.reward_model, options.reward_model_type = "http://127.0.0.1:1/score", "api"
    assert rollouts.reward_model_function(options, engine).call.url == "http://127.0.0.1:1/score"


def test_entropy_that_is_not_finite_does_not_change_the_coefficient():
    options = SimpleNamespace(
        use_adaptive_entropy=True, entropy_coef=0.1, entropy_target=1.0, entropy_coef_delta=0.01, entropy_coef_min=0.0,
        entropy_coef_max=1.0,
    )  # fmt: skip
    controller, parallel = EntropyController(options), SimpleNamespace(device="cpu", sum=lambda sums: sums)
    for total, expected in ((2.0, 0.11), (math.nan, 0.11), (2.0, 0.12)):
        controller.add(torch.tensor(total), torch.tensor(4.0))
        controller.end_step(parallel)
        assert controller.coefficient == pytest.approx(expected)
