"""Third-party extensions: a member of each family, installed as docs/extending.md shows, is parsed, explained, trained
and resumed. The files are the code blocks of that page."""

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from burnish.config.registry import Registry
from small_run import WORDS, make_model

pytestmark = pytest.mark.run

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "extending.md"
FAMILIES = {
    "optimizer", "finetuning_type", "stage", "format", "tracker", "metric", "tool_format", "template", "reward_head",
}  # fmt: skip


def blocks(page, language):
    """Return file name -> text of the code blocks of a page that begin with a comment with a file name."""
    result = re.findall(rf"```{language}\n# (\S+)\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    assert result
    return dict(result)


def install(folder):
    """Install the package of the page as pip would: modules, and a dist-info folder with the entry points."""
    (folder / "my_burnish").mkdir()
    (folder / "my_burnish" / "__init__.py").touch()
    for name, text in blocks(PAGE, "python").items():
        (folder / name).write_text(text, encoding="utf-8")
    project = tomllib.loads(blocks(PAGE, "toml")["pyproject.toml"])["project"]
    info = folder / "my_burnish-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-burnish\nVersion: 1.0\n")
    sections = [
        f"[{group}]\n" + "".join(f"{name} = {module}\n" for name, module in points.items())
        for group, points in project["entry-points"].items()
    ]
    (info / "entry_points.txt").write_text("\n".join(sections))


def run(folder, commands):
    """Run commands in one interpreter that finds the package. Returns the exit status and output of each by name.

    ``move <from> <to>`` is also a command.
    """
    code = (
        "import contextlib, io, json, os, sys\nfrom burnish.cli import main\nsaid = {}\n"
        "for name, words in json.load(sys.stdin).items():\n"
        "    out = io.StringIO()\n"
        "    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):\n"
        "        status = os.renames(*words[1:]) if words[0] == 'move' else main(words)\n"
        "    said[name] = [status, out.getvalue()]\n"
        "print('SAID' + json.dumps(said))\n"
    )
    paths = [str(folder), str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "COLUMNS": "100",
                   "CUDA_VISIBLE_DEVICES": "", "BURNISH_CACHE": str(folder / "cache")}  # fmt: skip
    completed = subprocess.run(
        [sys.executable, "-c", code], input=json.dumps(commands), cwd=folder, env=environment, text=True,
        capture_output=True,
    )  # fmt: skip
    assert completed.returncode == 0, completed.stderr[-3000:]
    return json.loads(completed.stdout.split("SAID")[1])


TRAIN = ["train", "run.yaml", "gradient_accumulation_steps=1", "save_steps=6"]
COMMANDS = {
    "help": ["train", "--help"],
    "explain": ["explain", "--all", "run.yaml", "label_smoothing_factor=0.1"],
    "train": TRAIN,
    "move": ["move", "out/checkpoint-6", "again/checkpoint-6"],
    "continue": [*TRAIN, "output_dir=again"],
    "metric": ["explain", "run.yaml", "predict_metrics=length"],
    "change": [*TRAIN, "sign_decay=0.5", "num_train_epochs=3"],
    "explain rated": ["explain", "rated.yaml", "early_weight=3"],
    "train rated": ["train", "rated.yaml", *(SHORT := ["max_steps=6", "save_steps=3", "logging_steps=1"])],
    "move rated": ["move", "rated/checkpoint-3", "rated again/checkpoint-3"],
    "continue rated": ["train", "rated.yaml", *SHORT, "output_dir=rated again"],
    "explain reward": ["explain", "reward.yaml"],
    "train reward": ["train", "reward.yaml", *SHORT],
    "move reward": ["move", "reward/checkpoint-3", "reward again/checkpoint-3"],
    "continue reward": ["train", "reward.yaml", *SHORT, "output_dir=reward again"],
    "score": [
        "train",
        "reward.yaml",
        "adapter_name_or_path=reward",
        "reward_head=null",
        "do_train=false",
        "do_eval=true",
        "eval_dataset=pairs.jsonl",
        "output_dir=scored",
    ],
    "export reward": ["export", "reward.yaml", "adapter_name_or_path=reward", "export_dir=exported"],
    "pack": ["explain", "rated.yaml", "packing=true", "output_dir=other"],
    "explain tools": ["explain", "rated.yaml", "template=my_template.yaml", "tool_format=acme", "output_dir=other"],
    "no stars": ["explain", "rated.yaml", "dataset=trivia.jsonl"],
    "mistake": ["explain", "run.yaml", "weight_decay=0.1", "sign_decai=1", "early_weight=0"],
}
"""Help, explanation, training, resuming from a checkpoint, and four rejected commands, run in one process."""
REJECTED = {"change", "mistake", "no stars", "pack"}


