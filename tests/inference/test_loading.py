"""Loading for inference: model and adapter folders, the template used in training, several adapters."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from generation_runs import ResponseCollector, generate_alone, generate_responses
from transformers import AutoTokenizer

from burnish.adapters.lora import LoraAdapter, load_adapter
from burnish.adapters.lora_model import merge_into_base
from burnish.checkpoint.checkpoint import Checkpoints
from burnish.config.errors import UserError
from burnish.config.options import RawValue
from burnish.data.chat.choose import RECORDED
from burnish.export.export import export
from burnish.inference.loading import load_for_inference, local_engine
from burnish.inference.scheduler import Scheduler
from burnish.inference.slots import SlotLimits
from burnish.inference.types import BASE, GenerationRequest
from burnish.loop.types import Example, Message
from burnish.models.load import load_model
from burnish.run.finish import next_steps
from burnish.run.plan.plan import RunOptions
from burnish.serve.command_line import serving_of
from burnish.serve.eval.dataset import _recorded_template
from pair_runs import make_pair_workspace, train_on_pairs
from small_run import make_model
from tiny_models import saved_model

QUESTION = Example(messages=(Message("user", "What is 2 + 2?"),))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def adapters(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two adapters of different ranks and layers, large enough to change responses."""
    result = {}
    for name, rank, target in (("first", 2, ["all"]), ("second", 4, ["q_proj", "down_proj"])):
        torch.manual_seed(rank)
        options = RunOptions(model_name_or_path=str(model), lora_rank=rank, lora_target=target)
        base = load_model(options)
        adapter = LoraAdapter(options)
        adapted = adapter.attach(base)
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                torch.nn.init.normal_(parameter, std=0.3)
        result[name] = tmp_path_factory.mktemp(name)
        adapter.save(adapted, str(result[name]))
    return result


def test_model_folder_is_loaded_and_generates(model: Path) -> None:
    serving = serving_of(
        [str(model), "do_sample=false", "max_concurrent_requests=2", "infer_context=99", "infer_exact=true"]
    )
    loaded = load_for_inference(serving.options, serving.name)
    assert loaded.name == model.name
    engine = local_engine(loaded)
    assert engine.loop.limits == SlotLimits(slots=2, context=99, exact=True)
    engine.close()


def test_adapter_loads_its_base(model: Path, adapters: dict[str, Path]) -> None:
    serving = serving_of([str(adapters["first"])])
    assert serving.options.model_name_or_path == str(model)
    loaded = load_for_inference(serving.options)
    merged = load_model(RunOptions(model_name_or_path=str(model)))
    load_adapter(merged, adapters["first"])
    merge_into_base(merged)
    ids = torch.tensor([[3, 4, 5]])
    assert torch.equal(loaded.model(ids).logits, merged(ids).logits)


def test_llamafactory_inference_config_is_accepted(model: Path, adapters: dict[str, Path], tmp_path: Path) -> None:
    file = tmp_path / "llama3_lora_sft.yaml"
    file.write_text(
        f"model_name_or_path: {model}\nadapter_name_or_path: {adapters['first']}\ntemplate: qwen\n"
        "infer_backend: huggingface  # choices: [huggingface, vllm, sglang]\ntrust_remote_code: true\n"
        "missing_control_tokens: split\n"
    )
    loaded = load_for_inference(serving_of([str(file)]).options)
    assert loaded.template.name == "qwen"
    assert any("was merged" in note for note in loaded.notes)


