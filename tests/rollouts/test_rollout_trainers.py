"""``GRPOTrainer`` and ``RLOOTrainer``: TRL's constructors, records, reward functions and logged names."""

import logging
import re
import shutil
from datetime import date
from pathlib import Path

import pytest
import torch
from datasets import Dataset, DatasetDict, IterableDataset
from golden_steps import make_models
from peft import LoraConfig
from transformers import AutoTokenizer, TrainerCallback

from burnish import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer, UserError
from burnish.rollouts.objective import RolloutObjective
from run_outputs import same_weights
from small_run import WORDS, make_model

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trl")
    make_model(folder / "model")
    return folder


def prompts(count=8):
    return Dataset.from_list([{"prompt": f"Repeat: {WORDS[i % 10]}", "answer": WORDS[i % 10]} for i in range(count)])


def chat_prompts(count=8):
    return Dataset.from_list(
        [{"prompt": [{"role": "user", "content": WORDS[i % 10]}], "answer": WORDS[i % 10]} for i in range(count)]
    )


def variety(completions, **_):
    return [len(set(str(completion))) / 10 for completion in completions]


def trainer_of(folder, kind=GRPOTrainer, rewards=variety, dataset=None, model=None, trainer_args=None, **options):
    args = kind.config_class(
        **{
            "output_dir": str(folder / "out"), "use_cpu": True, "bf16": False, "per_device_train_batch_size": 4,
            "num_generations": 4, "max_completion_length": 6, "max_steps": 2, "logging_steps": 1, "report_to": "none",
            "save_strategy": "no", "learning_rate": 1e-2, "gradient_checkpointing": False, "disable_tqdm": True,
            **options,
        }
    )  # fmt: skip
    return kind(model or str(folder / "model"), rewards, args, dataset or prompts(), **(trainer_args or {}))


def test_prompts_are_encoded_in_batches_of_limited_size(folder, monkeypatch):
    whole, encode, sizes = trainer_of(folder, dataset=prompts(7))._prompts, RolloutObjective.encode, []

    def counting(self, examples, *args, **more):
        sizes.append(len(examples))
        return encode(self, examples, *args, **more)

    monkeypatch.setattr(RolloutObjective, "encode", counting)
    monkeypatch.setattr("burnish.trainer.trl.rollouts.prompts.BATCH_SIZE", 3)
    assert trainer_of(folder, dataset=prompts(7))._prompts == whole
    assert sizes == [3, 3, 1]


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", [GRPOTrainer, RLOOTrainer])
@pytest.mark.parametrize("dataset", [prompts, chat_prompts])
def test_trainer_learns_from_texts_and_messages(folder, kind, dataset):
    trainer = trainer_of(folder, kind, dataset=dataset(), beta=0.04)
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    trainer.train()
    assert any(not torch.equal(before[name], p) for name, p in trainer.model.named_parameters())
    log = trainer.state.log_history[0]
    names = {"loss", "grad_norm", "reward", "reward_std", "frac_reward_zero_std", "rewards/variety/mean",
             "rewards/variety/std", "completions/mean_length", "completions/clipped_ratio", "kl", "entropy",
             "clip_ratio/region_mean", "num_tokens", "learning_rate"}  # fmt: skip
    assert names <= log.keys()
    assert log["kl"] == pytest.approx(0, abs=1e-5)  # the reference is the initial model


def streamed(rows, read=None):
    """Return a stream of rows. Args: read: receives the number of each row that is read."""

    def generate():
        for at, row in enumerate(rows):
            (read if read is not None else []).append(at)
            yield row

    return IterableDataset.from_generator(generate)


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", [GRPOTrainer, RLOOTrainer])
def test_streamed_prompts_train_like_unshuffled_ones(folder, kind):
    read = []
    stream = streamed(prompts(1000), read)
    trainer = trainer_of(folder, kind, dataset=stream, max_steps=3)
    assert trainer.train_dataset is stream
    assert max(read) < 3  # the prompts of three steps
    trainer.train()
    other = trainer_of(folder, kind, dataset=prompts(3), max_steps=3, shuffle_dataset=False)
    other.train()
    weights = other.model.state_dict()
    assert all(torch.equal(value, weights[name]) for name, value in trainer.model.state_dict().items())


