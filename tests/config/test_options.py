"""Options are declared once, converted, range-checked, and rejected together with the closest valid name."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest

from burnish.config.errors import UserError
from burnish.config.options import RawValue, build, changed_options, option, specs, union


@dataclass
class Rate:
    learning_rate: float = option(1e-3, "Peak.", gt=0, aliases=("lr",))
    warmup: int | float = option(0, "Steps or share.", ge=0)


@dataclass
class Shape:
    mode: Literal["fast", "slow"] = option("fast", "How.")
    curve: str = option("linear", "Which.", choices=("linear", "cosine"))
    names: list[str] | None = option(None, "Which ones.")
    extra: dict[str, Any] | None = option(None, "More.")
    resume: str | bool | None = option(None, "A folder, or yes.")
    is_on: bool = option(False, "On.")
    limit: int | None = option(None, "At most.", ge=1, unit="rows")
    epochs: float = option(3.0, "How often.", gt=0, lt=math.inf, unit="epochs")


Both = union("Both", Rate, Shape)


def build_options(**overrides):
    options, problems = build(
        Both, {k: RawValue(v, f"run.yaml, line {i}") for i, (k, v) in enumerate(overrides.items(), 1)}
    )
    return options, [str(p) for p in problems]


@pytest.mark.parametrize(
    ("name", "raw", "value"),
    [
        ("learning_rate", "1e-5", 1e-5),
        ("learning_rate", ".inf", math.inf),
        ("names", "[a, b]", ["a", "b"]),
        ("names", ["~/a"], [f"{Path.home()}/a"]),
        ("resume", "~/a", f"{Path.home()}/a"),
        ("learning_rate", 2, 2),
        ("warmup", "0.1", 0.1),
        ("warmup", "3", 3),
        ("is_on", "True", True),
        ("is_on", "no", False),
        ("limit", "12", 12),
        ("limit", 3.0, 3),
        ("limit", "none", None),
        ("names", "a, b,c", ["a", "b", "c"]),
        ("names", ["x"], ["x"]),
        ("extra", '{"a": 1}', {"a": 1}),
        ("resume", "true", True),
        ("resume", "out/checkpoint-3", "out/checkpoint-3"),
        ("mode", "SLOW", "slow"),
    ],
)
def test_value_is_parsed_as_its_declared_type(name, raw, value):
    options, problems = build_options(**{name: raw})
    assert problems == []
    assert getattr(options, name) == value
    assert type(getattr(options, name)) is type(value)


@pytest.mark.parametrize(
    ("name", "raw", "message"),
    [
        ("learning_rate", "three", "must be a number"),
        ("learning_rate", -1, "greater than 0"),
        ("limit", 0, "at least 1 row."),
        ("limit", 2.5, "an integer"),
        ("epochs", 0, "must be greater than 0 and finite."),
        ("epochs", "inf", "and finite. Received: inf."),
        ("extra", "{a: 1}", 'must be a mapping, as JSON: {"name": value}.'),
        ("extra", '{"a": 1, "a": 2}', 'has the duplicate key "a"'),
        ("is_on", "perhaps", "true or false"),
        ("mode", "fats", 'Did you mean "fast"?'),
        ("curve", "cosin", 'Did you mean "cosine"?'),
        ("learning_rate", None, "Received an empty value"),
        ("learning_rate", "nan", "must be a number"),
    ],
)
def test_wrong_value_is_rejected_with_expected_type(name, raw, message):
    _, problems = build_options(**{name: raw})
    assert len(problems) == 1
    assert problems[0].startswith(f'run.yaml, line 1: "{name}" ')
    assert message in problems[0]


def test_all_problems_are_reported_together_with_their_sources():
    _, problems = build_options(learning_rat=1, mode="x", limit=-4)
    assert len(problems) == 3
    assert problems[0] == 'Unknown option "learning_rat" in run.yaml, line 1. Did you mean "learning_rate"?'
    assert problems[2].startswith("run.yaml, line 3")


def test_options_inside_a_mapping_are_named():
    _, (problem,) = build_options(training={"learning_rate": 1e-4})
    assert 'Unknown option "training" in run.yaml, line 1.' in problem
    assert 'move "learning_rate" to the top level' in problem


def test_alias_sets_option_and_two_names_of_one_option_are_rejected():
    options, problems = build_options(lr=0.5)
    assert (options.learning_rate, problems) == (0.5, [])
    _, problems = build_options(lr=0.5, learning_rate=0.4)
    assert "names of the same option" in problems[0]


def test_union_rejects_groups_that_declare_the_same_field():
    @dataclass
    class Other:
        learning_rate: float = option(1.0, "Mine too.")

    with pytest.raises(ValueError, match=r'"learning_rate" is declared by test_options.Rate and by test_options.Other'):
        union("Clash", Rate, Other)


def test_union_rejects_alias_equal_to_another_option_name():
    """The alias would silently take the other option's values."""

    @dataclass
    class Other:
        peak: float = option(1.0, "Mine.", aliases=("warmup",))

    with pytest.raises(ValueError, match=r'"warmup" is declared by test_options.Rate and by test_options.Other'):
        union("Clash", Rate, Other)


def test_union_knows_declaring_group_and_non_default_options():
    assert specs(Both)["mode"].group is Shape
    assert list(specs(Both)) == [
        "learning_rate",
        "warmup",
        "mode",
        "curve",
        "names",
        "extra",
        "resume",
        "is_on",
        "limit",
        "epochs",
    ]
    assert changed_options(Both(limit=3, is_on=False)) == {"limit": 3}


def test_error_has_at_most_four_lines_per_problem():
    from burnish.config.options import raise_if

    _, problems = build(Both, {"limit": RawValue(0, "a"), "mode": RawValue("q", "b")})
    with pytest.raises(UserError) as raised:
        raise_if(problems)
    assert len(raised.value.problems) == 2
    assert all(len(str(problem).splitlines()) <= 4 for problem in raised.value.problems)


@pytest.mark.parametrize("text", ["x" * 256, "a/" + "é" * 128 + "/b", "a/" * 2048])
def test_text_too_long_for_a_path_is_rejected_by_every_option_with_paths(text: str) -> None:
    from burnish.run.plan.options import RunOptions

    for name in [name for name, spec in specs(RunOptions).items() if spec.names_place]:
        _, problems = build(RunOptions, {name: RawValue(text, "run.yaml")})
        assert [problem.option for problem in problems] == [name]
    assert build(RunOptions, {"dataset": RawValue(",".join(["x" * 250] * 30))})[1] == []
    assert build(RunOptions, {"peft_config": RawValue('{"target_modules": "' + "x" * 400 + '"}')})[1] == []


def test_path_and_risky_options_are_marked_in_their_declaration() -> None:
    from burnish.run.plan.options import RunOptions

    known = specs(RunOptions)
    places = {name for name, spec in known.items() if spec.names_place}
    assert {"dataset", "ref_model", "ref_model_adapters", "adapter_name_or_path", "template", "deepspeed"} <= places
    assert "run_name" not in places
    risky = {name for name, spec in known.items() if spec.risky}
    assert {"trust_remote_code", "attn_implementation", "llama_cpp", "report_to", "deepspeed", "infer_url"} <= risky
    assert "sdpa" in known["attn_implementation"].harmless
    assert "learning_rate" not in risky
