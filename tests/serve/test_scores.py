"""Reward models over HTTP: the scores of training, for texts and conversations."""

from __future__ import annotations

import asyncio
import io
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, PreTrainedModel

from bad_inputs import read_output
from burnish import cli
from burnish.inference.loading import engine_of, load_for_inference
from burnish.rollouts.rewards.models import RewardServer
from burnish.serve.api.app import ServerState, application
from burnish.serve.api.completions import CompletionService
from burnish.serve.api.options import ApiOptions
from burnish.serve.api.responses import OutputQueue
from burnish.serve.api.served import ServedModel
from burnish.serve.command_line import serving_of
from pair_runs import make_pair_workspace, train_on_pairs
from serve.client import post
from serve.server_thread import RunningServer, serve_app

pytestmark = pytest.mark.run

TEXTS = ["red", "green blue stone river lamp seven nine", "<|im_start|>user\nred<|im_end|>\n"]
TALK = [{"role": "user", "content": "Repeat: red"}, {"role": "assistant", "content": "red red"}]
SHAPES = {
    "value head": {},
    "classifier": {"reward_head": "score"},
    "lora with a value head": {"finetuning_type": "lora"},
    "lora with a score": {"finetuning_type": "lora", "reward_head": "score"},
}


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_pair_workspace(tmp_path_factory.mktemp("scores"))
    with pytest.MonkeyPatch.context() as patch:
        for name, more in SHAPES.items():
            train_on_pairs(folder, patch, stage="rm", output_dir=str(folder / name), **more)
    return folder


def serving(folder: Path):
    """Serve the model of a folder."""
    loaded = load_for_inference(serving_of([str(folder)]).options, "judge", may_score=True)
    engine, loop, state = engine_of(loaded), asyncio.new_event_loop(), ServerState()
    served = ServedModel(loaded, engine, "judge")
    state.service, state.models, state.phase = (
        CompletionService(served, OutputQueue(loop), 64, 60.0, set()),
        served.models(),
        "ready",
    )
    port, end = serve_app(application(ApiOptions(), state, None), loop)
    return RunningServer(port, state, engine), end