def test_streamed_prompts_require_max_steps(folder):
    with pytest.raises(ValueError, match="max_steps"):
        trainer_of(folder, dataset=streamed(prompts()), max_steps=-1)


def test_dataset_dict_is_rejected(folder):
    with pytest.raises(TypeError, match="`train_dataset` must be a `Dataset` or `IterableDataset`"):
        trainer_of(folder, dataset=DatasetDict({"train": prompts()}))


def test_streamed_prompts_are_evaluated(folder):
    trainer = trainer_of(folder, trainer_args={"eval_dataset": streamed(prompts(3))}, per_device_eval_batch_size=4)
    metrics = trainer.evaluate()
    assert metrics.keys() >= {"eval_loss", "eval_reward"}
    named = trainer.evaluate({"some": streamed(prompts(3)), "others": streamed(chat_prompts(2))})
    assert named["eval_some_reward"] == metrics["eval_reward"]
    assert "eval_others_reward" in named


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": "What is this?", "image": "a.png"},
        {"prompt": [{"role": "user", "content": "What is this?"}], "images": ["a.png"]},
        {"prompt": [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What?"}]}]},
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", [GRPOTrainer, RLOOTrainer])
def test_text_models_refuse_images(folder, kind, record):
    with pytest.raises(ValueError, match="vision-related"):
        trainer_of(folder, kind, dataset=[record] * 4)


@pytest.mark.parametrize("kind", [GRPOTrainer, RLOOTrainer])
def test_reference_that_follows_each_step_equals_the_policy_of_the_next_generation(folder, kind):
    follows = {"sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 1.0}
    trainer = trainer_of(folder, kind, beta=0.04, max_steps=3, learning_rate=0.1, **follows)
    trainer.train()
    found = [log["kl"] for log in trainer.state.log_history if "kl" in log]
    assert found == pytest.approx([0, 0, 0], abs=1e-5)


def test_values_that_json_does_not_have_are_passed_as_text_with_a_warning(folder, caplog):
    seen = []

    def sees(completions, when, **rest):
        seen.extend(when)
        return [0.0 for _ in completions]

    dataset = prompts().add_column("when", [date(2024, 1, 1 + at) for at in range(8)])
    with caplog.at_level("WARNING"):
        trainer_of(folder, rewards=sees, dataset=dataset, max_steps=1).train()
    assert (
        "8 of 8 records of the train dataset: values of type date are converted to strings for reward functions"
        in caplog.text
    )
    assert set(map(type, seen)) == {str}


def test_reward_functions_receive_trl_arguments(folder):
    def sees(prompts, completions, completion_ids, answer, trainer_state, log_extra, log_metric, **rest):
        assert not rest
        assert prompts[0] == prompts[3] != prompts[4]
        assert [len(each) for each in (prompts, completions, completion_ids, answer)] == [8] * 4
        assert completions[0][0]["role"] == "assistant"
        assert all(len(ids) <= 6 for ids in completion_ids)
        log_metric("trainer_step", trainer_state.global_step)
        log_extra("asked", answer)
        return [0.1 * at for at in range(8)]

    trainer = trainer_of(folder, rewards=[sees, variety], dataset=chat_prompts(), gradient_accumulation_steps=2)
    trainer.train()
    assert [log["trainer_step"] for log in trainer.state.log_history if "loss" in log] == [0, 1]
    assert trainer.reward_func_names == ["sees", "variety"]


def test_subclass_can_compute_rewards(folder):
    class CustomTrainer(GRPOTrainer):
        def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
            assert inputs[0]["prompt"] == prompts[0]
            assert "answer" in inputs[0]
            return torch.tensor([[float(len(ids))] for ids in completion_ids_list])

    trainer = trainer_of(folder, CustomTrainer)
    trainer.train()
    log = trainer.state.log_history[0]
    assert log["reward"] == pytest.approx(log["completions/mean_length"])


@pytest.mark.parametrize("kind", [GRPOTrainer, RLOOTrainer])
@pytest.mark.parametrize("name", ["_remove_unused_columns", "_generate"])
def test_uncalled_override_is_named(folder, kind, name):
    subclass = type("Mine", (kind,), {name: lambda self, *args, **kwargs: None})
    with pytest.warns(UserWarning, match=f"Mine overrides {name}, which burnish does not call"):
        trainer_of(folder, subclass)


def test_attributes_have_the_values_of_the_arguments(folder):
    options = {"top_p": 0.9, "top_k": 7, "min_p": 0.1, "repetition_penalty": 1.1, "shuffle_dataset": False,
               "num_generations_eval": 2, "log_completions": True}  # fmt: skip
    grpo, rloo = trainer_of(folder, **options), trainer_of(folder, RLOOTrainer, **options)
    for trainer in (grpo, rloo):
        assert {name: getattr(trainer, name) for name in options} == options
        assert trainer.num_generations == 4
        assert trainer.max_completion_length == 6
        assert trainer.chat_template_kwargs == trainer.generation_kwargs == {}
        assert trainer.use_vllm is False
    assert grpo.multi_objective_aggregation == "sum_then_normalize"
    assert rloo.reward_clip_range is None


@pytest.mark.parametrize("kind", [GRPOTrainer, RLOOTrainer])
def test_attributes_set_by_a_script_apply_from_the_next_generation(folder, kind):
    class CustomTrainer(kind):
        def __init__(self, *args, **kwargs):
            self.num_generations = 99  # overwritten by the constructor as in TRL
            super().__init__(*args, **kwargs)
            self.num_generations = self.args.num_generations

    trainer = trainer_of(folder, CustomTrainer, beta=0.5, top_k=0)
    assert trainer.num_generations == 4
    trainer.max_completion_length, trainer.top_k, trainer.beta = 3, 1, 0.25
    trainer.train()
    logs = [log for log in trainer.state.log_history if "loss" in log]
    assert [log["completions/max_length"] for log in logs] == [3, 3]
    assert all(log["reward_std"] == 0 for log in logs)  # top_k=1: all completions of a prompt are equal
    assert trainer.beta == trainer.objective.choices.rl_beta == 0.25


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("per_device_train_batch_size", "Use GRPOConfig(per_device_train_batch_size=...)."),
        ("evaluation_strategy", "Use GRPOConfig(eval_strategy=...)."),
        ("config", "Use `args`."),
        ("reward_model", "Use `reward_funcs`."),
        ("reward_function", 'Did you mean "reward_funcs"?'),
    ],
)
def test_unknown_argument_says_where_it_belongs(folder, name, remedy):
    message = f"GRPOTrainer.__init__() got an unexpected keyword argument '{name}'. {remedy}"
    with pytest.raises(TypeError, match=re.escape(message)):
        trainer_of(folder, trainer_args={name: 1})


def test_tokenizer_is_the_earlier_name_of_processing_class(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    with pytest.warns(FutureWarning, match="Deprecated arguments of GRPOTrainer: `tokenizer`"):
        trainer = trainer_of(folder, trainer_args={"tokenizer": tokenizer})
    with pytest.warns(FutureWarning, match="`Trainer.tokenizer` is deprecated"):
        assert trainer.tokenizer is trainer.processing_class is tokenizer


def test_script_can_generate_with_the_options_of_the_trainer(folder):
    trainer = trainer_of(folder, top_k=5, top_p=0.8)
    config = trainer.generation_config
    assert (config.max_new_tokens, config.top_k, config.top_p, config.do_sample) == (6, 5, 0.8, True)
    ids = torch.tensor([[5, 6]])
    assert trainer.model.generate(ids, generation_config=config).shape[1] <= 8
    trainer.top_k = 3
    assert trainer.generation_config.top_k == 3
    trainer.train()


def test_attributes_that_cannot_change_are_refused(folder):
    trainer = trainer_of(folder)
    with pytest.raises(UserError, match=r"`num_generations` of a trainer cannot be changed. Current: 4. Received: 2"):
        trainer.num_generations = 2
    with pytest.raises(UserError, match=r"no reference model. Received: 0.1"):
        trainer.beta = 0.1


def test_run_resumed_inside_a_generation_gives_the_same_weights(folder, tmp_path):
    options = {"num_iterations": 2, "max_steps": 4, "save_strategy": "steps", "save_steps": 1}
    whole, other = tmp_path / "whole", tmp_path / "other"
    trainer_of(folder, output_dir=str(whole), **options).train()
    other.mkdir()
    shutil.copytree(whole / "checkpoint-1", other / "checkpoint-1")
    trainer_of(folder, output_dir=str(other), **options).train(resume_from_checkpoint=True)
    assert same_weights(whole / "checkpoint-4", other / "checkpoint-4")


EVALUATED = {
    "eval_rewards/variety/mean", "eval_completions/mean_length", "eval_loss", "eval_num_tokens",
    "eval_clip_ratio/low_mean", "eval_clip_ratio/low_min", "eval_clip_ratio/high_mean", "eval_clip_ratio/high_max",
    "eval_clip_ratio/region_mean",
}  # fmt: skip
"""Names that TRL 1.16 logs too."""


def test_evaluation_measures_rewards_and_changes_nothing(folder, tmp_path):
    plain = trainer_of(folder, output_dir=str(tmp_path / "a"))
    plain.train()
    watched = trainer_of(
        folder, output_dir=str(tmp_path / "b"), eval_strategy="steps", eval_steps=1, num_generations_eval=2,
        trainer_args={"eval_dataset": prompts(3)},
    )  # fmt: skip
    watched.train()
    first = [log for log in watched.state.log_history if "eval_reward" in log]
    assert len(first) == 2
    assert first[0].keys() >= EVALUATED
    for one, other in zip(plain.model.parameters(), watched.model.parameters(), strict=True):
        assert torch.equal(one, other)
    assert watched.evaluate()["eval_reward"] == pytest.approx(first[-1]["eval_reward"])


@pytest.mark.parametrize("kind", [GRPOTrainer, RLOOTrainer])
def test_predict_measures_rewards_and_returns_no_predictions(folder, kind):
    trainer = trainer_of(folder, kind, trainer_args={"eval_dataset": prompts(2)})
    output = trainer.predict(prompts(2))
    assert output.predictions is output.label_ids is None
    assert output.metrics["test_reward"] == pytest.approx(trainer.evaluate()["eval_reward"])


def test_adapter_learns_with_its_base_as_reference(folder):
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    trainer = trainer_of(folder, beta=0.1, max_steps=3, trainer_args={"peft_config": config})
    frozen = {n: p.detach().clone() for n, p in trainer.model.named_parameters() if not p.requires_grad}
    trainer.train()
    assert all(torch.equal(frozen[n], p) for n, p in trainer.model.named_parameters() if n in frozen)
    assert [log["kl"] for log in trainer.state.log_history if "kl" in log][-1] > 0


def test_path_is_loaded_as_reward_model_and_given_list_is_unchanged(folder, tmp_path):
    models = make_models(tmp_path / "models")
    rewards = [str(models / "policy_vhead"), variety]
    trainer = trainer_of(folder, rewards=rewards, model=str(models / "policy"), dataset=prompts())
    trainer.train()
    assert rewards == [str(models / "policy_vhead"), variety]
    assert {"rewards/policy_vhead/mean", "rewards/variety/mean"} <= trainer.state.log_history[0].keys()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"use_vllm": True}, "use_vllm"), ({"num_generations": 1}, "num_generations must be at least 2"),
        ({"per_device_train_batch_size": 6}, "Nearest: 4, 8"), ({"loss_type": "dap"}, 'Did you mean "dapo"'),
        ({"loss_type": "cispo"}, "epsilon_high: 5.0"), ({"auto_find_batch_size": True}, "auto_find_batch_size"),
        ({"sync_ref_model": True}, "beta is 0"), ({"generation_kwargs": {"top_pp": 1}}, 'Did you mean "top_p"'),
        ({"steps_per_generation": 2, "generation_batch_size": 12}, "set the same number"),
    ],
)  # fmt: skip
def test_contradictory_trainer_arguments_are_rejected(folder, options, message):
    with pytest.raises(ValueError, match=message):
        trainer_of(folder, **options)


