"""Pushing to a hub, tested with a local server that implements huggingface_hub's protocol."""

import pytest
import yaml
from transformers import AutoModelForSequenceClassification

from push_hub import running_hub, wait_until
from trainer_run import bert, classes, make_trainer

pytestmark = pytest.mark.run


@pytest.fixture
def hub(monkeypatch):
    with running_hub(monkeypatch) as hub:
        yield hub


def pushing(folder, **options):
    defaults = {"max_steps": 2, "push_to_hub": True, "hub_model_id": "us/tiny", "hub_token": "hf_secret"}
    return make_trainer(folder, model=bert(), train=classes(), **{**defaults, **options})


def test_pushed_model_can_be_loaded_and_has_a_valid_card(hub, tmp_path):
    trainer = pushing(tmp_path / "out", hub_private_repo=True)
    trainer.train()
    trainer.push_to_hub(commit_message="Done", dataset="rows of our own", tags=["tiny"])
    assert hub.made == {"us/tiny": "private"}
    assert hub.tokens == {"Bearer hf_secret"}
    message, files = hub.commits[-1]
    assert message == "Done"
    _, header, text = files["README.md"].decode().split("---", 2)
    assert {"tiny", "generated_from_trainer"} <= set(yaml.safe_load(header)["tags"])
    assert "rows of our own" in text
    assert not any(b"hf_secret" in content for content in files.values())
    for name, content in files.items():
        (tmp_path / "fetched").mkdir(exist_ok=True)
        (tmp_path / "fetched" / name).write_bytes(content)
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "fetched")
    for name, parameter in trainer.model.named_parameters():
        assert loaded.get_parameter(name).equal(parameter), name


def test_push_to_hub_arguments_override_training_arguments(hub, tmp_path):
    trainer = make_trainer(tmp_path / "out", model=bert(), train=classes(), hub_model_id="us/tiny")
    trainer.push_to_hub("Done", True, "hf_other", None, True)
    assert hub.made == {"us/tiny": "private"}
    assert hub.tokens == {"Bearer hf_other"}
    assert hub.commits[-1][0] == "Done"


@pytest.mark.parametrize(
    ("strategy", "folders"),
    [
        ("end", set()),
        ("every_save", {""}),
        ("checkpoint", {"", "last-checkpoint"}),
        ("all_checkpoints", {"", "checkpoint-1", "checkpoint-2"}),
    ],
)
def test_checkpoints_are_pushed_according_to_hub_strategy(hub, tmp_path, strategy, folders):
    trainer = pushing(
        tmp_path / "out", hub_strategy=strategy, save_strategy="steps", save_steps=1, hub_always_push=True
    )
    trainer.train()
    assert {name.rpartition("/")[0] for name in hub.files()} == folders
    assert all(message.startswith("Training in progress, step ") for message, _ in hub.commits)
    for folder in folders:
        pushed_files = {name.rpartition("/")[2] for name in hub.files() if name.rpartition("/")[0] == folder}
        assert "model.safetensors" in pushed_files
        assert (
            {"optimizer.safetensors", "manifest.json"} <= pushed_files
            if folder
            else "optimizer.safetensors" not in pushed_files
        )


def test_removed_checkpoint_is_pushed_completely(hub, tmp_path):
    """save_total_limit removes it before its push has read the files."""
    out = tmp_path / "out"
    left = out / ".incomplete-upload-killed"
    left.mkdir(parents=True)
    hub.before_upload = lambda: wait_until(lambda: not (out / "checkpoint-1").exists())
    trainer = pushing(
        out, hub_strategy="checkpoint", save_strategy="steps", save_steps=1, save_total_limit=1, max_steps=3
    )
    trainer.train()
    first = [files for message, files in hub.commits if message == "Training in progress, step 1"]
    assert "model.safetensors" in first[0]
    assert "last-checkpoint/manifest.json" in first[1]
    assert list(out.glob(".*incomplete*")) == []


def test_saved_model_is_pushed(hub, tmp_path):
    trainer = pushing(tmp_path / "out")
    trainer.save_model()
    ((message, files),) = hub.commits
    assert message == "Model save"
    assert "model.safetensors" in files
