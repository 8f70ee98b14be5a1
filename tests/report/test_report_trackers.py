"""Trackers: names, missing libraries, and transformers' callbacks with burnish's options."""

import importlib.machinery
import json
import sys
import types
from dataclasses import dataclass

import pytest

from burnish.checkpoint.checkpoint import CheckpointOptions
from burnish.config.errors import UserError
from burnish.config.options import RawValue, build, union
from burnish.loop.events import CallbackHandler, IntervalOptions
from burnish.loop.state import TrainerControl, TrainerState
from burnish.report.options import HubOptions, ReportOptions, check_trackers, counts_tokens, tracker_notes
from burnish.report.trackers import TRACKERS, tracker_callbacks, tracker_problems, wanted_trackers

pytestmark = pytest.mark.run

Options = union("Options", ReportOptions, HubOptions, CheckpointOptions, IntervalOptions)


def parsed(**overrides):
    options, problems = build(Options, {name: RawValue(value) for name, value in overrides.items()})
    assert not problems, problems
    return options


@pytest.mark.parametrize(
    ("options", "expected"), [("none", []), ("", []), ("wandb, mlflow", ["wandb", "mlflow"]), (None, [])]
)
def test_report_to_is_a_list_of_names(options, expected):
    assert wanted_trackers(parsed(report_to=options).report_to) == expected


def test_unknown_name_beside_all_is_rejected():
    assert 'unknown tracker "wandbb"' in str(tracker_problems(["all", "wandbb"])[0])


def test_unknown_tracker_suggests_nearest_name():
    (problem,) = check_trackers(parsed(report_to="wandbb"))
    assert '"wandbb"' in problem.what
    assert 'Did you mean "wandb"?' in problem.what
    assert "tensorboard" in problem.remedy


def test_missing_tracker_is_reported_with_its_pip_command(monkeypatch):
    monkeypatch.setattr("burnish.report.trackers.find_spec", lambda name: None)
    (problem,) = check_trackers(parsed(report_to="wandb"))
    assert "wandb requires the library wandb, which is not installed" in problem.what
    assert "pip install wandb" in problem.remedy
    assert len(str(problem).splitlines()) <= 4
    with pytest.raises(UserError, match="not installed"):
        tracker_callbacks("wandb")


@pytest.mark.parametrize(
    ("tracker", "variable", "value"),
    [("wandb", "WANDB_LOG_MODEL", "checkpoint"), ("dvclive", "HF_DVCLIVE_LOG_MODEL", "True")],
)
def test_model_uploads_of_trackers_are_reported_before_the_run(monkeypatch, tracker, variable, value):
    """Their callbacks save with a Trainer of transformers, which these options are no arguments for."""
    monkeypatch.setattr("burnish.report.trackers._is_installed", lambda module: True)
    monkeypatch.setenv(variable, "false")
    assert list(check_trackers(parsed(report_to=tracker))) == []
    monkeypatch.setenv(variable, value)
    (problem,) = check_trackers(parsed(report_to=tracker))
    assert f"{variable} is {value.lower()}" in problem.what
    assert list(check_trackers(parsed(report_to="none"))) == []


def test_all_tracker_problems_are_reported_together(monkeypatch):
    monkeypatch.setattr("burnish.report.trackers.find_spec", lambda name: None)
    assert len(tracker_problems(["wandbb", "mlflow", "swanlab"])) == 3


def test_folder_with_name_of_a_library_is_not_the_library(tmp_path, monkeypatch):
    (tmp_path / "clearml").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "clearml", raising=False)
    (problem,) = tracker_problems(["clearml"])
    assert "not installed" in problem.what


def test_tracker_names_match_transformers():
    from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

    assert set(TRACKERS.names()) == set(INTEGRATION_TO_CALLBACK)


def test_no_tracker_is_imported_without_report_to():
    assert tracker_callbacks(None) == []
    assert tracker_callbacks("none") == []


def test_tracker_options_without_tracker_give_a_note():
    assert tracker_notes(parsed(run_name="first")) == ['"run_name" has no effect: report_to lists no tracker.']
    assert tracker_notes(parsed(run_name="first", report_to="wandb")) == []
    assert tracker_notes(parsed()) == []


@pytest.mark.parametrize(("options", "counts"), [("no", False), ("true", True), ("all", True), (False, False)])
def test_token_counts_are_logged_on_request(options, counts):
    assert counts_tokens(parsed(include_num_input_tokens_seen=options)) is counts


