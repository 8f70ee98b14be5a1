"""Completions with tools and environments, and completions from a user's own function."""

import asyncio
import json
import math
import time
from dataclasses import replace
from functools import partial

import pytest
import torch
from datasets import Dataset
from test_rollout_trainers import prompts, trainer_of, variety
from transformers import AutoTokenizer

from burnish import GRPOConfig, GRPOTrainer, RLOOConfig, UserError
from burnish.rollouts.completions import Completion, CompletionSource
from burnish.trainer.trl.rollouts.tool_functions import schemas
from burnish.trainer.trl.rollouts.tools import ToolDialogue
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


class ScriptedSource(CompletionSource):
    """Completion source that returns scripted turns, by sample."""

    def __init__(self, tokenizer, turns):
        self.tokenizer, self.turns, self.seen = tokenizer, turns, []

    def complete(self, prompts, keys, limits):
        self.seen += [(key.sample, key.start, self.tokenizer.decode(p)) for p, key in zip(prompts, keys, strict=True)]
        completions = []
        for key in keys:
            turns = self.turns[key.sample % len(self.turns)]
            turn = turns[sum(1 for s, *_ in self.seen if s == key.sample) - 1] if len(turns) > 1 else turns[0]
            ids = self.tokenizer(turn + "<|im_end|>", add_special_tokens=False)["input_ids"][: limits.max_new_tokens]
            completions.append(Completion(ids, ids[-1] == self.tokenizer.eos_token_id))
        return completions

    def free(self):
        return None


def call(name, **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def one_prompt():
    return Dataset.from_list([{"prompt": [{"role": "user", "content": "3 + 4?"}], "answer": "7"}])


def trained(folder, turns, tools=(add, slow), rewards=variety, **options):
    """Train one step with scripted completions. Return the trainer and its completion source."""
    trainer = trainer_of(
        folder, rewards=rewards, dataset=options.pop("dataset", one_prompt()), max_steps=1,
        **{"max_completion_length": 400, **options},
        trainer_args={"tools": list(tools), **options.pop("more", {})},
    )  # fmt: skip
    source = trainer.objective.source
    source.inner = ScriptedSource(trainer._tokenizer, turns)
    trainer.train()
    return trainer, source


def test_tool_calls_are_executed_and_results_are_not_trained(folder):
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
    assert len(starts) == 2  # the second turn uses different noise


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


class Silent(Exception):
    def __str__(self):
        raise ValueError


class Unprintable:
    def __str__(self):
        raise ValueError("no text")


OWN = type("Own", (BaseException,), {})


def odd_tool(outcome):
    def odd(a: int) -> int:
        """
        Do something odd.

        Args:
            a: a number.
        """
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    return odd


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("outcome", "content"),
    [(OWN("gone"), "gone"), (asyncio.CancelledError(), "CancelledError"), (GeneratorExit(), "GeneratorExit"),
     (KeyError(), "KeyError"), (Silent(), "Silent"), (Unprintable(), "no text")],
    ids=["own", "cancelled", "exit", "empty", "silent", "unprintable"],
)  # fmt: skip
def test_tool_that_fails_in_an_odd_way_is_a_failed_call(folder, outcome, content):
    seen = []

    def sees(completions, **_):
        seen.extend(completions)
        return [float(len(c)) for c in completions]

    turns = [[call("odd", a=3), "a"], ["b"], ["c"], ["d"]]
    trainer, _ = trained(folder, turns, tools=(odd_tool(outcome),), rewards=sees)
    assert seen[0][1]["content"] == str({"error": content})
    assert trainer.state.log_history[0]["tools/failure_frequency"] == 1


