"""Documentation is accurate: names and links exist, commands are known, code runs, tables are up to date."""

import ast
import importlib
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from burnish.config.options import convert, specs
from burnish.run.plan.plan import RunOptions
from small_run import make_model, records

pytestmark = pytest.mark.run

ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", *ROOT.glob("docs/*.md")])
_DOTTED = re.compile(r"`(burnish(?:\.\w+)+)`")


def resolve(name):
    """Return the object of a dotted name: a module, or an attribute of one."""
    parts = name.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            result = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for part in parts[cut:]:
            result = getattr(result, part)
        return result
    raise ModuleNotFoundError(name)


def load_script(file):
    """Import a script as a module."""
    spec = importlib.util.spec_from_file_location(file.stem, file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_name_in_documentation_exists(page):
    for name in _DOTTED.findall(page.read_text(encoding="utf-8")):
        assert resolve(name) is not None


def test_from_file_to_weights_page_names_over_20_functions():
    names = _DOTTED.findall((ROOT / "docs" / "from-file-to-weights.md").read_text(encoding="utf-8"))
    assert len(set(names)) > 20


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_file_link_resolves(page):
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", [page for page in PAGES if "parity" not in page.name], ids=lambda page: page.name)
def test_every_inline_value_of_an_option_is_accepted(page):
    """``name: value`` and ``name=value`` in the text, except values that the text says are rejected."""
    known, text = specs(RunOptions), page.read_text(encoding="utf-8")
    for name, value in re.findall(r"`(?:--)?([a-z]\w*)(?:=|: )(\w[\w.,/+-]*)`(?! raises)", text):
        if name in known:
            convert(known[name], value if "," in value else yaml.safe_load(value))


def test_options_page_is_up_to_date():
    """To update: python scripts/make_options_page.py"""
    make_options_page = load_script(ROOT / "scripts" / "make_options_page.py")
    assert (ROOT / "docs" / "options.md").read_text(encoding="utf-8") == make_options_page.page()


def test_map_is_up_to_date():
    """To update: python scripts/make_map.py"""
    assert (ROOT / "docs" / "map.md").read_text(encoding="utf-8") == load_script(
        ROOT / "scripts" / "make_map.py"
    ).page()


def test_table_of_uncalled_methods_is_up_to_date():
    """To update: make parity WHAT=peer_methods"""
    methods = load_script(ROOT / "scripts" / "peer_methods.py")
    text = (ROOT / "docs" / "parity.md").read_text(encoding="utf-8")
    assert f"{methods.BEGIN}\n{methods.table()}\n{methods.END}" in text
    explained = [name for names in methods.REASONS.values() for name in names]
    assert {*explained} == {name for names in methods.uncalled().values() for name in names}


def test_every_option_of_other_tools_is_on_the_options_page():
    text = (ROOT / "docs" / "options.md").read_text(encoding="utf-8").split("## Keys of other tools")[1]
    peers = json.loads((ROOT / "scripts" / "peer_options.json").read_text(encoding="utf-8"))
    assert not [key for keys in peers.values() for key in keys if f"`{key}`" not in text]


def test_site_builds_with_all_links_checked(tmp_path):
    probe = [sys.executable, "-c", "import mkdocs, material.extensions"]  # the interpreter that builds the site
    if subprocess.run(probe, cwd=ROOT, capture_output=True, check=False).returncode:
        pytest.skip('mkdocs-material is not installed: pip install -e ".[docs]"')
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    completed = subprocess.run(
        build, cwd=ROOT, text=True, capture_output=True, check=False, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    )
    assert completed.returncode == 0, completed.stdout + completed.stderr
    assert (tmp_path / "site" / "decisions").is_dir()


# --- code blocks ------------------------------------------------------------------------------------------------------

EVERY_PAGE = sorted([ROOT / "README.md", ROOT / "CHANGELOG.md", *ROOT.glob("docs/**/*.md")])
RUN_BY = {"README.md": "test_docs.py", "migrating.md": "test_trainer_examples.py", "extending.md": "test_extending.py",
          "preferences.md": "test_trl_trainers.py", "rollouts.md": "test_rollout_trainers.py"}  # fmt: skip