def test_tracker_receives_options_without_secrets():
    @dataclass
    class More(ReportOptions):
        hub_token: str = "canary"
        infer_url: str = "https://me:canary@host"
        reward_funcs: tuple[dict[str, dict[str, str]], ...] = ({"judge": {"api_key": "canary-1234"}},)

    options = More(run_name="first", report_to=["wandb"])
    assert options.to_dict()["run_name"] == "first"
    assert json.loads(options.to_json_string())["hub_token"] == "<HUB_TOKEN>"
    assert options.to_sanitized_dict()["report_to"] == "['wandb']"
    assert "canary" not in str(options.to_sanitized_dict())


# --- transformers' callbacks, unchanged -------------------------------------------------------------------------------


class Recorder:
    """Stand-in for a tracking library that records calls."""

    def __init__(self):
        self.logged, self.config, self.run = [], {}, None

    def module(self, name):
        module = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, origin="here")
        return module


def fire_a_run(callbacks, options):
    state, control = TrainerState(max_steps=2), TrainerControl()
    handler = CallbackHandler(callbacks, options, state, control, model=None)
    handler.fire("on_init_end")
    handler.fire("on_train_begin")
    state.global_step = 1
    handler.fire("on_log", logs={"loss": 1.5, "learning_rate": 0.1})
    handler.fire("on_log", logs={"eval_loss": 1.0})
    handler.fire("on_evaluate", metrics={"eval_loss": 1.0})
    handler.fire("on_save")
    handler.fire("on_train_end")


def test_tensorboard_callback_of_transformers_runs_on_these_options(tmp_path, monkeypatch):
    recorder = Recorder()

    class SummaryWriter:
        def __init__(self, log_dir):
            recorder.run = log_dir

        def add_text(self, tag, text, step=0):
            recorder.config[tag] = text

        def add_scalar(self, tag, value, step):
            recorder.logged.append((tag, value, step))

        def flush(self): ...
        def close(self): ...

    fake = recorder.module("tensorboardX")
    fake.SummaryWriter = SummaryWriter
    monkeypatch.setitem(sys.modules, "tensorboardX", fake)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    options = parsed(report_to="tensorboard", output_dir=str(tmp_path), logging_dir=str(tmp_path / "tb"))
    fire_a_run(tracker_callbacks(options.report_to, options.logging_dir), options)
    assert recorder.run == str(tmp_path / "tb")
    assert json.loads(recorder.config["args"])["output_dir"] == str(tmp_path)
    assert recorder.logged == [("train/loss", 1.5, 1), ("train/learning_rate", 0.1, 1), ("eval/loss", 1.0, 1)]


def test_trackio_callback_of_transformers_runs_on_these_options(tmp_path, monkeypatch):
    """trackio reads the most options: project, run name, Space, bucket, privacy."""
    recorder = Recorder()

    class Config(dict):
        def update(self, values, allow_val_change):
            super().update(values)

    fake = recorder.module("trackio")
    fake.__version__ = "1.0.0"
    fake.config = Config()
    fake.init = lambda **overrides: setattr(recorder, "run", overrides)
    fake.log = recorder.logged.append
    fake.finish = lambda: recorder.logged.append("finished")
    fake.context_vars = types.SimpleNamespace(current_space_id=types.SimpleNamespace(get=lambda: None))
    monkeypatch.setitem(sys.modules, "trackio", fake)
    options = parsed(
        report_to="trackio", output_dir=str(tmp_path), run_name="first", project="burnish", trackio_space_id="me/space",
        trackio_bucket_id="me/bucket", trackio_static_space_id="false", hub_private_repo="true",
    )  # fmt: skip
    assert options.trackio_static_space_id is False
    fire_a_run(tracker_callbacks(options.report_to), options)
    assert recorder.run["project"] == "burnish"
    assert recorder.run["name"] == "first"
    assert recorder.run["space_id"] == "me/space"
    assert recorder.run["bucket_id"] == "me/bucket"
    assert recorder.run["private"] is True
    assert fake.config["output_dir"] == str(tmp_path)
    assert recorder.logged[0] == {"train/loss": 1.5, "train/learning_rate": 0.1, "train/global_step": 1}
    assert recorder.logged[-1] == "finished"