def test_reward_functions_receive_lists_that_tools_return(folder):
    """As in TRL. The prompt of the next turn contains the text of a list."""
    seen = []

    def sees(completions, **_):
        seen.extend(completions)
        return [float(len(c)) for c in completions]

    rows = [("a", 1), ("b", 2)]
    trainer, source = trained(folder, [[call("odd", a=3), "a"], ["b"], ["c"], ["d"]], (odd_tool(rows),), rewards=sees)
    assert seen[0][1] == {"role": "tool", "name": "odd", "content": rows}
    assert any(f"<tool_response>\n{rows}\n</tool_response>" in prompt for _, _, prompt in source.inner.seen)
    assert trainer.state.log_history[0]["tools/failure_frequency"] == 0


def test_tool_that_does_not_return_is_a_failed_call(folder):
    def stuck(a: int) -> int:
        """
        Wait for a long time.

        Args:
            a: a number.
        """
        time.sleep(60)
        return a

    async def stuck_later(a: int) -> int:
        """
        Wait for a long time.

        Args:
            a: a number.
        """
        await asyncio.sleep(60)
        return a

    seen = []

    def sees(completions, **_):
        seen.extend(completions)
        return [float(len(c)) for c in completions]

    start = time.monotonic()
    turns = [[call("stuck", a=1), "a"], [call("stuck_later", a=1), "b"], ["c"], ["d"]]
    trainer, _ = trained(folder, turns, tools=(stuck, stuck_later), rewards=sees, reward_timeout_s=0.5)
    assert time.monotonic() - start < 30
    results = [completion[1]["content"] for completion in seen[:2]]
    assert results == [str({"error": f"Tool {n} has not returned for 0.5 s."}) for n in ("stuck", "stuck_later")]
    assert trainer.state.log_history[0]["tools/failure_frequency"] == 1


def test_coroutines_of_all_completions_run_concurrently(folder):
    running, most = set(), []

    async def meets(a: int) -> int:
        """
        Wait for the others.

        Args:
            a: a number.
        """
        running.add(a)
        await asyncio.sleep(0.2)
        most.append(len(running))
        return a

    turns = [[call("meets", a=sample), "a"] for sample in range(4)]
    trained(folder, turns, tools=(meets,))
    assert most == [4] * 4


def test_interrupt_in_a_tool_ends_training(folder):
    with pytest.raises(KeyboardInterrupt):
        trained(folder, [[call("odd", a=3), "a"], ["b"], ["c"], ["d"]], tools=(odd_tool(KeyboardInterrupt()),))


def test_tools_run_within_an_event_loop(folder):
    """In a notebook, an event loop is already running."""

    async def notebook():
        return trained(folder, [[call("slow", a=5), "a"], [call("add", a=1, b=2), "b"], ["c"], ["d"]])

    trainer, _ = asyncio.run(notebook())
    assert trainer.state.log_history[0]["tools/failure_frequency"] == 0


def undocumented(a: int) -> int:
    return a


@pytest.mark.parametrize(
    ("tools", "error", "message"),
    [
        (add, TypeError, "`tools` must be a list of functions"),
        ([3], TypeError, "`tools` must be functions or methods. Received: 3, of type int."),
        ([partial(add, b=1)], TypeError, "of type partial"),
        ([undocumented], UserError, "Cannot generate JSON schema for undocumented because it has no docstring."),
    ],
    ids=["function", "number", "partial", "undocumented"],
)
def test_tools_of_another_type_are_rejected(folder, tools, error, message):
    with pytest.raises(error, match=message):
        trainer_of(folder, dataset=one_prompt(), trainer_args={"tools": tools})


@pytest.mark.parametrize(
    "more", [{"tools": [add]}, {"environment_factory": lambda: environment_of()()}], ids=["tools", "envs"]
)
def test_tools_require_prompts_as_messages(folder, more):
    with pytest.raises(UserError, match="train dataset, record 1: tools and environments require a prompt as a list"):
        trainer_of(folder, dataset=prompts(), trainer_args=more)


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
    """Qwen3's template adds an empty thought to the last turn and removes it when a tool result follows."""
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
    source.inner = ScriptedSource(trainer._tokenizer, turns * 3)
    complete = source.inner.complete

    def ignores_cache(prompts, keys, limits):
        if keys[0].start == 0:
            source.inner.seen = []
        return complete(prompts, keys, limits)

    source.inner.complete = ignores_cache
    trainer.train()
    log = trainer.state.log_history[0]
    assert log["rewards/Counter/mean"] == pytest.approx(1.5)
    assert "3 + 4? Start at 0.<|im_end|>" in source.inner.seen[0][2]
    assert Counter.made == 4  # kept for the next generation


