"""``push_to_hub`` of ``burnish train``, with a local server that implements huggingface_hub's protocol."""

import os
import shutil

import huggingface_hub
import pytest
from transformers import AutoModelForCausalLM

from burnish.checkpoint.checkpoint import Checkpoints
from burnish.cli import main
from burnish.config.options import RawValue as Raw
from burnish.config.options import build
from burnish.report.options import check_hub, hub_notes
from burnish.run.hub import Hub, _linked_copy
from burnish.run.plan.options import RunOptions
from push_hub import running_hub, wait_until
from small_run import as_arguments, make_workspace

pytestmark = pytest.mark.run


@pytest.fixture
def hub(monkeypatch):
    with running_hub(monkeypatch) as hub:
        yield hub


def options_in(folder, **changes):
    options = make_workspace(folder, max_steps=4, save_strategy="steps", save_steps=2, **changes)
    return {"push_to_hub": True, "hub_model_id": "us/tiny", "hub_token": "hf_secret", **options}


def test_trained_model_is_uploaded_with_its_card(hub, tmp_path, capsys):
    options = options_in(tmp_path, hub_private_repo=True)
    assert main(["train", *as_arguments(options)]) == 0
    assert hub.made == {"us/tiny": "private"}
    assert hub.tokens == {"Bearer hf_secret"}
    message, files = hub.commits[-1]
    assert message == "End of training"
    assert {"README.md", "model.safetensors", "tokenizer.json", "trainer_log.jsonl"} <= files.keys()
    assert not {"launch.json", "outcome.json", "events.jsonl", "run.yaml", "run.log"} & files.keys()
    assert not any("checkpoint" in name or name.startswith(".") for name in files)
    assert not any(b"hf_secret" in content for _, each in hub.commits for content in each.values())
    (tmp_path / "fetched").mkdir()
    for name, content in files.items():
        (tmp_path / "fetched" / name.replace("/", "_")).write_bytes(content)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "fetched")
    trained = AutoModelForCausalLM.from_pretrained(options["output_dir"])
    for name, parameter in trained.named_parameters():
        assert loaded.get_parameter(name).equal(parameter), name
    assert "Uploaded to us/tiny." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("strategy", "folders"),
    [
        ("end", None), ("every_save", {""}), ("checkpoint", {"", "last-checkpoint"}),
        ("all_checkpoints", {"", "checkpoint-2", "checkpoint-4"}),
    ],
)  # fmt: skip
def test_hub_strategy_decides_what_is_uploaded_during_training(hub, tmp_path, strategy, folders):
    options = options_in(tmp_path, hub_strategy=strategy, hub_always_push=True, on_spike="rollback")
    assert main(["train", *as_arguments(options)]) == 0
    during = [files for message, files in hub.commits if message.startswith("Training in progress, step ")]
    uploaded_folders = {name.rpartition("/")[0] for files in during for name in files}
    assert uploaded_folders == (folders or set())
    if folders:
        root = [files for files in during if "model.safetensors" in files]
        assert root
        assert not any(name.startswith(("optimizer", "spikes", "meter")) for files in root for name in files)
    if strategy == "checkpoint":
        assert any(name.startswith("last-checkpoint/optimizer") for files in during for name in files)


@pytest.mark.parametrize("can_link", [True, False])
def test_removed_checkpoint_is_uploaded_completely(hub, tmp_path, monkeypatch, capsys, can_link):
    """save_total_limit removes it before its upload has read the files."""
    options = options_in(tmp_path, hub_strategy="all_checkpoints", save_total_limit=1)
    first, removed = tmp_path / "out" / "checkpoint-2", []
    hub.before_upload = lambda: removed.append(wait_until(lambda: not first.exists()))
    if not can_link:
        monkeypatch.setattr(os, "link", _fail)
    assert main(["train", *as_arguments(options)]) == 0
    assert all(removed)
    assert "could not be uploaded" not in capsys.readouterr().err
    files = [files for message, files in hub.commits if message == "Training in progress, step 2"]
    assert [any(name.startswith("checkpoint-2/") for name in each) for each in files] == [False, True]
    assert {"checkpoint-2/model.safetensors", "checkpoint-2/manifest.json"} <= files[1].keys()
    assert list((tmp_path / "out").glob(".*incomplete*")) == []


def test_copy_that_cannot_be_removed_does_not_fail_the_upload(tmp_path, monkeypatch):
    def fails(path):
        raise OSError("the folder is in use")

    monkeypatch.setattr("burnish.run.hub.remove", fails)
    uploads = Hub()
    uploads._copies.add(tmp_path)
    uploads._remove_copy(tmp_path)
    assert not uploads._copies


