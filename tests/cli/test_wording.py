"""Behavior does not depend on wording: every message and every name of a check may change."""

import json
import os
import shlex
from typing import Any
from zlib import crc32

import pytest
from test_bad_command_lines import EXPECTED
from test_bad_options import REJECTED

from burnish import cli
from burnish.config.errors import OptionText, Problem, UserError, rename_options
from burnish.run.plan.plan import component_checks, component_notes

pytestmark = [pytest.mark.run, pytest.mark.usefixtures("config_folder")]
CASES = [
    *(shlex.join([*(f"{k}={v or ''}" for k, v in wrong.changes.items()), *wrong.argv]) for wrong in REJECTED),
    *EXPECTED,
]


def replace_sentences(patch: pytest.MonkeyPatch) -> None:
    """Replace all texts of problems by noise that names options at random; distinct sentences stay distinct."""
    initialize = Problem.__init__

    def with_noise(
        self: Problem, what: str, where: str = "", why: str = "", remedy: str = "", option: Any = (), code: str = ""
    ) -> None:
        noise = f'{crc32(what.encode())} "seed", max_steps, "template".'
        initialize(self, noise, where, why and "No reason.", remedy and "Set cutoff_len.", option, code)

    patch.setattr(Problem, "__init__", with_noise)


def explain_problems(argv: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, list[tuple[str, str]]]:
    """Return the exit status of ``burnish explain --json``, and the option and source of each problem."""
    status = cli.main(["explain", "run.yaml", "--json", *shlex.split(argv)])
    answer = json.loads(capsys.readouterr().out)
    return status, [(one["option"], one["where"].replace(os.getcwd(), "")) for one in answer["problems"]]


@pytest.mark.sample(30)
@pytest.mark.parametrize("argv", CASES)
def test_option_and_source_of_a_problem_do_not_depend_on_wording(
    argv: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = explain_problems(argv, capsys)
    replace_sentences(monkeypatch)
    assert explain_problems(argv, capsys) == before
    status, problems = before
    assert status == 2
    assert problems
    print(argv, before) if not problems[0][0] else None


def test_user_error_keeps_its_option() -> None:
    (problem,) = UserError("wrong.", option="seed").problems
    assert problem.options == ("seed",)
    assert Problem("wrong.", option=("seed", "max_steps")).options == ("seed", "max_steps")
    assert Problem("wrong.").options == ()


def test_checks_and_notes_are_found_independently_of_function_names(monkeypatch: pytest.MonkeyPatch) -> None:
    before = [*component_checks(), *component_notes()]
    for number, function in enumerate(before):
        monkeypatch.setattr(function, "__name__", f"renamed_{number}")
        monkeypatch.setattr(function, "__qualname__", f"renamed_{number}")
    assert [*component_checks(), *component_notes()] == before
    assert len(before) > 50


def test_load_best_model_is_rejected_with_schedule_free_optimizer(capsys: pytest.CaptureFixture[str]) -> None:
    best = "optim=schedule_free_adamw load_best_model_at_end=true eval_strategy=steps eval_steps=2 val_size=2"
    _, problems = explain_problems(best, capsys)
    assert ("load_best_model_at_end", "the command line") in problems


def test_options_in_a_message_are_structured_data() -> None:
    text = OptionText('"{pref_beta}" is {:g}; {stage=kto} has pref_beta.', 0.5, names={"pref_beta": "alias"})
    assert text == '"alias" is 0.5; stage: kto has pref_beta.'
    assert rename_options(text, {"stage=kto": "a KTOTrainer"}) == '"alias" is 0.5; a KTOTrainer has pref_beta.'
    assert rename_options(text, {"pref_beta": "beta"}) == '"beta" is 0.5; stage: kto has pref_beta.'
    assert rename_options("pref_beta", {"pref_beta": "beta"}) == "pref_beta"