@pytest.fixture(scope="module")
def command_outputs(tmp_path_factory):
    """The folder, and the output of each command by name."""
    folder = tmp_path_factory.mktemp("plugin")
    install(folder)
    make_model(folder / "model")
    rows = [{"question": f"Name: {WORDS[i % 10]}", "reply": " ".join([WORDS[i % 10]] * (1 + i % 3))} for i in range(16)]
    (folder / "trivia.jsonl").write_text("\n".join(map(json.dumps, rows)))
    tools = json.dumps([{"name": "paint", "description": "Paints.", "parameters": {}}])
    rated = [{**row, "stars": 1 + number % 5, "tools": tools} for number, row in enumerate(rows)]
    (folder / "ratings.jsonl").write_text("\n".join(map(json.dumps, rated)))
    pairs = [{"prompt": row["question"], "chosen": row["reply"], "rejected": "gray"} for row in rows]
    (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    for name, text in blocks(PAGE, "yaml").items():
        (folder / name).write_text(text, encoding="utf-8")
    result = run(folder, COMMANDS)
    for name, (status, text) in result.items():
        assert (status == 2) if name in REJECTED else not status, f"{name}: {text}"
    return folder, {name: text for name, (_, text) in result.items()}


def test_web_ui_shows_a_member_of_every_family():
    groups = tomllib.loads(blocks(PAGE, "toml")["pyproject.toml"])["project"]["entry-points"]
    assert {group.removeprefix("burnish.") for group in groups} == FAMILIES
    table = re.findall(r'\| `burnish\.([\w.]+)` \| `"burnish\.(\w+)"` \|', PAGE.read_text(encoding="utf-8"))
    for dotted, group in table:
        module, _, name = f"burnish.{dotted}".rpartition(".")
        registry = getattr(__import__(module, fromlist=[name]), name)
        assert isinstance(registry, Registry)
        assert registry.family.replace(" ", "_") == group
    assert {group for _, group in table} == FAMILIES


def test_command_line_knows_options_of_a_member(command_outputs):
    listed = command_outputs[1]["help"]
    for name in ("sign_decay", "norm_word", "early_weight", "csv_file"):
        assert f"--{name}" in listed
    text = " ".join(listed.split())
    assert "Sign descent --sign_decay Decay rate of the gradient average" in text
    for name in ("sign", "norms", "early", "qa", "length"):
        assert re.search(rf"one of [^;)]*\b{name}\b", text), name


def test_explain_prints_options_of_a_member_and_their_source(command_outputs):
    text = " ".join(command_outputs[1]["explain"].split())
    for part in ("sign_decay 0.8 (default 0.9) (run.yaml, line", "norm_word layernorm (default norm)",
                 "early_weight 3 (default 2)", "csv_file losses.csv (default log.csv)", "CsvTracker",
                 "norms. Trains the normalization weights and freezes all others.",
                 "template my_template"):  # fmt: skip
        assert part in text, f"{part}\n{text}"
    assert "question Name: red" in text
    assert "⟦red<|im_end|>" in text
    assert "predict_metrics length" in " ".join(command_outputs[1]["metric"].split())


def test_trained_parameters_are_selected_by_the_adapter(command_outputs):
    folder, _ = command_outputs
    before, after = (load_file(folder / name / "model.safetensors") for name in ("model", "out"))
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if "layernorm" in name}
    largest_change = max((after[name] - before[name]).abs().max().item() for name in changed)
    assert largest_change <= 16 * 1e-3 + 1e-6  # sign descent: sixteen steps of at most the learning rate


def test_card_of_full_weights_loads_them_as_a_model(command_outputs):
    card = (command_outputs[0] / "out" / "README.md").read_text()
    assert "library_name: transformers" in card
    assert "AutoPeftModel" not in card