"""The test file that runs the Python blocks of a page."""
RUN_COMPLETELY = {"index.md", "data.md", "methods.md", "troubleshooting.md", "recipes.md"}
"""Pages whose files and commands are all run by test_docs_run.py and test_recipes.py."""
PROGRAMS = {"burnish", "make", "pip", "python", ".", "torchrun"}


def blocks(page, *languages):
    """Return (language, text) of the code blocks of a page."""
    result = re.findall(r"^ *```(\w*)[^\n]*\n(.*?)^ *```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    return [(language, text) for language, text in result if not languages or language in languages]


def commands(page):
    """Return the commands in the bash blocks and in the sentences of a page, each as a list of words."""
    lines = [line for _, text in blocks(page, "bash") for line in text.splitlines()]
    inline = re.findall(r"`((?:burnish |make |python scripts/)[^`\n]+)`", page.read_text(encoding="utf-8"))
    return [words for line in [*lines, *inline] if (words := shlex.split(line, comments=True))]


def make_readme_folder(folder):
    """Write the model and the data set that the README uses."""
    make_model(folder / "models" / "my-model")
    (folder / "my_data.jsonl").write_text("\n".join(map(json.dumps, records(64))))
    return folder


@pytest.mark.parametrize("page", EVERY_PAGE, ids=lambda page: page.name)
def test_every_code_block_names_its_language_and_parses(page):
    for language, text in blocks(page):
        assert language in {"bash", "python", "yaml", "toml", "json", "text"}, text
        if language == "json":
            assert json.loads(text)
        if language == "python":
            ast.parse(text)
            assert page.name in RUN_BY, f"no test runs the Python blocks of {page.name}"
        if language == "yaml":
            assert isinstance(yaml.safe_load(text), dict)
        if language == "toml":
            assert tomllib.loads(text)


# The map quotes docstrings, which may name a command in part.
@pytest.mark.parametrize(
    "page", [p for p in EVERY_PAGE if p.name != "map.md" and p.name not in RUN_COMPLETELY], ids=lambda page: page.name
)
def test_every_documented_command_exists(page, tmp_path, monkeypatch):
    from burnish.cli import COMMANDS
    from burnish.run.plan.config_files import merge, read_arguments
    from burnish.run.plan.plan import aliases, plan

    monkeypatch.chdir(tmp_path)
    for _, text in blocks(page, "yaml"):
        (tmp_path / text.split("\n")[0].removeprefix("#").split(":")[0].strip()).write_text(text, encoding="utf-8")
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    for program, *argv in commands(page):
        assert program in PROGRAMS, f"{page.name}: {program}"
        if program == "make":
            assert argv[0] in targets
        if program == "python" and argv[0].startswith("scripts/"):
            assert (ROOT / argv[0]).is_file()
        if program == "burnish" and not argv[0].startswith("-"):
            assert argv[0] in COMMANDS, f"{page.name}: burnish {argv[0]}"
            if "run.yaml" in argv and (tmp_path / "run.yaml").exists() and page.name != "extending.md":
                plan(merge(*read_arguments(argv[1:]), aliases()))


def test_every_documented_configuration_can_be_planned(tmp_path):
    from burnish.data.chat.table import read_row
    from burnish.run.plan.config_files import merge, read_arguments
    from burnish.run.plan.plan import aliases, plan

    planned = 0
    for page in (page for page in EVERY_PAGE if page.name not in RUN_COMPLETELY):
        for _, text in blocks(page, "yaml"):
            if "model_name_or_path" not in text:
                assert read_row("mine", yaml.safe_load(text)).user
            elif page.name != "extending.md":  # it uses a package that is installed only in its test
                file = tmp_path / "run.yaml"
                file.write_text(text, encoding="utf-8")
                plan(merge(*read_arguments([str(file)]), aliases()))
                planned += 1
    assert planned


def test_readme_commands_run(tmp_path):
    """All commands of the README run with its configuration, followed by its Python blocks."""
    folder = make_readme_folder(tmp_path)
    page = ROOT / "README.md"
    (folder / "run.yaml").write_text(blocks(page, "yaml")[0][1], encoding="utf-8")
    requested = [argv[1:] for argv in commands(page) if argv[0] == "burnish" and "run.yaml" in argv]
    code = "import json, sys\nfrom burnish.cli import main\nfor words in json.load(sys.stdin): assert not main(words)\n"
    python = "\n".join(text for _, text in blocks(page, "python"))
    environment = {
        **os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "BURNISH_CACHE": str(folder / "cache"),
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }  # fmt: skip
    completed = subprocess.run(
        [sys.executable, "-c", code + python], cwd=folder, text=True, capture_output=True, env=environment,
        input=json.dumps(requested),
    )  # fmt: skip
    assert completed.returncode == 0, completed.stdout[-2000:] + completed.stderr[-3000:]
    for output in ("saves/first/adapter_model.safetensors", "saves/second/adapter_model.safetensors",
                 "models/first/model.safetensors", "saves/first/training_loss.png", "saves/first/README.md",
                 "saves/first/trainer_log.jsonl", "saves/counting/model.safetensors"):  # fmt: skip
        assert (folder / output).is_file(), output


def test_features_missing_in_the_readme_are_rejected_by_name():
    from burnish.cli import COMMANDS, main
    from burnish.config.errors import UserError
    from burnish.config.options import RawValue
    from burnish.run.plan.plan import plan

    table = [row.split(" | ") for row in (ROOT / "README.md").read_text(encoding="utf-8").splitlines() if " | " in row]
    rows = {row[0].removeprefix("| "): [re.findall(r"`(\w+)`", cell) for cell in row[1:]] for row in table}
    existing, missing = rows["commands"]
    assert set(existing) <= set(COMMANDS)
    assert all(main([name]) == 2 for name in missing)
    existing, missing = rows["stages"]
    for stage in missing:
        with pytest.raises(UserError, match=f'"stage": {stage}'):
            plan({"stage": RawValue(stage)})


def missing_names(file: Path) -> list[str]:
    """Return the nonexistent names of burnish that a script imports or reads from an imported module."""
    tree, missing, modules = ast.parse(file.read_text(encoding="utf-8")), [], {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "burnish":
            module = importlib.import_module(node.module)
            for name in node.names:
                full = f"{node.module}.{name.name}"
                if not hasattr(module, name.name) and importlib.util.find_spec(full) is None:
                    missing.append(full)
                elif isinstance(getattr(module, name.name, None), ModuleType):
                    modules[name.asname or name.name] = getattr(module, name.name)
    used = [(node.value.id, node.attr) for node in ast.walk(tree)
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)]  # fmt: skip
    return missing + [f"{name}.{attr}" for name, attr in used if name in modules and not hasattr(modules[name], attr)]


@pytest.mark.parametrize("folder", ["bench", "scripts", "examples"])
def test_scripts_use_existing_names_of_burnish(folder):
    files = list((ROOT / folder).rglob("*.py"))
    assert files
    assert {file.name: names for file in files if (names := missing_names(file))} == {}


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("parity*.md")), ids=lambda path: path.stem)
def test_tables_of_parity_are_generated_by_scripts(page):
    text = re.sub(
        r"<!-- [\w ]+: made by .*?<!-- end of [\w ]+ -->", "", page.read_text(encoding="utf-8"), flags=re.DOTALL
    )
    assert not re.search(r"^\|", text, re.MULTILINE)