def environment_of(**methods):
    return type("Game", (Counter,), methods)


def raising(error):
    def reset(self, **record):
        raise error

    return reset


async def reset_later(self, **record):
    return "go"


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("reset", "message"),
    [
        (raising(ValueError("no board")), "train dataset, record 1: Game.reset failed: ValueError: no board."),
        (raising(SystemExit(3)), "record 1: Game.reset failed: SystemExit: 3."),
        (raising(OWN("gone")), "record 1: Game.reset failed: Own: gone."),
        (lambda self, **record: time.sleep(60), "record 1: Game.reset has not returned for 2 s (reward_timeout_s)."),
        (lambda self: None, "record 1: Game.reset failed: TypeError: "),
        (lambda self, **record: 3, "Game.reset must return a string or None. Received: 3, of type int."),
    ],
    ids=["raises", "exits", "own", "stuck", "arguments", "number"],
)
def test_failed_reset_names_the_environment_and_the_record(folder, reset, message):
    trainer = trainer_of(
        folder, rewards=None, dataset=one_prompt(), max_completion_length=64, reward_timeout_s=2,
        trainer_args={"environment_factory": environment_of(reset=reset)},
    )  # fmt: skip
    with pytest.raises(UserError) as error:
        trainer.train()
    assert message in str(error.value)


def test_interrupt_in_reset_ends_training(folder):
    more = {"environment_factory": environment_of(reset=raising(KeyboardInterrupt()))}
    trainer = trainer_of(folder, rewards=None, dataset=one_prompt(), max_completion_length=64, trainer_args=more)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()


@pytest.mark.parametrize(
    ("factory", "error", "message"),
    [
        (3, TypeError, "`environment_factory` must be a class or function that creates an environment"),
        ({"game": 3}, TypeError, "Received: 3, of type int."),
        ({}, ValueError, "must have at least one entry"),
        (environment_of(reset=reset_later), ValueError, "Game.reset must be a function without `async`"),
        ({"game": environment_of()}, UserError, 'record 1: the column "environment" must name an environment .game.'),
    ],
    ids=["number", "numbers", "none", "async", "unnamed"],
)
def test_unusable_environments_are_rejected_before_training(folder, factory, error, message):
    with pytest.raises(error, match=message):
        trainer_of(folder, rewards=variety, dataset=one_prompt(), trainer_args={"environment_factory": factory})


def test_reset_does_not_get_the_name_of_the_environment(folder):
    """As in TRL: the column selects the environment."""
    strict = environment_of(reset=lambda self, prompt: setattr(self, "count", 0))
    dataset = [{"prompt": [{"role": "user", "content": "Go."}], "environment": "game"}]
    more = {"environment_factory": {"game": strict}}
    trainer_of(folder, rewards=None, dataset=dataset, max_steps=1, max_completion_length=64, trainer_args=more).train()


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
    """One completion has too many values, the next one too few."""

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


WHOLE = {"prompt_ids": [5], "completion_ids": [6, 7]}