def test_missing_requirements_are_reported_before_training(folder):
    def needs(completions, solution):
        return [0.0] * len(completions)

    with pytest.raises(UserError, match='needs requires the column "solution"'):
        trainer_of(folder, rewards=needs)
    with pytest.raises(UserError, match='requires a column "prompt"'):
        trainer_of(folder, dataset=Dataset.from_list([{"text": "a"}]))
    with pytest.raises(ValueError, match="No reward source"):
        trainer_of(folder, rewards=[])
    with pytest.raises(ValueError, match="number of reward weights"):
        trainer_of(folder, reward_weights=[1.0, 2.0])


@pytest.mark.parametrize("name", ["vllm_device", "vllm_dtype", "vllm_max_model_len", "max_prompt_length"])
def test_arguments_of_earlier_configs_have_no_effect_and_give_a_warning(tmp_path, name):
    with pytest.warns(FutureWarning, match=f"`{name}` has no effect"):
        GRPOConfig(tmp_path, **{name: "auto"})


@pytest.mark.parametrize(
    ("old", "new"), [("use_liger_loss", "use_liger_kernel"), ("wandb_log_unique_prompts", "log_unique_prompts")]
)
def test_arguments_of_earlier_configs_are_renamed(tmp_path, old, new):
    with pytest.warns(FutureWarning, match=f"Use `{new}` instead"):
        assert getattr(RLOOConfig(tmp_path, **{old: True}), new)