def test_parallel_adapters_respond_as_each_alone(model: Path, adapters: dict[str, Path]) -> None:
    served = {"first v1.0": adapters["first"], "keys": adapters["second"]}  # any names
    options = json.dumps({name: str(folder) for name, folder in served.items()})
    loaded = load_for_inference(serving_of([str(model), f"served_adapters={options}", "infer_dtype=float32"]).options)
    loop = Scheduler(loaded.model, SlotLimits(6, 128), adapters=loaded.adapters, adapter_context=loaded.adapter_context)
    names = [BASE, "first v1.0", "keys", "first v1.0", BASE, "keys"]
    prompts = [[5 + at, 6, 7 + at, 8] for at in range(6)]
    responses = generate_responses(
        loop, [GenerationRequest(ids, 8, adapter=name) for ids, name in zip(prompts, names, strict=True)]
    )
    for ids, name, answer in zip(prompts, names, responses, strict=True):
        reference = load_model(RunOptions(model_name_or_path=str(model)), dtype=torch.float32)
        if name != BASE:
            load_adapter(reference, served[name])
            merge_into_base(reference)
        assert answer.ids == generate_alone(reference, ids, 8)
    assert len({tuple(answer.ids) for answer in responses}) > 2


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ([], (0.3, 0.5, 7, 1.2)),
        (["temperature=0.9"], (0.9, 0.5, 7, 1.2)),
        (["temperature=0.95", "top_p=0.7", "top_k=50", "repetition_penalty=1.0"], (0.95, 0.7, 50, 1.0)),
    ],
    ids=str,
)
def test_sampling_settings_that_are_set_precede_those_of_the_model(
    argv: list[str], expected: tuple[float, ...], tmp_path: Path
) -> None:
    folder = saved_model(tmp_path / "model")
    generation_config = {"temperature": 0.3, "top_p": 0.5, "top_k": 7, "repetition_penalty": 1.2, "do_sample": True}
    (folder / "generation_config.json").write_text(json.dumps(generation_config))
    serving = serving_of([str(folder), *argv])
    loaded = load_for_inference(serving.options, explicit=serving.provenance)
    sampling = loaded.defaults
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.repetition_penalty) == expected


def test_adapter_that_is_not_served_is_rejected(model: Path) -> None:
    loaded = load_for_inference(serving_of([str(model)]).options)
    loop = Scheduler(loaded.model, SlotLimits(1, 64))
    with pytest.raises(UserError, match='unknown adapter "poet"'):
        loop.submit(GenerationRequest([5], 5, adapter="poet"), ResponseCollector())


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"use_dora": True}, "it uses DoRA"),
        ({"additional_target": ["norm"]}, 'its module "model.layers.0.input_layernorm" of type LlamaRMSNorm was'),
    ],
    ids=str,
)
def test_adapter_that_cannot_share_a_batch_is_not_served(
    options: dict[str, Any], reason: str, model: Path, tmp_path: Path
) -> None:
    adapter = LoraAdapter(RunOptions(model_name_or_path=str(model), lora_rank=2, lora_target=["q_proj"], **options))
    adapter.save(adapter.attach(load_model(RunOptions(model_name_or_path=str(model)))), str(tmp_path / "adapter"))
    with pytest.raises(UserError, match=f'the adapter "a" cannot be served in addition to the model: {reason}'):
        load_for_inference(serving_of([str(model), f'served_adapters={{"a": "{tmp_path / "adapter"}"}}']).options)


def test_adapter_of_another_base_is_rejected(adapters: dict[str, Path], tmp_path: Path) -> None:
    other = saved_model(tmp_path / "other", hidden_size=32)
    with pytest.raises(UserError):
        load_for_inference(serving_of([str(other), f'served_adapters={{"a": "{adapters["first"]}"}}']).options)


def test_damaged_config_of_a_served_adapter_is_an_error(model: Path, tmp_path: Path) -> None:
    (tmp_path / "adapter_model.safetensors").touch()
    (tmp_path / "adapter_config.json").write_text("[]")
    with pytest.raises(UserError, match="adapter_config"):
        load_for_inference(serving_of([str(model), f'served_adapters={{"a": "{tmp_path}"}}']).options)


def test_training_template_is_recorded_and_found(model: Path, tmp_path: Path) -> None:
    trained = load_for_inference(
        RunOptions(model_name_or_path=str(model), template="qwen", missing_control_tokens="split")
    )
    trained.tokenizer.chat_template = trained.template.jinja()
    trained.model.save_pretrained(tmp_path)
    trained.tokenizer.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "tokenizer_config.json").read_text())[RECORDED]["template"] == "qwen"
    result = load_for_inference(RunOptions(model_name_or_path=str(tmp_path), missing_control_tokens="split"))
    assert result.template.name == "qwen"
    assert result.template.prompt(QUESTION) == trained.template.prompt(QUESTION)