@pytest.mark.sample(8)
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (None, "must return a dictionary. Received: nothing."),
        ([1], "must return a dictionary. Received: list."),
        ({3: 1}, "must return a dictionary whose keys are strings. Received: the key 3."),
        ({"completion_ids": 3}, 'must return a list of token ids for "completion_ids" of completion 1. Received: 3.'),
        ({"completion_ids": "ab"}, "Received: 'ab'."),
        ({"completion_ids": []}, 'must return at least one token id for "completion_ids" of completion 1.'),
        ({"prompt_ids": []}, 'must return at least one token id for "prompt_ids" of completion 1.'),
        ({"completion_ids": [6, 1.5]}, 'must return integers for "completion_ids" of completion 1. Received: 1.5.'),
        ({"completion_ids": [6, True]}, "must return integers"),
        ({"completion_ids": [6, 10**6]}, "must return token ids from 0 to 319"),
        ({"prompt_ids": [-1]}, 'for "prompt_ids" of completion 1. Received: -1.'),
        ({"logprobs": [-1.0, math.nan]}, 'each token in "logprobs" of completion 1. Received: nan.'),
        ({"logprobs": [-1.0, -math.inf]}, "Received: -inf."),
        ({"logprobs": [-1.0, None]}, "Received: None."),
        ({"logprobs": [-1.0, "a"]}, "Received: 'a'."),
        ({"logprobs": 1.0}, 'must return a list for "logprobs" of completion 1. Received: 1.0.'),
        ({"env_mask": [2, 0]}, 'must return 0 or 1 for each token in "env_mask" of completion 1. Received: 2.'),
        ({"env_mask": [0.5, 0]}, "Received: 0.5."),
        ({"env_mask": ["a", 0]}, "Received: 'a'."),
    ],
    ids=str,
)  # fmt: skip
def test_invalid_result_of_a_rollout_function_is_rejected_by_key_and_completion(folder, changes, message):
    def rollout(prompts, trainer):
        if not isinstance(changes, dict):
            return changes
        values = {**WHOLE, **changes}
        return {"logprobs": None} | {name: [value] * len(prompts) for name, value in values.items()}

    trainer = trainer_of(folder, dataset=prompts(), trainer_args={"rollout_func": rollout})
    with pytest.raises(UserError) as error:
        trainer.train()
    assert message in str(error.value)


@pytest.mark.parametrize("name", ["prompt_ids", "completion_ids"])
def test_rollout_function_must_return_ids(folder, name):
    def rollout(prompts, trainer):
        return {"prompt_ids": [[5]] * 4, "completion_ids": [[6]] * 4, "logprobs": None, name: None}

    trainer = trainer_of(folder, dataset=prompts(), trainer_args={"rollout_func": rollout})
    with pytest.raises(UserError, match=f'must return a list for "{name}". Received: None.'):
        trainer.train()


@pytest.mark.parametrize(
    ("function", "message"),
    [(3, "must be a function"), (lambda prompts: {}, "must accept the prompts and the trainer as its two arguments")],
    ids=["number", "function"],
)
def test_rollout_function_that_cannot_be_called_is_rejected(folder, function, message):
    with pytest.raises(TypeError, match=message):
        trainer_of(folder, dataset=prompts(), trainer_args={"rollout_func": function})


def test_non_list_value_of_a_rollout_function_is_passed_for_each_completion(folder):
    seen = []

    def rollout(prompts, trainer):
        ids = {name: [value] * len(prompts) for name, value in WHOLE.items()}
        return {**ids, "logprobs": None, "env_mask": None, "game": "chess", "more": None}

    def sees(completions, game, more, **_):
        seen.extend([*game, *more])
        return [0.0] * len(completions)

    trainer_of(folder, rewards=sees, dataset=prompts(), max_steps=1, trainer_args={"rollout_func": rollout}).train()
    assert seen == ["chess"] * 4 + [None] * 4


def test_rollout_function_may_return_tensors(folder):
    def rollout(prompts, trainer):
        ids = {"prompt_ids": [[5]] * len(prompts), "completion_ids": [[6, 7]] * len(prompts)}
        return {**ids, "logprobs": torch.full((len(prompts), 2), -1.0), "env_mask": torch.ones(len(prompts), 2)}

    trainer = trainer_of(folder, dataset=prompts(), trainer_args={"rollout_func": rollout})
    trainer.train()
    assert trainer.state.global_step == 2