def test_beam_search_arguments_without_effect_are_reported(folder, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    options = {"do_sample": True, "top_k": 50, "length_penalty": -0.1, "num_beams": 1}
    with caplog.at_level(logging.WARNING, logger="transformers"):
        trainer = trainer_of(folder, generation_kwargs=options)
    assert '"generation_kwargs.length_penalty" has no effect: beam search is not use' in caplog.text
    assert trainer.objective.choices.top_k == 50


@pytest.mark.parametrize("options", [object(), [None], [None] * 3])
def test_each_reward_function_has_its_processing_class(folder, options):
    with pytest.raises(ValueError, match=r"reward processing classes .* must match the number of reward functions"):
        trainer_of(folder, rewards=[variety, variety], trainer_args={"reward_processing_classes": options})


def test_configs_have_trl_defaults():
    args = GRPOConfig(output_dir="out", use_cpu=True, bf16=False, scale_rewards=False)
    assert (args.beta, args.loss_type, args.num_generations, args.learning_rate) == (0.0, "dapo", 8, 1e-6)
    assert (args.scale_rewards, args.steps_per_generation, args.generation_batch_size) == ("none", 1, 8)
    args = RLOOConfig(output_dir="out", use_cpu=True, bf16=False)
    assert (args.beta, args.num_generations, args.max_completion_length) == (0.05, 2, 512)


def test_python_of_documentation_page_runs(folder, monkeypatch):
    """The page's reward function is called with messages, and its trainer runs with a small model and few steps."""
    page = (Path(__file__).parents[2] / "docs" / "rollouts.md").read_text(encoding="utf-8")
    function, script = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    names = {"dataset": chat_prompts()}
    exec(function, names)
    assert names["exact"]([[{"role": "assistant", "content": " a"}]], answer=["a"]) == [1.0]
    monkeypatch.chdir(folder)
    script = script.replace("Qwen/Qwen3-0.6B", str(folder / "model"))
    script = script.replace(
        'output_dir="out"', 'output_dir="out", max_steps=1, use_cpu=True, bf16=False, max_completion_length=4'
    )
    exec(script, names)
    assert names["trainer"].state.global_step == 1


def test_changes_of_the_generation_config_are_applied(folder):
    trainer = trainer_of(folder, max_completion_length=12)
    trainer.generation_config.max_new_tokens = 3
    trainer.generation_config.top_p = 0.9
    trainer.train()
    assert trainer.state.log_history[0]["completions/max_length"] <= 3
    assert trainer.objective.choices.top_p == trainer.top_p == trainer.generation_config.top_p == 0.9
    assert trainer.max_completion_length == 12
    trainer.generation_config.eos_token_id = list(range(trainer.model.config.vocab_size))
    trainer.train()
    log = trainer.state.log_history[0]
    assert (log["completions/max_length"], log["completions/clipped_ratio"]) == (1, 0)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("temperature", 0.5, r"(?s)temperature=0.5.*The loss depends on it too: set GRPOConfig\(temperature=0.5\)"),
        ("bad_words_ids", [[3]], r"(?s)bad_words_ids=\[\[3\]\].*Available: top_p"),
        ("eos_token_id", "</s>", '"eos_token_id" must be a token id or a list of token ids. Received: "</s>"'),
    ],
)
def test_other_changes_of_the_generation_config_are_refused(folder, name, value, message):
    trainer = trainer_of(folder)
    setattr(trainer.generation_config, name, value)
    with pytest.raises(UserError, match=message):
        trainer.train()


