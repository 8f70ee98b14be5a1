"""Reward functions: entries of reward_funcs, their arguments, and rejected results."""

import asyncio
import contextlib
import math
import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from burnish import rewards as public
from burnish.config.errors import Problem, UserError, is_out_of_memory
from burnish.rollouts import user_functions
from burnish.rollouts.generation import Generator, _on_all_ranks
from burnish.rollouts.rewards.compute import RewardError, compute_rewards
from burnish.rollouts.rewards.functions import load_rewards, missing_columns
from burnish.rollouts.samples import ScoredCompletion

FILE = """
import math

def exact(completions, answer, **kwargs):
    return [float(c == a) for c, a in zip(completions, answer)]

def strict(completions):
    return [1.0 for _ in completions]

def fails(completions, **kwargs):
    return [1 / (len(c) - 3) for c in completions]

def scaled(factor):
    def scaled_reward(completions, **kwargs):
        return [factor * len(c) for c in completions]
    return scaled_reward

def powered(completions, power=1, **kwargs):
    return [len(c) ** power for c in completions]
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    (tmp_path / "my_rewards.py").write_text(FILE)
    (tmp_path / "broken.py").write_text("x = 1\nimport nowhere_at_all\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def rewards_of(functions, completions=("aa", "bbb", "c"), **more):
    loaded = load_rewards(functions) if not hasattr(functions[0], "call") else functions
    columns = {"answer": ["aa", "bb", "c"], **more.pop("columns", {})}
    ids = [[ord(c) for c in completion] for completion in completions]
    return compute_rewards(loaded, ["q"] * len(completions), list(completions), ids, columns, **more)


def reward_error(functions, **more):
    with pytest.raises(UserError) as error:
        rewards_of(functions, **more)
    return str(error.value)


def test_reward_entries_of_every_type_are_called_with_named_arguments():
    table = rewards_of(
        ["my_rewards.py:exact", "my_rewards.py:strict", {"my_rewards.py:scaled": {"factor": 2}}, "exact_match_reward",
         {"my_rewards.py:powered": {"power": 2}}, {"soft_overlong_punishment": {"max_completion_len": 3,
         "soft_punish_cache": 2}}]
    )  # fmt: skip
    assert table.names == ["exact", "strict", "scaled_reward", "exact_match_reward", "powered",
                           "soft_overlong_punishment_reward"]  # fmt: skip
    assert table.values.T.tolist() == [[1, 0, 1], [1, 1, 1], [4, 6, 2], [1, 0, 1], [4, 9, 1], [-0.5, -1, 0]]


def test_column_does_not_replace_an_argument_of_the_entry():
    table = rewards_of([{"my_rewards.py:powered": {"power": 2}}], columns={"power": [3, 3, 3]})
    assert table.values.flatten().tolist() == [4, 9, 1]


def test_function_of_a_package_is_found_by_its_path():
    assert load_rewards(["burnish.rewards.think_format_reward"])[0].call is public.think_format_reward


def test_second_function_of_same_name_is_renamed():
    assert [f.name for f in load_rewards(["my_rewards.py:exact"] * 3)] == ["exact", "exact_2", "exact_3"]


def test_renamed_function_does_not_take_the_name_of_another(folder):
    (folder / "more.py").write_text("def exact_2(completions):\n    return [0.0] * len(completions)\n")
    entries = ["my_rewards.py:exact", "my_rewards.py:exact", "more.py:exact_2"]
    assert [f.name for f in load_rewards(entries)] == ["exact", "exact_2", "exact_2_2"]


def test_source_line_is_known_and_changed_file_changes_the_digest(folder):
    (before,) = load_rewards(["my_rewards.py:exact"])
    assert before.place == "my_rewards.py, line 4"
    (folder / "my_rewards.py").write_text(FILE + "\n# changed\n")
    assert load_rewards(["my_rewards.py:exact"])[0].digest != before.digest


def test_changed_file_changes_the_digest_of_a_class(folder):
    text = "class Fixed:\n    def __call__(self, completions, **kwargs):\n        return [{}] * len(completions)\n"
    (folder / "kinds.py").write_text(text.format(1.0))
    (first,) = load_rewards([{"kinds.py:Fixed": {}}])
    (folder / "kinds.py").write_text(text.format(2.0))
    (second,) = load_rewards([{"kinds.py:Fixed": {}}])
    assert (first.place, second.place) == ("kinds.py, line 1", "kinds.py, line 1")
    assert first.digest != second.digest


def test_file_of_a_reward_function_may_define_dataclasses(folder):
    lines = [
        "from __future__ import annotations", "from dataclasses import dataclass", "@dataclass", "class Rule:",
        "    factor: int = 2", "def doubled(completions):", "    return [Rule().factor * len(c) for c in completions]",
    ]  # fmt: skip
    (folder / "rules.py").write_text("\n".join(lines))
    assert rewards_of(["rules.py:doubled"]).values.flatten().tolist() == [4, 6, 2]


@pytest.mark.parametrize(
    "line", ["import words", "from words import GOOD", "from parts import words", "from parts.words import GOOD"]
)
def test_changed_imported_file_changes_the_digest(folder, monkeypatch, line):
    monkeypatch.syspath_prepend(folder)
    (folder / "parts").mkdir()
    for file in (folder / "words.py", folder / "parts/words.py", folder / "parts/__init__.py"):
        file.write_text("GOOD = 1\n")
    text = f"def of_words(completions, **_):\n    {line}\n    return [1.0] * len(completions)\n"
    (folder / "of_words.py").write_text(text)
    before = load_rewards(["of_words.py:of_words"])[0].digest
    assert load_rewards(["of_words.py:of_words"])[0].digest == before
    (folder / ("parts/words.py" if "parts" in line else "words.py")).write_text("GOOD = 2\n")
    assert load_rewards(["of_words.py:of_words"])[0].digest != before


def test_file_of_a_reward_function_may_import_its_neighbors(folder, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    (folder / "code").mkdir()
    (folder / "code/neighbor_of_rewards.py").write_text("FACTOR = 2\n")
    (folder / "code/later_neighbor.py").write_text("SUMMAND = 1\n")
    text = (
        "from neighbor_of_rewards import FACTOR\n"
        "def of_neighbors(completions):\n    from later_neighbor import SUMMAND\n"
        "    return [FACTOR * len(c) + SUMMAND for c in completions]\n"
    )
    (folder / "code/far.py").write_text(text)
    assert rewards_of(["code/far.py:of_neighbors"]).values.flatten().tolist() == [5, 7, 3]
    (folder / "rewards_of_folder.py").write_text("def one(completions):\n    return [1.0] * len(completions)\n")
    assert rewards_of(["rewards_of_folder.one"]).values.flatten().tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("my_rewards.py:exakt", 'my_rewards.py has no function "exakt". Did you mean "exact"?'),
        ("my_reward.py:exact", 'was not found in'),
        ("my_reward.py:exact", 'Did you mean "my_rewards.py"?'),
        ("broken.py:any", "broken.py, line 2 of reward_funcs cannot be imported: ModuleNotFoundError"),
        ("acuracy_reward", 'Did you mean "accuracy_reward"?'),
        ("no.such.place", 'Module "no" of the reward function no.such.place was not found'),
        ("soft_overlong_punishment", "requires the arguments max_completion_len and soft_punish_cache."),
        ("soft_overlong_punishment", "{soft_overlong_punishment: {max_completion_len: 512, soft_punish_cache: 128}}"),
        ({"cosine_scaled_reward": {"max_length": 3, "max_len": 3}}, 'Did you mean "max_len"?'),
        (7, "must be a name or a function"),
    ],
)  # fmt: skip
def test_missing_reward_function_is_rejected_by_name(entry, message):
    with pytest.raises(UserError) as error:
        load_rewards([entry])
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"exact_match_reward": {"case": 1}}, 'exact_match_reward has no argument "case".'),
        ({"my_rewards.py:strict": {"power": 1}}, 'my_rewards.py:strict has no argument "power".'),
    ],
)
def test_unknown_argument_of_a_function_is_rejected_when_it_is_loaded(entry, message):
    with pytest.raises(UserError) as error:
        load_rewards([entry])
    assert message in str(error.value)


def test_missing_column_is_detected_before_running(monkeypatch):
    monkeypatch.setattr("burnish.rollouts.rewards.builtin.find_spec", lambda name: name)
    (problem,) = missing_columns(load_rewards(["accuracy_reward", "my_rewards.py:exact"]), ["answer"], "gsm8k")
    what = 'accuracy_reward requires the column "solution". gsm8k has: answer.'
    assert str(problem) == (
        f"{what}\n  Add it (in YAML, columns: {{solution: answer}} renames a column), or give the parameter a default "
        "value."
    )


def test_none_and_nan_are_no_score_and_are_counted():
    table = rewards_of([lambda completions, **_: [None, math.nan, 1.0]])
    assert table.values.isnan().tolist() == [[True], [True], [False]]
    assert table.summary() == {"rewards/<lambda>/mean": 1.0, "rewards/<lambda>/std": 0.0, "rewards/<lambda>/none": 2.0}


@pytest.mark.parametrize("kind", [iter, lambda scores: map(float, scores), lambda s: torch.tensor(s).to_sparse()])
def test_scores_can_be_an_iterator_or_a_sparse_tensor(kind):
    assert rewards_of([lambda completions, **_: kind([1.0, 0.0, 3.0])]).values.flatten().tolist() == [1, 0, 3]


def test_scores_can_be_a_tensor():
    assert rewards_of([lambda completions, **_: torch.tensor([1.0, 2.0, 3.0])]).values.flatten().tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    ("scores", "message"),
    [
        ([1.0], "<lambda> returned 1 reward for 3 completions."),
        (None, "must return a list with one reward for each completion. Received: nothing."),
        ([1.0, math.inf, 0.0], "returned inf for completion 2; use None for a completion without a score."),
        ([1.0, "good", 0.0], "returned 'good' for completion 2"),
        ([1.0, 10**400, 0.0], "for completion 2; a reward must be a number or None."),
        ([1.0, torch.ones(2), 0.0], "for completion 2; a reward must be a number or None."),
        ([1.0, "2.0", 0.0], "returned '2.0' for completion 2; a reward must be a number or None."),
        ([1.0, 1e39, 0.0], "returned 1e+39 for completion 2"),  # inf in float32
        (len, "creates the reward function, write {test_rewards.py:<lambda>: {}} in YAML"),
        (b"abc", "must return a list with one reward for each completion. Received: bytes."),
        (torch.ones(3, device="meta"), "must return a list with one reward for each completion. Received: Tensor."),
    ],
)
def test_invalid_scores_are_rejected(scores, message):
    assert message in reward_error([lambda completions, **_: scores], step=5)


def test_result_of_a_coroutine_function_in_a_plain_one_is_rejected():
    async def scores(completions, **_):
        return [1.0] * len(completions)

    message = reward_error([lambda **arguments: scores(**arguments)])
    assert "Received: coroutine.\n  Declare the function with async def." in message


class Silent(Exception):
    def __str__(self):
        raise ValueError


@pytest.mark.parametrize("kind", [asyncio.CancelledError, GeneratorExit, Silent, type("Own", (BaseException,), {})])
def test_exception_of_every_class_is_reported(kind):
    def fails(completions, **_):
        raise kind()

    assert f"{kind.__name__}. Completion 1" in reward_error([fails])


def test_interrupt_in_a_function_is_not_reported_as_its_error():
    def interrupted(completions, **_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        rewards_of([interrupted])


def test_class_instead_of_its_instance_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "rates.py").write_text(
        "class Rates:\n    def __call__(self, completions, **kwargs):\n        return [1.0] * len(completions)\n"
    )
    with pytest.raises(UserError, match=r"Rates is a class\. .*\n.*\{.*rates.py:Rates: \{\}\} in YAML"):
        load_rewards([f"{tmp_path / 'rates.py'}:Rates"])
    (function,) = load_rewards([{f"{tmp_path / 'rates.py'}:Rates": {}}])
    assert function.call(completions=["a", "b"]) == [1.0, 1.0]


def test_function_with_positional_only_parameters_is_rejected_when_loaded():
    def rates(prompts, completions, /, answer="", **_):
        return [1.0] * len(completions)

    with pytest.raises(UserError, match="rates declares prompts and completions as positional-only"):
        load_rewards([rates])
    assert load_rewards([max])  # a function with unknown parameters


def test_exception_is_reported_with_file_line_record_and_completion():
    message = reward_error(["my_rewards.py:fails"], places=["record 4", "record 4", "record 5"], step=3)
    assert message.startswith("my_rewards.py:fails, line 11: ZeroDivisionError")
    assert 'Record 4, completion "bbb". Stopped at step 3.' in message


def test_exception_is_reported_with_the_content_of_a_message():
    def fails(completions, **_):
        raise ValueError("no")

    with pytest.raises(UserError, match='Completion 1, completion "yes"'):
        compute_rewards(load_rewards([fails]), ["a"], [[{"role": "assistant", "content": "yes"}]], [[1]], {})


def test_function_that_does_not_return_is_reported():
    def stuck(completions, **_):
        time.sleep(30)

    start = time.monotonic()
    assert "stuck has not returned for 0.3 s (reward_timeout_s), on 3 completions" in reward_error(
        [stuck], timeout_s=0.3
    )
    assert time.monotonic() - start < 5


def test_function_that_catches_all_exceptions_is_stopped():
    def stubborn(completions, **_):
        try:
            while True:
                time.sleep(0.01)
        except Exception:
            return [0.0] * len(completions)

    assert "stubborn has not returned" in reward_error([stubborn], timeout_s=0.3)


def test_coroutines_run_concurrently_with_a_time_limit():
    async def slow(completions, **_):
        await asyncio.sleep(2)
        return [1.0] * len(completions)

    start = time.monotonic()
    table = rewards_of([slow] * 4)
    assert time.monotonic() - start < 6  # sequentially, they take 8 s
    assert table.values.sum() == 12
    assert "slow has not returned" in reward_error([slow], timeout_s=0.05)


def test_timeout_inside_a_function_is_its_own_error():
    def asks(completions, **_):
        raise TimeoutError("the server did not answer")

    async def asks_later(completions, **_):
        raise TimeoutError("the server did not answer")

    for function in (asks, asks_later):
        assert "TimeoutError: the server did not answer." in reward_error([function])
    with ThreadPoolExecutor(1) as pool:
        assert "TimeoutError: the server did not answer." in pool.submit(reward_error, [asks]).result()


def test_function_in_another_thread_has_a_time_limit():
    is_done = threading.Event()

    def stuck(completions, **_):
        is_done.wait(30)

    with ThreadPoolExecutor(1) as pool:
        assert "stuck has not returned for 0.3 s" in pool.submit(reward_error, [stuck], timeout_s=0.3).result()
    is_done.set()


def test_coroutine_that_blocks_the_event_loop_has_a_time_limit():
    async def blocks(completions, **_):
        time.sleep(30)

    start = time.monotonic()
    assert "blocks has not returned for 0.3 s" in reward_error([blocks], timeout_s=0.3)
    assert time.monotonic() - start < 5


def test_uninterruptible_function_is_reported(monkeypatch, caplog):
    def stubborn(completions, **_):
        until = time.monotonic() + 0.5
        while time.monotonic() < until:
            with contextlib.suppress(BaseException):
                time.sleep(0.1)
        return [0.0] * len(completions)

    monkeypatch.setattr(user_functions, "_PATIENCE_S", 0.1)
    rewards_of([stubborn], timeout_s=0.1)
    assert "stubborn has not returned for 0.1 s and cannot be interrupted" in caplog.text


def test_system_exit_in_a_function_is_reported_as_its_error(folder, monkeypatch):
    def leaves(completions, **_):
        raise SystemExit(3)

    async def leaves_later(completions, **_):
        raise SystemExit(3)

    monkeypatch.syspath_prepend(folder)
    (folder / "leaving.py").write_text("import sys\nsys.exit(4)\n")
    assert "leaves, line" in reward_error([leaves])
    assert "leaves_later, line" in reward_error([leaves_later])
    for entry in ("leaving.py:f", "leaving.f"):
        with pytest.raises(UserError, match="line 2 of reward_funcs cannot be imported: SystemExit: 4"):
            load_rewards([entry])


@pytest.mark.run
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Python warns about a fork with threads
def test_forked_processes_do_not_continue_the_run(capfd):
    main, codes = os.getpid(), []

    def forked(leave):
        if child := os.fork():
            codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
            return [0.0, 1.0, 2.0]
        return leave()

    def returns(completions, **_):
        return forked(lambda: [0.0] * len(completions))

    def raises(completions, **_):
        return forked(lambda: 1 / 0)

    def leaves(completions, **_):
        return forked(lambda: sys.exit(3))

    async def returns_later(completions, **_):
        return forked(lambda: [0.0] * len(completions))

    for function in (returns, raises, leaves, returns_later):
        try:
            table = rewards_of([function])
        finally:
            if os.getpid() != main:
                os._exit(99)
        assert table.values[:, 0].tolist() == [0, 1, 2]
    assert codes == [1, 1, 3, 1]
    error = capfd.readouterr().err
    assert "returns forked a child process that continued to run the training code" in error
    assert "Call os._exit" in error


def test_scores_can_be_a_generator():
    def yields(completions, **_):
        yield from (float(len(c)) for c in completions)

    assert rewards_of([yields]).values.flatten().tolist() == [2, 3, 1]


def test_argument_mutations_are_not_visible_to_other_functions():
    def takes(prompts, completions, completion_ids, answer, nested, **_):
        count = len(completions)
        completions[0][0]["content"] = "other"
        nested[0]["a"].append(2)
        for values in (prompts, completions, completion_ids, answer):
            values.clear()
        return [0.0] * count

    def sees(completions, completion_ids, answer, nested, **_):
        assert nested[0] == {"a": [1]}
        assert len(answer) == len(completion_ids) == 3
        return [float(completion[0]["content"] == "aa") for completion in completions]

    messages = [[{"role": "assistant", "content": text}] for text in ("aa", "bbb", "c")]
    functions, columns = load_rewards([takes, sees]), {"answer": ["aa", "bb", "c"], "nested": [{"a": [1]}] * 3}
    table = compute_rewards(functions, ["q"] * 3, messages, [[1]] * 3, columns)
    assert table.values.tolist() == [[0, 1], [0, 0], [0, 0]]
    assert messages[0][0]["content"] == "aa"


def test_global_settings_changed_by_a_function_are_restored(folder):
    def changes(completions, **_):
        torch.set_grad_enabled(False)
        torch.set_default_dtype(torch.float64)
        os.chdir("/")
        return [0.0] * len(completions)

    rewards_of([changes])
    assert torch.is_grad_enabled()
    assert torch.get_default_dtype() == torch.float32
    assert Path.cwd() == folder


@pytest.mark.parametrize(
    ("value", "kept"), [(torch.tensor(1.5), 1.5), ({(1, 2): 3}, "{(1, 2): 3}"), (math.nan, "nan"), (1j, "1j")]
)
def test_extra_columns_must_be_serializable(value, kept):
    def reported(completions, log_extra, **_):
        log_extra("more", [value] * 3)
        return [0.0, 1.0, 2.0]

    assert rewards_of([reported]).extra == {"more": [kept] * 3}


def test_extra_columns_have_one_value_per_completion():
    def reported(completions, log_extra, **_):
        log_extra("more", [1])
        return [0.0, 1.0, 2.0]

    assert 'log_extra("more") received 1 values for 3 completions' in reward_error([reported])


def test_extra_columns_and_metrics_are_kept():
    def reported(completions, log_extra, log_metric, **_):
        log_extra("length", [len(c) for c in completions])
        log_metric("longest", max(map(len, completions)))
        return [0.0, 1.0, 2.0]

    table = rewards_of([reported])
    assert table.extra == {"length": [2, 3, 1]}
    assert table.summary()["longest"] == 3


@pytest.mark.parametrize(
    "name",
    [
        "reward",
        "loss",
        "kl",
        "rewards/named/mean",
        "completions/mean_length",
        "time/generate",
        "step_time",
        "runtime",
        "skipped_steps",
    ],
)
def test_log_metric_rejects_names_of_the_log(name):
    def named(completions, log_metric, **_):
        log_metric(name, 1.0)
        return [0.0, 1.0, 2.0]

    what = f'named called log_metric("{name}", ...), but a metric with this name is already logged.'
    assert what in reward_error([named])


def test_columns_named_like_arguments_are_not_passed():
    def sees(prompts, completions, **columns):
        assert prompts == ["q"] * 3
        assert columns.keys() == {"answer", "log_extra", "log_metric", "completion_ids"}
        return [0.0, 1.0, 2.0]

    rewards_of([sees], columns={"prompts": ["other"] * 3, "completions": ["other"] * 3})


# --- built-in functions -----------------------------------------------------------------------------------------------

TEXTS = ["<think>a</think>b", "<think>a<think>b</think>", "a</think>", "<think>a", "x<think>a</think>"]


@pytest.mark.parametrize("wrap", [str, lambda text: [{"role": "assistant", "content": text}]])
def test_built_in_rewards_accept_texts_and_messages(wrap):
    assert public.think_format_reward([wrap(text) for text in TEXTS]) == [1, 0, 0, 0, 0]
    assert public.exact_match_reward([wrap(" 42\n"), wrap("43")], answer=["42", 42]) == [1, 0]
    assert public.contains_answer_reward([wrap("it is 42."), wrap("43")], answer=["42", "42"]) == [1, 0]
    schema = {"type": "object", "required": ["a"], "properties": {"a": {"type": "integer"}}}
    options = ['{"a": 1}', '{"a": true}', '{"b": 1}', "no", "[1]"]
    assert public.get_json_schema_reward(schema)([wrap(text) for text in options]) == [1, 0, 0, 0, 0]
    number = public.get_json_schema_reward({"type": "number"})
    assert number([wrap(text) for text in ("1.5", "NaN", "-Infinity")]) == [1, 0, 0]


def test_length_rewards_match_their_formulas():
    ids = [[1] * n for n in (80, 81, 90, 100, 101)]
    assert public.get_soft_overlong_punishment(100, 20)(completion_ids=ids) == [0, -0.05, -0.5, -1, -1]
    assert public.get_repetition_penalty_reward(2)(completion_ids=[[1, 2, 3, 4], [5] * 5, [1]]) == [0, -0.75, 0]
    with pytest.raises(UserError, match="max_penalty must be a number of at most 0"):
        public.get_repetition_penalty_reward(max_penalty=1.0)


def test_math_reward_requires_its_extra_or_matches_math_verify():
    options = [r"so \boxed{\frac{1}{3}}", r"so \boxed{\frac{1}{2}}", "1/3 without anchor"]
    try:
        import math_verify  # noqa: F401
    except ImportError:
        with pytest.raises(UserError, match=r"burnish\[rewards\]"):
            public.accuracy_reward(options, [r"\frac{1}{3}"] * 3)
        return
    assert public.accuracy_reward(options, [r"\frac{1}{3}"] * 3) == [1, 0, 0]
    assert public.accuracy_reward(["1"], ["no number"]) == [None]
    assert public.reasoning_accuracy_reward([f"<think>{g}" for g in options], [r"\frac{1}{3}"] * 3) == [0, 0, 0]
    cosine = public.get_cosine_scaled_reward(100)
    ids = [[1] * 50, [1] * 50, [1] * 200]
    assert cosine(options, [r"\frac{1}{3}"] * 3, ids) == pytest.approx([0.75, -0.75, -0.5])


class TwoRanks:
    """Backend of two ranks. Args: other: the error of the other rank."""

    rank, world_size = 0, 2

    def __init__(self, other=None):
        self.other = other

    def gather_objects(self, value):
        return [value, self.other]


def fails_with(error):
    raise error


def test_an_error_of_a_rank_keeps_its_type():
    error = torch.OutOfMemoryError("CUDA out of memory")
    with pytest.raises(torch.OutOfMemoryError) as raised:
        _on_all_ranks(TwoRanks(), lambda: fails_with(error))
    assert raised.value is error
    assert is_out_of_memory(error)
    with pytest.raises(RuntimeError, match=r"^Rank 1 failed\. OutOfMemoryError: CUDA out of memory$"):
        _on_all_ranks(TwoRanks((1, "OutOfMemoryError: CUDA out of memory")), lambda: 5)
    problem = Problem("A reward is missing.", option="reward_funcs")
    with pytest.raises(UserError) as refused:
        _on_all_ranks(TwoRanks((1, (problem,))), lambda: 5)
    assert refused.value.problems == (problem,)
    assert _on_all_ranks(TwoRanks(), lambda: 5) == 5


class _OtherRank:
    """This rank of two. ``has_score`` is whether a completion of the other rank has a score."""

    rank, world_size = 0, 2

    def __init__(self, has_score):
        self.has_score = has_score

    def gather_objects(self, value):
        return [value, None]

    def any(self, flag):
        return flag or self.has_score


@pytest.mark.parametrize("has_score", [False, True])
def test_generation_without_any_score_is_rejected_over_all_ranks(has_score):
    functions = load_rewards([lambda completions: [None] * len(completions)])
    options = SimpleNamespace(reward_timeout_s=5.0)
    generator = Generator(options, None, functions, None, frozenset(), contextlib.nullcontext)
    rows = [{"record": '{"prompt": "q", "columns": {}, "place": "a, record 1"}'}]
    samples = [ScoredCompletion(0, at, "a, record 1", [1], [2], [1], True, text="x") for at in range(2)]
    refuses = pytest.raises(RewardError, match="No completion of step 5 has a score: <lambda> returned None for all")
    with contextlib.nullcontext() if has_score else refuses:
        generator._compute_rewards(rows, 2, samples, _OtherRank(has_score), 5)
        assert [sample.rewards for sample in samples] == [[None], [None]]