@pytest.mark.parametrize(
    ("argv", "expected"),
    [([], "RECORDED"), (["default_system=USER"], "USER"), (["default_system=USER", "template=qwen"], "USER")],
    ids=str,
)
def test_template_options_that_are_set_precede_the_recorded_ones(
    argv: list[str], expected: str, model: Path, tmp_path: Path
) -> None:
    options = RunOptions(
        model_name_or_path=str(model), template="qwen", default_system="RECORDED", missing_control_tokens="split"
    )
    trained = load_for_inference(options)
    trained.tokenizer.chat_template = trained.template.jinja()
    trained.model.save_pretrained(tmp_path)
    trained.tokenizer.save_pretrained(tmp_path)
    serving = serving_of([str(tmp_path), "missing_control_tokens=split", *argv])
    result = load_for_inference(serving.options, explicit=serving.provenance)
    assert result.template.name == "qwen"
    assert expected in result.tokenizer.decode(result.template.prompt(QUESTION))
    recorded = {name: item.value for name, item in _recorded_template(serving).items()}
    assert recorded.get("template") == (None if "template=qwen" in argv else "qwen")
    assert recorded.get("default_system") == (None if argv else "RECORDED")


@pytest.mark.parametrize(
    "training",
    [{"stage": "dpo"}, {"stage": "kto"}, {"stage": "sft", "mask_history": True}, {"stage": "sft"}],
    ids=lambda training: "-".join(map(str, training.values())),
)
def test_prompts_have_the_reasoning_of_earlier_responses_only_if_training_kept_it(
    training: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_pair_workspace(tmp_path)
    responses = [{"instruction": "Repeat: red", "output": "red"}] * 4
    (tmp_path / "responses.json").write_text(json.dumps(responses))
    folder, whole = tmp_path / "out", tmp_path / "whole"
    data = {"dataset": str(tmp_path / "responses.json")} if training["stage"] == "sft" else {}
    options = {"template": "qwen3", "missing_control_tokens": "split", "max_steps": 1, **data, **training}
    train_on_pairs(tmp_path, monkeypatch, **options)
    values = {"model_name_or_path": folder, "export_dir": whole, "missing_control_tokens": "split"}
    export({name: RawValue(str(value)) for name, value in values.items()})
    thought, question = "<think>\nhm\n</think>\n\n", Message("user", "Repeat: blue")
    talk = Example(messages=(question, Message("assistant", f"{thought}red"), question))
    for trained in (folder, whole):
        tokenizer = AutoTokenizer.from_pretrained(trained)
        chat = [{"role": message.role, "content": message.text} for message in talk.messages]
        expected = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        assert (thought in expected) == (training == {"stage": "sft"})
        for preserve in ([], ["preserve_thinking=true"]):
            serving = serving_of([str(trained), "missing_control_tokens=split", *preserve])
            loaded = load_for_inference(serving.options, explicit=serving.provenance)
            prompt = loaded.tokenizer.decode(loaded.template.prompt(talk))
            assert thought in prompt if preserve else prompt == expected


def test_template_different_from_recorded_one_is_reported(model: Path) -> None:
    loaded = load_for_inference(
        RunOptions(model_name_or_path=str(model), template="alpaca", missing_control_tokens="split")
    )
    assert loaded.template_notes
    assert {*loaded.template_notes} <= {*loaded.notes}


def test_folder_without_model_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="contains no model"):
        serving_of([str(tmp_path)])


def test_adapter_of_another_package_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Checkpoints, "newest", lambda self: (tmp_path, []))
    with pytest.raises(UserError, match="only the package of its finetuning_type can load it"):
        serving_of([str(tmp_path)])
    assert next_steps(tmp_path, gives_scores=False) == []


MODEL_CODE = (
    "from pathlib import Path\nPath(__file__).with_name('RAN').touch()\n"
    "from transformers import LlamaForCausalLM as Model\n"
)


@pytest.mark.parametrize(
    "entry",
    [{"template": "chatml", "trust_remote_code": True}, {"template": "other.jinja"}, {"template": 7},
     {"template": "chatml", "enable_thinking": "perhaps"}, {"template": "chatml", "tool_format": "other"}, ["chatml"]],
)  # fmt: skip
def test_model_folder_sets_only_template_options(model: Path, tmp_path: Path, entry: object) -> None:
    folder = tmp_path / "sent"
    shutil.copytree(model, folder)
    (folder / "model_code.py").write_text(MODEL_CODE)
    (folder / "other.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    for name, added in (("config.json", {"auto_map": {"AutoModelForCausalLM": "model_code.Model"}}),
                        ("tokenizer_config.json", {RECORDED: entry})):  # fmt: skip
        path = folder / name
        path.write_text(json.dumps({**json.loads(path.read_text()), **added}))
    with pytest.raises(UserError):
        load_for_inference(serving_of([str(folder)]).options)
    assert not list(tmp_path.rglob("RAN"))