def test_copy_of_a_killed_upload_is_removed_and_no_checkpoint(hub, tmp_path):
    options = options_in(tmp_path, hub_strategy="end")
    assert main(["train", *as_arguments({**options, "max_steps": 2})]) == 0
    copy = _linked_copy(tmp_path / "out" / "checkpoint-2")
    assert {path.name for path in copy.iterdir()} == {path.name for path in (tmp_path / "out/checkpoint-2").iterdir()}
    assert [path.name for path in Checkpoints(tmp_path / "out").all()] == ["checkpoint-2"]
    assert main(["train", *as_arguments(options)]) == 0
    assert not copy.exists()


def test_checkpoint_that_cannot_be_copied_does_not_stop_training(hub, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(shutil, "copytree", _fail)
    assert main(["train", *as_arguments(options_in(tmp_path))]) == 0
    assert "A checkpoint could not be uploaded to us/tiny: not supported" in capsys.readouterr().err
    assert [message for message, _ in hub.commits] == ["End of training"]
    assert list((tmp_path / "out").glob(".*incomplete*")) == []


def _fail(*arguments, **named):
    raise OSError("not supported")


def test_model_is_uploaded_to_the_branch_in_hub_revision(hub, tmp_path):
    options = options_in(tmp_path, hub_strategy="end", hub_revision="trained")
    assert main(["train", *as_arguments(options)]) == 0
    assert hub.branches == ["trained"]


def test_failed_upload_keeps_the_model_and_the_same_command_uploads_it(hub, tmp_path, monkeypatch, capsys):
    options = options_in(tmp_path, hub_strategy="end")

    def fail(*arguments, **named):
        raise OSError("no route to host")

    with monkeypatch.context() as patched:
        patched.setattr(huggingface_hub.HfApi, "upload_folder", fail)
        assert main(["train", *as_arguments(options)]) == 1
    shown = capsys.readouterr().err
    assert "was written but could not be uploaded to us/tiny: no route to host." in shown
    assert "run the same command again; it only uploads the model" in shown
    assert hub.commits == []
    before = (tmp_path / "out/model.safetensors").read_bytes() if (tmp_path / "out").is_dir() else None
    assert main(["train", *as_arguments(options)]) == 0
    (commit,) = hub.commits
    assert commit[0] == "End of training"
    assert before in (None, commit[1]["model.safetensors"])


def test_failed_upload_of_a_checkpoint_does_not_stop_training(hub, tmp_path, monkeypatch, capsys):
    upload = huggingface_hub.HfApi.upload_folder

    def fail(self, *arguments, **named):
        if not named["run_as_future"]:
            return upload(self, *arguments, **named)

        def raising():
            raise OSError("no route to host")

        return self.run_as_future(raising)

    monkeypatch.setattr(huggingface_hub.HfApi, "upload_folder", fail)
    assert main(["train", *as_arguments(options_in(tmp_path))]) == 0
    assert "A checkpoint could not be uploaded to us/tiny: no route to host" in capsys.readouterr().err
    assert [message for message, _ in hub.commits] == ["End of training"]


def test_repository_that_cannot_be_created_stops_the_run_before_it_trains(hub, tmp_path, monkeypatch, capsys):
    def fail(*arguments, **named):
        raise OSError("no route to host")

    monkeypatch.setattr(huggingface_hub, "create_repo", fail)
    options = options_in(tmp_path)
    assert main(["train", *as_arguments(options)]) == 2
    shown = capsys.readouterr().err
    assert "The repository us/tiny cannot be created on the Hub: no route to host" in shown
    assert "Set hub_token to a token with write access" in shown
    assert not (tmp_path / "out/model.safetensors").exists()


def test_invalid_name_and_disabled_hub_are_reported_by_the_plan(monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    options_of_run = {"output_dir": "saves/x", "push_to_hub": True, "hub_model_id": "us/a/b"}
    options, problems = build(RunOptions, {name: Raw(value) for name, value in options_of_run.items()})
    assert not problems
    (problem,) = check_hub(options)
    assert 'Received: "us/a/b"' in str(problem)
    options.hub_model_id = None  # the name of the output folder
    assert not list(check_hub(options))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    (problem,) = check_hub(options)
    assert "HF_HUB_OFFLINE" in str(problem)


def test_options_of_uploads_without_push_to_hub_have_a_note():
    trackio = {"hub_private_repo": True, "report_to": ["trackio"]}
    for options in ({}, {"push_to_hub": True, "hub_strategy": "end"}, trackio):
        assert hub_notes(RunOptions(**options)) == []
    for option in ("hub_private_repo", "hub_model_id"):
        (note,) = hub_notes(RunOptions(**{option: "us/tiny"}))
        assert note == f'"{option}" has no effect without "push_to_hub".'
