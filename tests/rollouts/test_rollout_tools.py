"""Completions with tools and environments, and completions from a user's own function."""

import json
from dataclasses import replace

import pytest
import torch
from datasets import Dataset
from test_rollout_trainers import prompts, trainer_of, variety
from transformers import AutoTokenizer

from burnish import GRPOConfig, GRPOTrainer, RLOOConfig, UserError
from burnish.rollouts.completions import Completion, CompletionSource
from burnish.trainer.trl.rollouts.tools import ToolDialogue, schemas
from small_run import make_model

TEMPLATE = """{%- if tools %}{{ '<|im_start|>system\n' }}{% for tool in tools %}{{ tool | tojson }}{% endfor %}
{{- '<|im_end|>\n' }}{% endif %}
{%- for m in messages %}
{%- if m.role == 'tool' %}{{ '<|im_start|>user\n<tool_response>\n' + m.content + '\n</tool_response><|im_end|>\n' }}
{%- else %}{{ '<|im_start|>' + m.role + '\n' + m.content }}
{%- for c in m.tool_calls or [] %}{{ '<tool_call>\n{"name": "' + c.function.name + '", "arguments": ' }}
{{- c.function.arguments | tojson }}{{ '}\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\n' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""


def add(a: int, b: int) -> int:
    """
    Add two numbers.

    Args:
        a: one.
        b: another.
    """
    return a + b


async def slow(a: int) -> int:
    """
    Give a number back.

    Args:
        a: it.
    """
    return a


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tools")
    make_model(folder / "model", max_position_embeddings=1024)
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder / "model")
    return folder


class Scripted(CompletionSource):
    """Turns that are written beforehand: those of a completion by its sample, one after another."""

    def __init__(self, tokenizer, turns):
        self.tokenizer, self.turns, self.seen = tokenizer, turns, []

    def complete(self, prompts, keys, limits):
        self.seen += [(key.sample, key.start, self.tokenizer.decode(p)) for p, key in zip(prompts, keys, strict=True)]
        made = []
        for key in keys:
            turns = self.turns[key.sample % len(self.turns)]
            turn = turns[sum(1 for s, *_ in self.seen if s == key.sample) - 1] if len(turns) > 1 else turns[0]
            ids = self.tokenizer(turn + "<|im_end|>", add_special_tokens=False)["input_ids"][: limits.max_new_tokens]
            made.append(Completion(ids, ids[-1] == self.tokenizer.eos_token_id))
        return made

    def free(self):
        return None


def call(name, **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def one_prompt():
    return Dataset.from_list([{"prompt": [{"role": "user", "content": "3 + 4?"}], "answer": "7"}])


def trained(folder, turns, tools=(add, slow), rewards=variety, **options):
    """A trainer whose completions are written beforehand, after a step."""
    trainer = trainer_of(
        folder, rewards=rewards, dataset=options.pop("dataset", one_prompt()), max_steps=1,
        **{"max_completion_length": 400, **options},
        trainer_args={"tools": list(tools), **options.pop("more", {})},
    )  # fmt: skip
    source = trainer.objective.source
    source.inner = Scripted(trainer._tokenizer, turns)
    trainer.train()
    return trainer, source


def test_tool_calls_are_executed_and_results_are_not_learned(folder):
    recorded = {}

    def sees(completions, completion_ids, **_):
        recorded.update(completions=completions, ids=completion_ids)
        return [float(len(c)) for c in completions]

    turns = [
        [call("add", a=3, b=4), "It is 7."],
        ["No idea."],
        [call("nothing", x=1), "Sorry."],
        [call("slow", a=5), "5"],
    ]
    trainer, source = trained(folder, turns, rewards=sees)
    first, second, third, fourth = recorded["completions"]
    assert [m["role"] for m in first] == ["assistant", "tool", "assistant"]
    assert first[0]["tool_calls"] == [{"type": "function", "function": {"name": "add", "arguments": {"a": 3, "b": 4}}}]
    assert (first[1]["content"], first[2]["content"]) == ("7", "It is 7.")
    assert second == [{"role": "assistant", "content": "No idea."}]
    assert third[1]["content"] == "{'error': 'Tool nothing not found.'}"
    assert fourth[1]["content"] == "5"
    text = trainer._tokenizer.decode(recorded["ids"][0])
    assert text.endswith("<tool_response>\n7\n</tool_response><|im_end|>\n<|im_start|>assistant\nIt is 7.<|im_end|>")
    log = trainer.state.log_history[0]
    assert log["tools/call_frequency"] == pytest.approx(3 / 4)
    assert log["tools/failure_frequency"] == pytest.approx(1 / 3)
    assert source.inner.seen[0][2].startswith('<|im_start|>system\n{"type": "function"')
    starts = {start for sample, start, _ in source.inner.seen if sample == 0}
    assert len(starts) == 2  # the second turn has noise of its own


def test_tool_that_exits_is_a_failed_call(folder):
    def leave(a: int) -> int:
        """
        Leave the program.

        Args:
            a: a number.
        """
        raise SystemExit(a)

    seen = []

    def sees(completions, **_):
        seen.extend(completions)
        return [float(len(c)) for c in completions]

    trainer, _ = trained(folder, [[call("leave", a=3), "a"], ["b"], ["c"], ["d"]], tools=(leave,), rewards=sees)
    assert seen[0][1]["content"] == "{'error': 'Tool leave called sys.exit(3).'}"
    assert trainer.state.log_history[0]["tools/failure_frequency"] == 1


def test_mask_excludes_tool_results(folder):
    trainer, source = trained(folder, [[call("add", a=1, b=1), "2"], ["x"], ["y"], ["z"]])
    source.inner.seen = []
    key = [replace(k, sample=0) for k in _keys(1)]
    prompt = trainer._prompts[0]["prompt_input_ids"]
    (made,) = source.complete([prompt], key, _limits(trainer))
    reported = [token for token, mask in zip(made.ids, made.mask, strict=True) if not mask]
    assert trainer._tokenizer.decode(reported).strip().startswith("<|im_start|>user\n<tool_response>\n2\n")
    assert sum(made.mask) == len(made.ids) - len(reported)


def _keys(count):
    from burnish.inference.types import NoiseKey

    return [NoiseKey(sample=at) for at in range(count)]


def _limits(trainer):
    from burnish.inference.types import Sampling
    from burnish.rollouts.completions import CompletionLimits

    stops = frozenset(trainer.objective.template.stop_token_ids())
    return CompletionLimits(trainer.args.max_completion_length, stops, Sampling())


@pytest.mark.parametrize(("most", "rounds"), [(0, 1), (1, 2), (None, 3)])
def test_rounds_of_tool_calls_are_limited(folder, most, rounds):
    turns = [[call("add", a=1, b=1), call("add", a=2, b=2), "done"], ["x"], ["y"], ["z"]]
    _, source = trained(folder, turns, max_tool_calling_iterations=most)
    assert sum(1 for sample, *_ in source.inner.seen if sample == 0) == rounds


def test_tool_result_that_does_not_fit_ends_the_completion(folder):
    lengths = []

    def sees(completion_ids, completions, **_):
        lengths.extend((len(ids), len(c)) for ids, c in zip(completion_ids, completions, strict=True))
        return [0.0, 1.0, 2.0, 3.0]

    trained(folder, [[call("add", a=1, b=1), "2"], ["x"], ["y"], ["z"]], rewards=sees, max_completion_length=70)
    assert lengths[0][1] == 1
    assert all(length <= 70 for length, _ in lengths)


def test_template_that_rewrites_a_prompt_is_rejected(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    tokenizer.chat_template = TEMPLATE.replace("'<|im_start|>' + m.role", "messages | length ~ '<|im_start|>' + m.role")
    with pytest.raises(UserError, match="changes a prompt when a tool result follows"):
        ToolDialogue(tokenizer, schemas([add]), {})
    tokenizer.chat_template = "{% for m in messages %}{{ m.role ~ m.content }}{% endfor %}"
    with pytest.raises(UserError, match="unknown format for them"):
        ToolDialogue(tokenizer, schemas([add]), {})


def test_turn_keeps_its_thought_where_the_template_drops_it(folder):
    """Qwen3's template adds an empty thought to the last turn, and omits it when a tool result follows."""
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    usual = ToolDialogue(tokenizer, schemas([add]), {})
    thought = "{%- if m.role == 'assistant' and loop.last %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    tokenizer.chat_template = TEMPLATE.replace("{%- for c in m.tool_calls", f"{thought}{{%- for c in m.tool_calls")
    result = [{"role": "tool", "name": "add", "content": "3"}, {"role": "tool", "name": "add", "content": "4"}]
    assert ToolDialogue(tokenizer, schemas([add]), {}).results_of(result) == usual.results_of(result)


class Counter:
    made = 0

    def __init__(self):
        type(self).made += 1

    def reset(self, **record):
        self.count = 0
        return f" Start at {self.count}."

    def increment(self, by: int) -> int:
        """
        Count on.

        Args:
            by: how far.
        """
        self.count += by
        return self.count

    def get_reward(self):
        return float(self.count)


def test_environment_provides_tools_prompt_and_reward(folder):
    trainer = trainer_of(
        folder, rewards=None, dataset=one_prompt(), max_steps=2, max_completion_length=300, log_completions=True,
        trainer_args={"environment_factory": Counter},
    )  # fmt: skip
    turns = [[call("increment", by=sample), "ok"] for sample in range(4)]
    source = trainer.objective.source
    source.inner = Scripted(trainer._tokenizer, turns * 3)
    complete = source.inner.complete

    def anew(prompts, keys, limits):
        if keys[0].start == 0:
            source.inner.seen = []
        return complete(prompts, keys, limits)

    source.inner.complete = anew
    trainer.train()
    log = trainer.state.log_history[0]
    assert log["rewards/Counter/mean"] == pytest.approx(1.5)
    assert "3 + 4? Start at 0.<|im_end|>" in source.inner.seen[0][2]
    assert Counter.made == 4  # kept for the next generation


def test_environment_requires_no_data(folder):
    trainer = GRPOTrainer(str(folder / "model"), args=trainer_of(folder).args, environment_factory=Counter)
    trainer.train()
    assert "rewards/Counter/mean" in trainer.state.log_history[0]


def test_custom_rollout_function_can_generate_completions(folder):
    def rollout(prompts, trainer):
        tokenizer = trainer.processing_class
        assert prompts[0] == prompts[3] != prompts[4:5]
        ids = [tokenizer(f"n {at}<|im_end|>", add_special_tokens=False)["input_ids"] for at in range(len(prompts))]
        requested = [tokenizer(p, add_special_tokens=False)["input_ids"] for p in prompts]
        return {"prompt_ids": requested, "completion_ids": ids, "logprobs": None, "place": list(range(len(prompts)))}

    def sees(completions, place, **_):
        assert completions == [f"n {at}" for at in place]
        return [float(at) for at in place]

    trainer = trainer_of(folder, rewards=sees, dataset=prompts(), trainer_args={"rollout_func": rollout})
    trainer.train()
    assert trainer.state.log_history[0]["rewards/sees/mean"] == pytest.approx(1.5)


def test_rollout_function_with_missing_fields_is_rejected(folder):
    trainer = trainer_of(folder, dataset=prompts(), trainer_args={"rollout_func": lambda prompts, trainer: {}})
    with pytest.raises(ValueError, match="rollout_func must return keys"):
        trainer.train()


@pytest.mark.parametrize("name", ["env_mask", "logprobs"])
def test_rollout_function_with_values_for_other_tokens_is_rejected(folder, name):
    """One too many for a completion, one too few for the next."""

    def rollout(prompts, trainer):
        values = [[1.0] * (3 if at % 2 else 1) for at in range(len(prompts))]
        ids = {"prompt_ids": [[5]] * len(prompts), "completion_ids": [[6, 7]] * len(prompts)}
        return {**ids, "logprobs": None, name: values}

    trainer = trainer_of(folder, dataset=prompts(), trainer_args={"rollout_func": rollout})
    with pytest.raises(UserError, match=f'1 values of "{name}" for completion 1, which has 2 tokens'):
        trainer.train()


@pytest.mark.parametrize("config", [GRPOConfig, RLOOConfig])
def test_best_checkpoint_of_rollouts_is_chosen_by_reward(config, tmp_path):
    args = config(str(tmp_path), use_cpu=True, load_best_model_at_end=True, eval_strategy="steps", eval_steps=2,
                  save_steps=2)  # fmt: skip
    assert (args.metric_for_best_model, args.greater_is_better) == ("reward", True)


def test_rollout_function_may_return_tensors(folder):
    def rollout(prompts, trainer):
        ids = {"prompt_ids": [[5]] * len(prompts), "completion_ids": [[6, 7]] * len(prompts)}
        return {**ids, "logprobs": torch.full((len(prompts), 2), -1.0), "env_mask": torch.ones(len(prompts), 2)}

    trainer = trainer_of(folder, dataset=prompts(), trainer_args={"rollout_func": rollout})
    trainer.train()
    assert trainer.state.global_step == 2
