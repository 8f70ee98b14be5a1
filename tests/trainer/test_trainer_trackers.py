"""Trackers through transformers' callbacks and the installed libraries, without network."""

import sys

import pytest
import transformers
from transformers import PrinterCallback

from trainer_run import Regression, arguments, bert, classes, make_trainer, points

pytestmark = pytest.mark.run


@pytest.fixture(autouse=True)
def _no_network(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    values = {
        "WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_DIR": str(tmp_path), "COMET_MODE": "DISABLED",
        "MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path / 'mlflow.db'}",
    }  # fmt: skip
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setitem(
        sys.modules, "comet_ml", None
    )  # if installed, it patches MLflow and sends requests to its server


def trained(folder, tracker, **options):
    trainer = make_trainer(
        folder, max_steps=4, report_to=tracker, run_name="a run", eval_strategy="steps", eval_steps=2,
        trainer={"eval_dataset": points(4)}, **options,
    )  # fmt: skip
    trainer.train()
    return trainer


def test_mlflow_stores_metrics_and_arguments(tmp_path):
    mlflow = pytest.importorskip("mlflow")
    trainer = trained(tmp_path / "out", "mlflow")
    (run,) = mlflow.search_runs(output_format="list", search_all_experiments=True)
    assert run.info.run_name == "a run"
    assert run.data.params["learning_rate"] == "0.1"
    last = [entry for entry in trainer.state.log_history if "eval_loss" in entry][-1]
    assert run.data.metrics["eval_loss"] == pytest.approx(last["eval_loss"])
    assert run.data.metrics["train_loss"] > 0


def test_wandb_writes_its_offline_run(tmp_path):
    wandb = pytest.importorskip("wandb")
    trained(tmp_path / "out", "wandb")
    assert dict(wandb.run.config)["learning_rate"] == 0.1
    assert wandb.run.name == "a run"
    assert wandb.run.summary["train/global_step"] == 4
    assert wandb.run.summary["eval/loss"] > 0
    wandb.finish()
    assert list(tmp_path.rglob("*.wandb"))


def test_wandb_can_store_the_model(tmp_path, monkeypatch):
    """Its callback creates a Trainer of transformers with the run's arguments to save the model."""
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_LOG_MODEL", "end")
    uploads = []
    monkeypatch.setattr(wandb.Artifact, "new_file", spied(wandb.Artifact.new_file, uploads))
    trainer = make_trainer(tmp_path / "out", model=bert(), train=classes(), max_steps=1, report_to="wandb")
    trainer.train()
    wandb.finish()
    assert "model.safetensors" in uploads


def spied(method, names):
    def call(self, name, *args, **kwargs):
        names.append(name)
        return method(self, name, *args, **kwargs)

    return call


@pytest.mark.slow
def test_arguments_work_with_transformers_trainer(tmp_path):
    trainer = transformers.Trainer(Regression(), arguments(tmp_path, max_steps=2), train_dataset=points())
    trainer.remove_callback(PrinterCallback)
    assert trainer.train().global_step == 2


@pytest.mark.parametrize("writer", ["tensorboard", "tensorboardX"])
def test_tensorboard_has_one_curve_per_metric(tmp_path, writer, monkeypatch):
    pytest.importorskip(writer)
    if writer == "tensorboardX":  # transformers uses torch's writer if it is available
        monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    trainer = trained(tmp_path / "out", "tensorboard")
    (file,) = (tmp_path / "out" / "runs").rglob("events*")
    drawn = reader.EventAccumulator(str(file)).Reload()
    assert {"train/loss", "train/learning_rate", "train/grad_norm", "eval/loss"} <= set(drawn.Tags()["scalars"])
    logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert [point.value for point in drawn.Scalars("train/loss")] == pytest.approx(logged)