def test_saved_tokenizer_renders_the_template_file(command_outputs):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(command_outputs[0] / "out")
    chat = [{"role": "user", "content": "Hi"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>question\nHi<|im_end|>\n<|im_start|>reply\n"


def test_checkpoint_restores_every_member(command_outputs):
    folder, texts = command_outputs
    assert "step 6 of 16" in texts["continue"]
    uninterrupted, resumed = (load_file(folder / name / "model.safetensors") for name in ("out", "again"))
    assert all(torch.equal(uninterrupted[name], resumed[name]) for name in uninterrupted)
    first, second = ((folder / name / "losses.csv").read_text().splitlines() for name in ("out", "again"))
    assert first[3:] == second  # the tracker's state was restored, and the losses are equal


def test_checkpoint_reports_changed_member_options(command_outputs):
    assert "sign_decay changed from 0.8 to 0.5" in command_outputs[1]["change"]


def test_check_of_a_member_is_called_with_all_others(command_outputs):
    problems = command_outputs[1]["mistake"]
    assert "optim sign has no weight decay." in problems
    assert 'Did you mean "sign_decay"?' in problems
    assert '"early_weight" must be greater than 0' in problems
    assert "Traceback" not in problems


def test_objective_reads_custom_records_through_rows_and_batches(command_outputs):
    folder, texts = command_outputs
    explained = " ".join(texts["explain rated"].split())
    assert "stage rated" in explained
    assert "template acme" in explained
    assert 'Tools: - {"name": "paint"' in explained
    logs = json.loads((folder / "rated" / "trainer_state.json").read_text())["log_history"]
    assert any(1 <= log.get("stars", 0) <= 5 for log in logs), logs
    assert 'stage: rated requires the column "stars"' in texts["no stars"]
    assert "tool_format acme" in " ".join(texts["explain tools"].split())
    assert 'Tools: - {"name": "paint"' in " ".join(texts["explain tools"].split())


@pytest.mark.parametrize(
    ("run_name", "stem"), [("rated", "adapter_model"), ("reward", "adapter_model"), ("reward", "value_head")]
)
def test_run_with_package_members_resumes_bitwise_equal(command_outputs, run_name, stem):
    folder, texts = command_outputs
    assert "step 3 of 6" in texts[f"continue {run_name}"]
    uninterrupted, resumed = (
        load_file(folder / name / f"{stem}.safetensors") for name in (run_name, f"{run_name} again")
    )
    assert uninterrupted.keys() == resumed.keys()
    assert all(torch.equal(uninterrupted[name], resumed[name]) for name in uninterrupted)
    assert all(value.any() for name, value in uninterrupted.items() if "lora_B" in name)  # initialized with zeros


def test_reward_head_of_a_package_is_explained_and_saved_under_its_name(command_outputs):
    folder, texts = command_outputs
    assert "value_head.safetensors (mlp)" in " ".join(texts["score"].split())
    assert "reward_head mlp" in " ".join(texts["explain reward"].split())
    with safe_open(folder / "reward" / "value_head.safetensors", "pt") as file:
        assert file.metadata()["reward_head"] == "mlp"
        assert sorted(file.keys()) == [f"v_head.layers.{at}.{name}" for at in (0, 2) for name in ("bias", "weight")]


def test_run_and_card_name_the_package_and_its_version(command_outputs):
    folder = command_outputs[0]
    assert "# Requires: my-burnish 1.0\n" in (folder / "out" / "run.yaml").read_text()
    assert re.search(r"Made with burnish \S+ and my-burnish 1\.0\.", (folder / "out" / "README.md").read_text())


def test_exported_reward_model_keeps_the_head(command_outputs):
    folder = command_outputs[0]
    trained, exported = (load_file(folder / name / "value_head.safetensors") for name in ("reward", "exported"))
    assert trained.keys() == exported.keys()
    assert all(torch.equal(trained[name], exported[name]) for name in trained)
    with safe_open(folder / "exported" / "value_head.safetensors", "pt") as file:
        assert file.metadata()["reward_head"] == "mlp"


def test_option_of_another_stage_gives_a_note(command_outputs):
    assert '"early_weight" has no effect: stage is rated.' in " ".join(command_outputs[1]["explain rated"].split())
    assert "has no effect" not in command_outputs[1]["explain"]


@pytest.mark.slow
def test_arguments_of_a_script_have_options_of_members(command_outputs):
    folder = command_outputs[0]
    code = "from burnish import SFTConfig; print(SFTConfig('out', sign_decay=0.5, csv_file='mine.csv').csv_file)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT / "src")])}
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, env=environment, text=True, capture_output=True)
    assert done.stdout == "mine.csv\n", done.stderr[-2000:]


def test_rows_with_custom_columns_are_not_packed(command_outputs):
    assert "The rows of stage: rated cannot be packed, because a pack has no stars." in command_outputs[1]["pack"]
