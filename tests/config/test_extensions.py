"""Packages that extend burnish: errors of their code name the package, the file and the line."""

import importlib

import pytest

from burnish.config.errors import UserError
from burnish.config.extensions import deepest_location, extensions, packages_of
from burnish.config.options import union
from burnish.config.registry import Registry
from burnish.explain.env import environment
from burnish.report.metadata import given_yaml

FRUIT = Registry("fruit")
FRUIT.register("apple")(1)


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Function that installs a package of one module."""
    monkeypatch.syspath_prepend(tmp_path)

    def installed(module, text, entry_points="[burnish.fruit]\npear = {module}\n"):
        info = tmp_path / f"{module}-2.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 2.0\n")
        (info / "entry_points.txt").write_text(entry_points.format(module=module))
        if text is not None:
            (tmp_path / f"{module}.py").write_text(text)
        return tmp_path / f"{module}.py"

    return installed


@pytest.mark.parametrize(
    ("module", "text", "expected"),
    [
        ("absent_grower", None, ["No module named 'absent_grower'", "Update or uninstall absent_grower"]),
        ("needy_grower", "\nimport no_such_library", ["line 2)", "Install no_such_library, or update"]),
        ("failing_grower", "raise RuntimeError('x')", ["RuntimeError: x (", "failing_grower.py, line 1)"]),
        ("wrong_grower", "def f(:", ["invalid syntax (wrong_grower.py, line 1)"]),
        ("second_grower", "from test_extensions import FRUIT\nFRUIT.register('apple')(1)",
         ["fruit 'apple' is already registered by test_extensions (", "second_grower.py, line 2)"]),
        ("plain_grower", "from test_extensions import FRUIT\nFRUIT.register('fig', options=int)(1)",
         ["the options of fruit 'fig' must be a dataclass", "plain_grower.py, line 2)"]),
    ],
)  # fmt: skip
def test_package_that_cannot_be_loaded_is_named(module, text, expected, install):
    install(module, text)
    with pytest.raises(UserError) as raised:
        Registry("fruit").names()
    for part in (f"{module}: the entry point pear = {module} cannot be loaded: ", *expected):
        assert part in str(raised.value)


def test_error_in_the_code_of_a_package_names_its_file_and_line(install):
    path = install("ripe_grower", "def grow(size):\n    return 1 / size\n")
    grow = importlib.import_module("ripe_grower").grow
    with pytest.raises(ZeroDivisionError) as raised:
        grow(0)
    assert deepest_location(raised.value) == f"{path}, line 2, grow()"


def test_error_outside_of_burnish_and_its_extensions_has_no_location():
    assert deepest_location(ZeroDivisionError()) == ""


def test_option_that_a_package_declares_again_names_the_package(install):
    text = (
        "from dataclasses import dataclass\nfrom burnish.config.options import option\n"
        "@dataclass\nclass Options:\n    size: int = option(1, 'Size.')\n"
    )
    install("sized_grower", text)
    group = importlib.import_module("sized_grower").Options
    with pytest.raises(UserError) as raised:
        union("Options", group, type("Other", (group,), {"__module__": "burnish.other"}))
    assert 'sized_grower 2.0: Option "size" is declared by sized_grower.Options and by burnish.other.Other' in str(
        raised.value
    )


def test_env_lists_packages_with_their_entry_points(install):
    install(
        "listed_grower", "", "[burnish.fruit]\npear = {module}\nfig = {module}\n[burnish.reward_head]\nx = {module}\n"
    )
    assert environment()["listed_grower"] == "2.0, fruit pear, fig; reward head x"
    assert packages_of(["listed_grower.part", "json"]) == ["listed_grower 2.0"]
    assert "listed_grower" in [each.name for each in extensions()]


def test_run_yaml_lists_required_packages():
    assert given_yaml({"seed": 1}, {}, packages=["a 1.0", "b 2.0"]).splitlines()[1:] == [
        "# Requires: a 1.0, b 2.0",
        "seed: 1",
    ]