@pytest.mark.parametrize("kind", [GRPOTrainer, RLOOTrainer])
def test_generation_kwargs_end_completions(folder, kind):
    limits = {"max_new_tokens": 4, "eos_token_id": 3, "pad_token_id": 0, "bos_token_id": None}
    trainer = trainer_of(folder, kind, generation_kwargs=limits, max_completion_length=9)
    assert 3 in trainer.generation_config.eos_token_id
    assert trainer.generation_config.max_new_tokens == 4
    trainer.train()
    assert trainer.state.log_history[0]["completions/max_length"] <= 4
    with pytest.raises(UserError, match=r'"max_new_tokens" must be an integer of at least 1. Received: 0'):
        trainer_of(folder, kind, generation_kwargs={"max_new_tokens": 0})


def test_metrics_of_a_script_without_a_number_are_left_out(folder):
    class Reader(GRPOTrainer):
        def _calculate_rewards(self, *given):
            if not self._metrics["train"]["only_read"]:
                self._metrics["train"]["mean"] += [1.0, float("nan"), 3.0]
                self._metrics["train"]["unknown"].append(float("nan"))
            return super()._calculate_rewards(*given)

    trainer = trainer_of(folder, Reader)
    trainer.train()
    log = trainer.state.log_history[0]
    assert log["mean"] == 2
    assert not {"only_read", "unknown"} & log.keys()


@pytest.mark.parametrize("logs_completions", [False, True])
def test_script_reads_the_newest_completions(folder, logs_completions):
    found = []

    def rewards(completions, log_extra, **_):
        log_extra("number", list(range(len(completions))))
        return [None if at == 0 else float(at) for at in range(len(completions))]

    class Reader(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            found.append({name: list(values) for name, values in trainer._logs.items()})
            assert list(trainer._logs["rewards"]["rewards"])[1:] == [1, 2, 3]
            assert list(trainer._logs["extra"]["number"]) == [0, 1, 2, 3]

    trainer = trainer_of(
        folder, rewards=rewards, log_completions=logs_completions, trainer_args={"callbacks": [Reader()]}
    )
    trainer.train()
    assert [len(each["prompt"]) for each in found] == [4, 4]
    assert all(text.startswith("Repeat") for text in found[0]["prompt"])
    assert all(isinstance(text, str) for text in found[0]["completion"])
    assert sum(found[0]["advantages"]) == pytest.approx(0, abs=1e-4)
