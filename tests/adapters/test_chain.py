"""The folder of an adapter records the adapters merged before its training, and how the base model was changed."""

import json
from pathlib import Path

import pytest

from burnish.adapters.chain import MERGED_NAME, incomplete_chain_notes, previously_merged
from burnish.cli import main
from burnish.config.errors import UserError
from representative import representative_slow
from run_outputs import history
from small_run import as_arguments, make_workspace

pytestmark = pytest.mark.run


def train(folder, **options):
    defaults = {"finetuning_type": "lora", "max_steps": 6, "learning_rate": 3e-2, "val_size": 0.2,
                "eval_strategy": "epoch", "save_strategy": "no"}  # fmt: skip
    workspace = make_workspace(folder.parent, **{**defaults, **options})
    assert main(["train", *as_arguments({**workspace, "output_dir": str(folder)})]) == 0
    return [entry["eval_loss"] for entry in history(folder) if "eval_loss" in entry][-1]


def loss_of_command(folder, *argv):
    """Return the ``eval_loss`` that ``burnish eval`` computes for the folder of a run."""
    save_dir = folder.parent / f"{folder.name}-evaluation"
    assert main(["eval", str(folder), f"save_dir={save_dir}", "infer_dtype=float32", *argv]) == 0
    (results,) = save_dir.rglob("eval_results.json")
    return next(value for name, value in json.loads(results.read_text()).items() if name.endswith("loss"))


@pytest.mark.slow
@pytest.mark.parametrize("again", representative_slow([{"create_new_adapter": True}, {"chain": 2}], 1), ids=str)
def test_commands_load_the_adapters_that_were_merged_before_training(tmp_path, capsys, again):
    first, second = tmp_path / "first", tmp_path / "second"
    train(first)
    chain = ",".join([str(first)] * again.get("chain", 1))
    new = {name: value for name, value in again.items() if name != "chain"}
    eval_loss = train(second, adapter_name_or_path=chain, seed=7, **new)
    assert previously_merged(second) == [str(first)]
    assert loss_of_command(second) == pytest.approx(eval_loss, rel=1e-5)
    exported = tmp_path / "exported"
    assert main(["export", str(second), f"export_dir={exported}"]) == 0
    assert not (exported / MERGED_NAME).exists()
    assert loss_of_command(second, f"model_name_or_path={exported}", "adapter_name_or_path=[]") == pytest.approx(
        eval_loss, rel=1e-4
    )
    assert 'from_pretrained(base, "first").merge_and_unload()' in (second / "README.md").read_text()
    capsys.readouterr()
    assert loss_of_command(second, f"adapter_name_or_path={second}") != pytest.approx(eval_loss, rel=1e-5)
    assert f"{second} was trained on the base model merged with {first}" in "".join(capsys.readouterr())


def test_adapter_of_a_chain_is_reported_without_the_others(tmp_path):
    folder = tmp_path / "b"
    folder.mkdir()
    assert incomplete_chain_notes([folder]) == []
    (folder / MERGED_NAME).write_text(json.dumps({"merged_adapters": [str(tmp_path / "a")]}))
    (note,) = incomplete_chain_notes([folder])
    assert note.endswith(f"set adapter_name_or_path: {tmp_path / 'a'},{folder}")
    assert incomplete_chain_notes([tmp_path / "a", folder]) == []
    assert incomplete_chain_notes([folder / ".." / "a", folder]) == []
    (tmp_path / "link").symlink_to(tmp_path / "a")
    assert incomplete_chain_notes([tmp_path / "link", folder]) == []
    for content in ('{"merged_adapters": 5}', "[]", '{"merged_adapters": [5]}'):
        (folder / MERGED_NAME).write_text(content)
        with pytest.raises(UserError, match=MERGED_NAME):
            previously_merged(folder)


def test_missing_folder_of_a_merged_adapter_is_reported_with_its_file(tmp_path, capsys):
    first, second = tmp_path / "first", tmp_path / "second"
    train(first)
    train(second, adapter_name_or_path=str(first / ".." / "first"), create_new_adapter=True)
    assert previously_merged(second) == [str(first)]
    first.rename(tmp_path / "moved")
    capsys.readouterr()
    assert main(["export", str(second), f"export_dir={tmp_path / 'exported'}"]) == 2
    message = capsys.readouterr().err
    assert str(first) in message
    assert MERGED_NAME in message


@pytest.mark.slow
def test_commands_scale_positions_as_in_training(tmp_path):
    eval_loss = train(tmp_path / "scaled", rope_scaling="linear", cutoff_len=1024)
    assert loss_of_command(tmp_path / "scaled") == pytest.approx(eval_loss, rel=1e-6)
    assert main(["export", str(tmp_path / "scaled"), f"export_dir={tmp_path / 'exported'}"]) == 0
    config = json.loads(Path(tmp_path / "exported" / "config.json").read_text())
    assert config["max_position_embeddings"] >= 1024


def test_length_that_would_change_the_scale_of_positions_is_an_error(tmp_path, capsys):
    train(tmp_path / "scaled", rope_scaling="linear", cutoff_len=1024)
    assert main(["eval", str(tmp_path / "scaled"), "cutoff_len=128"]) == 2
    assert "trained with rope_scaling for cutoff_len 1024" in capsys.readouterr().err
