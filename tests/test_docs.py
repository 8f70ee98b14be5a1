"""What the documentation says is true: the names are there, the commands are known."""

import importlib
import importlib.util
import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", *ROOT.glob("docs/*.md")])
_DOTTED = re.compile(r"`(burnish(?:\.\w+)+)`")


def resolve(name):
    """The object of a dotted name: a module, or an attribute of one."""
    parts = name.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for part in parts[cut:]:
            found = getattr(found, part)
        return found
    raise ModuleNotFoundError(name)


def loaded(file):
    """A script as a module."""
    spec = importlib.util.spec_from_file_location(file.stem, file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_name_on_a_page_is_a_real_one(page):
    for name in _DOTTED.findall(page.read_text(encoding="utf-8")):
        assert resolve(name) is not None


def test_the_walk_from_file_to_weights_names_each_of_its_stations():
    names = _DOTTED.findall((ROOT / "docs" / "from-file-to-weights.md").read_text(encoding="utf-8"))
    assert len(set(names)) > 20


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_to_a_file_leads_somewhere(page):
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), target


def test_every_command_in_the_readme_is_known():
    from burnish.cli import COMMANDS

    for command in re.findall(r"^burnish (\w+) run", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE):
        assert command in COMMANDS


def test_the_options_in_the_readme_are_options():
    import yaml

    from burnish.app.config import read_arguments
    from burnish.app.plan import plan

    block = re.search(r"```yaml\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)[1]
    _, given = read_arguments([f"{k}={v}" for k, v in yaml.safe_load(block).items()])
    assert plan(given).options.finetuning_type == "lora"


def test_the_page_of_options_is_what_the_declarations_say():
    """Made again with: python scripts/make_options_page.py"""
    make_options_page = loaded(ROOT / "scripts" / "make_options_page.py")
    assert (ROOT / "docs" / "options.md").read_text(encoding="utf-8") == make_options_page.page()


def test_every_key_of_the_other_tools_stands_on_the_page_of_options():
    text = (ROOT / "docs" / "options.md").read_text(encoding="utf-8").split("## Keys of other tools")[1]
    peers = json.loads((ROOT / "scripts" / "peer_options.json").read_text(encoding="utf-8"))
    assert not [key for keys in peers.values() for key in keys if f"`{key}`" not in text]