def by_transformers(folder: Path, text: str) -> float:
    """Return the score of a full model at the last token, computed by transformers."""
    ids = AutoTokenizer.from_pretrained(folder)(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        if (folder / "value_head.safetensors").is_file():
            head = load_file(folder / "value_head.safetensors")
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
            hidden = model.model(ids)[0][0, -1]
            return (hidden @ head["v_head.summary.weight"][0] + head["v_head.summary.bias"][0]).item()
        model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
        return model(ids).logits.item()


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", SHAPES)
def test_text_gets_the_score_of_its_last_token(name: str, workspace: Path, capsys: pytest.CaptureFixture) -> None:
    whole = workspace / name
    if "lora" in name:
        whole = workspace / f"{name} whole"
        assert cli.main(["export", f"adapter_name_or_path={workspace / name}", f"export_dir={whole}",
                         f"model_name_or_path={workspace / 'model'}", "template=chatml"]) == 0  # fmt: skip
    running, end = serving(workspace / name)
    try:
        status, body = post(running, "/v1/score/evaluation", {"model": "judge", "messages": TEXTS})
        assert (status, body["object"], body["model"]) == (200, "score.evaluation", "judge")
        assert body["scores"] == pytest.approx([by_transformers(whole, text) for text in TEXTS], abs=1e-4)
        assert len(set(body["scores"])) == len(TEXTS)
        _, talk = post(running, "/v1/score/evaluation", {"model": "judge", "messages": [TALK]})
        written = "<|im_start|>user\nRepeat: red<|im_end|>\n<|im_start|>assistant\nred red<|im_end|>\n"
        _, same = post(running, "/v1/score/evaluation", {"model": "judge", "messages": [written]})
        assert talk["scores"] == pytest.approx(same["scores"], abs=1e-5)
    finally:
        end()


def test_server_is_a_reward_model_of_a_training_run(workspace: Path) -> None:
    running, end = serving(workspace / "value head")
    try:
        scores = RewardServer(f"http://127.0.0.1:{running.port}/v1/score/evaluation")(TEXTS)
    finally:
        end()
    assert scores == pytest.approx([by_transformers(workspace / "value head", text) for text in TEXTS], abs=1e-4)


def test_unsupported_score_requests_are_rejected(workspace: Path) -> None:
    running, end = serving(workspace / "value head")
    try:
        for body, status, code in (
            ({"messages": []}, 400, "invalid_value"),
            ({"messages": ["red"], "max_length": 0}, 400, "invalid_value"),
            ({"messages": ["red green blue"], "max_length": 1}, 400, "context_length_exceeded"),
            ({"messages": [""]}, 400, "context_length_exceeded"),
            ({"messages": [7]}, 400, "invalid_type"),
            ({"messages": [TALK[:1]]}, 400, "invalid_value"),
            ({"messages": ["red"], "model": "other"}, 404, "model_not_found"),
        ):
            answer = post(running, "/v1/score/evaluation", {"model": "judge", **body})
            assert (answer[0], answer[1]["error"]["code"]) == (status, code), (body, answer)
        options = {"model": "judge", "messages": TALK[:1]}
        status, answer = post(running, "/v1/chat/completions", options)
        assert (status, answer["error"]["code"]) == (405, "model_cannot_generate")
    finally:
        end()


def test_chat_with_reward_model_is_rejected(
    workspace: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    capsys.readouterr()
    monkeypatch.setattr("sys.stdin", io.StringIO("red"))
    assert cli.main(["chat", str(workspace / "value head")]) == 2
    assert "returns scores and does not generate text" in read_output(capsys)[1]


def test_error_of_a_reward_adapter_names_the_adapter(workspace: Path, capsys: pytest.CaptureFixture) -> None:
    capsys.readouterr()
    assert cli.main(["chat", str(workspace / "lora with a value head"), "--once", "red"]) == 2
    assert f"error: {workspace / 'lora with a value head'}: This is a reward model" in read_output(capsys)[1]


def test_export_of_a_reward_model_offers_no_chat(workspace: Path, capsys: pytest.CaptureFixture) -> None:
    folder = workspace / "exported"
    assert (
        cli.main(["export", str(workspace / "lora with a value head"), f"export_dir={folder}", "template=chatml"]) == 0
    )
    output = "".join(read_output(capsys))
    assert f"burnish api {folder}" in output
    assert not any(word in output for word in ("burnish chat", "vllm", "sglang"))
    assert not (folder / "Modelfile").exists()


def test_classifier_is_exported_in_the_requested_dtype_and_file_size(workspace: Path, monkeypatch) -> None:
    folder, sizes = workspace / "small", []
    save = PreTrainedModel.save_pretrained

    def recorded(self, *args, **kwargs):
        sizes.append(kwargs.get("max_shard_size"))
        return save(self, *args, **kwargs)

    monkeypatch.setattr(PreTrainedModel, "save_pretrained", recorded)
    options = [f"export_dir={folder}", "template=chatml", "infer_dtype=float16", "export_size=2"]
    assert cli.main(["export", str(workspace / "classifier"), *options]) == 0
    assert {weight.dtype for weight in load_file(folder / "model.safetensors").values()} == {torch.float16}
    assert json.loads((folder / "config.json").read_text())["dtype"] == "float16"
    assert set(sizes) == {"2GB"}


def test_adapter_with_score_head_can_be_trained_further(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = workspace / "lora with a score"
    again = workspace / "further"
    train_on_pairs(workspace, monkeypatch, stage="rm", output_dir=str(again), finetuning_type="lora", max_steps=1,
                   adapter_name_or_path=str(before), learning_rate=1e-8)  # fmt: skip
    old, new = (load_file(folder / "adapter_model.safetensors") for folder in (before, again))
    assert old.keys() == new.keys()
    assert "base_model.model.score.weight" in new
    assert all(torch.allclose(old[name], new[name], atol=1e-6) for name in old)
