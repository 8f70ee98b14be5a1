"""``burnish export``: a complete folder whose template and merged weights match training."""

import json
import signal
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from burnish import cli
from burnish.config.errors import UserError
from burnish.config.options import RawValue
from burnish.data.chat.table import table
from burnish.export.export import _difference, export
from burnish.export.modelfile import go_template
from burnish.utils.files import exclusive_writer_lock
from representative import representative_slow
from small_run import make_model
from template_cases import byte_tokenizer

TEXT = "Stones roll in the north river."


def make_adapter(model_folder: Path, folder: Path, seed: int, **settings) -> Path:
    """Create an adapter with peft, with a nonzero factor B."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    wrapped = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "up_proj"], **settings))
    for name, parameter in wrapped.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    wrapped.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("export")
    make_model(root / "model")
    make_adapter(root / "model", root / "one", 1)
    make_adapter(root / "model", root / "two", 2)
    return root


def run(root: Path, target: Path, **options) -> Path:
    options = {"model_name_or_path": str(root / "model"), "export_dir": str(target), "template": "qwen", **options}
    return export({name: RawValue(value, "the command line") for name, value in options.items()})


def logits(folder: Path) -> torch.Tensor:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(**tokenizer(TEXT, return_tensors="pt", return_token_type_ids=False)).logits


def test_adapters_are_merged_in_order_on_export(root, tmp_path, capsys):
    from peft import PeftModel

    folder = run(root, tmp_path / "out", adapter_name_or_path=f"{root / 'one'},{root / 'two'}")
    reference = AutoModelForCausalLM.from_pretrained(root / "model")
    for name in ("one", "two"):
        reference = PeftModel.from_pretrained(reference, root / name).merge_and_unload()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        expected = reference.eval()(**tokenizer(TEXT, return_tensors="pt", return_token_type_ids=False)).logits
    torch.testing.assert_close(logits(folder), expected, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(logits(folder), logits(root / "model"), atol=1e-3)
    assert "has the same token ids as in training" in capsys.readouterr().out


def test_model_without_adapters_is_exported_unchanged(root, tmp_path):
    assert torch.equal(logits(run(root, tmp_path / "out")), logits(root / "model"))


def test_format_of_exported_weights_can_be_chosen(root, tmp_path):
    folder = run(root, tmp_path / "out", export_dtype="bfloat16")
    assert AutoModelForCausalLM.from_pretrained(folder).dtype == torch.bfloat16
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"


def test_exported_chat_template_is_the_trained_one(root, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(run(root, tmp_path / "out"))
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert text.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    assert text.startswith("<|im_start|>system\n")  # the default system message of qwen


def test_ollama_modelfile_is_written_with_the_weights(root, tmp_path):
    text = (run(root, tmp_path / "out") / "Modelfile").read_text()
    assert text.startswith("FROM .\n")
    assert '{{ if eq .Role "user" }}<|im_start|>user\n{{ .Content }}<|im_end|>' in text
    assert 'PARAMETER stop "<|im_end|>"' in text
    assert 'SYSTEM """' in text
    assert "PARAMETER num_ctx 256" in text


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "chatml",
            "{{ if .System }}<|im_start|>system\n{{ .System }}<|im_end|>\n{{ end }}{{ range .Messages }}"
            '{{ if eq .Role "user" }}<|im_start|>user\n{{ .Content }}<|im_end|>\n<|im_start|>assistant\n'
            '{{ else if eq .Role "assistant" }}{{ .Content }}<|im_end|>\n{{ end }}{{ end }}',
        ),
        (
            "default",
            "{{ if .System }}System: {{ .System }}</s>\n{{ end }}{{ range .Messages }}"
            '{{ if eq .Role "user" }}Human: {{ .Content }}</s>\nAssistant:'
            '{{ else if eq .Role "assistant" }}{{ .Content }}</s>\n{{ end }}{{ end }}',
        ),
        (
            "deepseek3",
            "<s>{{ if .System }}{{ .System }}{{ end }}{{ range .Messages }}"
            '{{ if eq .Role "user" }}<｜User｜>{{ .Content }}<｜Assistant｜>'
            '{{ else if eq .Role "assistant" }}{{ .Content }}</s>{{ end }}{{ end }}',
        ),
        (
            "llama2",  # LLaMA-Factory puts the system message before "[INST]", unlike in training
            "{{ $system := .System }}{{ range .Messages }}"
            '{{ if eq .Role "user" }}<s>[INST] {{ if $system }}<<SYS>>\n{{ $system }}\n<</SYS>>\n\n{{ $system = "" }}'
            "{{ end }}{{ .Content }} [/INST]"
            '{{ else if eq .Role "assistant" }}{{ .Content }}</s>{{ end }}{{ end }}',
        ),
    ],
)
def test_ollama_template_uses_its_template_language(name, expected):
    assert go_template(table()[name], byte_tokenizer()) == expected


def test_template_with_custom_jinja_has_no_ollama_template(root, tmp_path):
    text = (run(root, tmp_path / "out", template=None) / "Modelfile").read_text()
    assert "TEMPLATE" not in text
    assert 'PARAMETER stop "<|im_end|>"' in text


def test_tokenizer_saved_with_adapter_is_exported(root, tmp_path):
    trained = AutoTokenizer.from_pretrained(root / "model")
    trained.add_tokens(["<mark>"])
    folder = make_adapter(root / "model", tmp_path / "adapter", 3)
    trained.save_pretrained(folder)
    exported = AutoTokenizer.from_pretrained(run(root, tmp_path / "out", adapter_name_or_path=str(folder)))
    assert "<mark>" in exported.get_vocab()


def test_merge_into_quantized_base_is_rejected_with_remedy(root, tmp_path):
    config = json.loads((root / "model" / "config.json").read_text())
    folder = tmp_path / "quantized"
    folder.mkdir()
    for path in (root / "model").iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    (folder / "config.json").write_text(
        json.dumps({**config, "quantization_config": {"quant_method": "gptq", "bits": 4}})
    )
    with pytest.raises(UserError, match=r"quantized \(gptq\): an adapter cannot be merged") as raised:
        run(root, tmp_path / "out", model_name_or_path=str(folder), adapter_name_or_path=str(root / "one"))
    assert "full precision" in str(raised.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"export_legacy_format": "true"}, "export_legacy_format"),
        ({"export_dir": None}, "export_dir is missing"),
        ({"export_size": "0"}, "export_size"),
        ({"export_hub_model_id": "me/my model"}, "export_hub_model_id"),
        ({"adapter_name_or_path": "nowhere/at/all"}, "nowhere"),
        ({"template": "qwenn"}, "qwen"),
        ({"export_quantization_bit": "6"}, "export_quantization_bit"),
    ],
)
def test_invalid_exports_are_rejected_before_anything_is_written(root, tmp_path, options, message):
    with pytest.raises(UserError, match=message):
        run(root, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_non_empty_export_dir_requires_overwrite(root, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("keep")
    with pytest.raises(UserError, match=r"mine\.txt"):
        run(root, tmp_path / "out")
    run(root, tmp_path / "out", overwrite_output_dir="true")
    assert (tmp_path / "out" / "mine.txt").read_text() == "keep"


@pytest.mark.parametrize("name", ["adapter_config.json", "trainer_state.json", "launch.json", "checkpoint-4/x"])
def test_export_never_overwrites_a_run(root, tmp_path, name):
    """transformers would load the run's adapter into the model, and a resumed run would overwrite the export."""
    path = tmp_path / "out" / name
    path.parent.mkdir(parents=True)
    path.write_text("{}")
    with pytest.raises(UserError, match=rf"contains a training run \({name.partition('/')[0]}\)"):
        run(root, tmp_path / "out", overwrite_output_dir="true")
    assert [path.name for path in (tmp_path / "out").iterdir()] == [name.partition("/")[0]]


def test_new_export_replaces_all_files_of_earlier_export(root, tmp_path, monkeypatch):
    out = tmp_path / "out"
    run(root, out)
    for name in ("model-00001-of-00002.safetensors", "model.safetensors.index.json", "out-f16.gguf"):
        (out / name).write_text("{}")
    before = {path.name for path in out.iterdir()}
    with monkeypatch.context() as failing:
        failing.setattr("burnish.models.save.save_config", Mock(side_effect=RuntimeError("half way")))
        with pytest.raises(RuntimeError, match="half way"):
            run(root, out, overwrite_output_dir="true")
    assert {path.name for path in out.iterdir()} == before
    run(root, out, overwrite_output_dir="true")
    assert not [path.name for path in out.iterdir() if "-of-" in path.name or path.suffix == ".gguf"]
    with exclusive_writer_lock(out), pytest.raises(UserError, match="another run is writing"):
        run(root, out, overwrite_output_dir="true")


KILL = """
import os, signal
import {module} as module
from burnish import cli
whole = module.{name}
def killed(*given, **named):
    whole(*given, **named)
    os.kill(os.getpid(), signal.SIGKILL)
module.{name} = killed
cli.main({words!r})
"""


@pytest.mark.slow
@pytest.mark.run
@pytest.mark.parametrize("overwrites", representative_slow([False, True], 1))
@pytest.mark.parametrize(
    "function",
    representative_slow(
        ["burnish.models.save.save_config", "burnish.utils.files.open_lock",
         "burnish.run.recovery.clearing.files_of_run", "burnish.export.export.modelfile",
         "burnish.export.export.compare_templates"],
        1,
    ),
)  # fmt: skip
def test_killed_export_is_completed_by_the_same_command(root, tmp_path, function, overwrites):
    module, name = function.rsplit(".", 1)
    argv = ["export", "--model_name_or_path", str(root / "model"), "--adapter_name_or_path", str(root / "one"),
             "--template", "qwen"]  # fmt: skip
    assert cli.main([*argv, "--export_dir", str(tmp_path / "whole")]) == 0
    out = tmp_path / "out"
    argv += ["--export_dir", str(out)]
    if overwrites:
        assert cli.main(argv) == 0
        argv += ["--overwrite_output_dir", "true"]
    code = KILL.format(module=module, name=name, words=argv)
    killed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert (out / ".lock").exists()
    assert cli.main(argv) == 0
    assert sorted(path.name for path in out.iterdir()) == sorted(path.name for path in (tmp_path / "whole").iterdir())
    assert (out / "model.safetensors").read_bytes() == (tmp_path / "whole" / "model.safetensors").read_bytes()


def test_run_is_exported_by_its_path(root, tmp_path, capsys):
    """The base model is read from the adapter, and the template from its ``run.yaml``."""
    (tmp_path / "data.json").write_text(json.dumps([{"instruction": "Say red", "output": "red"}] * 4))
    argv = ["--model_name_or_path", str(root / "model"), "--dataset", str(tmp_path / "data.json"), "--use_cpu", "true",
             "--template", "qwen", "--max_steps", "1", "--save_strategy", "no", "--plot_loss", "false"]  # fmt: skip
    first, full = tmp_path / "first", tmp_path / "full"
    assert cli.main(["train", *argv, "--output_dir", str(first), "--finetuning_type", "lora"]) == 0
    assert cli.main(["train", *argv, "--output_dir", str(full), "--finetuning_type", "full"]) == 0
    for name in (first, full):
        assert cli.main(["export", str(name), f"export_dir={tmp_path / 'models' / name.name}"]) == 0
    merged, trained = logits(tmp_path / "models" / "first"), logits(tmp_path / "models" / "full")
    assert torch.equal(trained, logits(full))
    assert not torch.equal(merged, logits(root / "model"))
    assert "<|im_start|>" in (tmp_path / "models" / "first" / "Modelfile").read_text()
    argv = ["export", f"adapter_name_or_path={first}", f"export_dir={tmp_path / 'models' / 'again'}"]
    assert cli.main(argv) == 0
    assert torch.equal(logits(tmp_path / "models" / "again"), merged)
    capsys.readouterr()
    assert cli.main(["export", str(first)]) == 2
    assert "export_dir is missing" in capsys.readouterr().err
    assert cli.main(["export", str(tmp_path / "nowhere"), "export_dir=x"]) == 2
    assert "nowhere" in capsys.readouterr().err


def test_foreign_files_next_to_an_interrupted_export_are_rejected(root, tmp_path):
    (tmp_path / "out" / ".earlier-run").mkdir(parents=True)
    for name in (".lock", "model.safetensors", "thesis.tex"):
        (tmp_path / "out" / name).write_text("")
    with pytest.raises(UserError, match=r"is not empty: thesis\.tex\."):
        run(root, tmp_path / "out")


def test_export_never_overwrites_its_base(root):
    with pytest.raises(UserError, match="is the input folder"):
        run(root, root / "model", overwrite_output_dir="true")


def test_export_command_accepts_the_training_file(root, tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(
        f"model_name_or_path: {root / 'model'}\nadapter_name_or_path: {root / 'one'}\ntemplate: qwen\n"
        f"dataset: some\nstage: sft\nlearning_rate: 1e-4\nexport_dir: {tmp_path / 'out'}\n"
    )
    assert cli.main(["export", str(file), "export_size=2"]) == 0
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_invalid_export_value_is_rejected_with_its_line(root, tmp_path, capsys):
    file = tmp_path / "run.yaml"
    file.write_text(
        f"model_name_or_path: {root / 'model'}\nexport_dir: {root / 'model'}\nadapter_name_or_path: nowhere\n"
    )
    assert cli.main(["export", str(file)]) == 2
    assert f"{file}, line 3: adapter_name_or_path" in capsys.readouterr().err
    assert cli.main(["export", str(file), "adapter_name_or_path=none"]) == 2
    assert f"{file}, line 2: export_dir" in capsys.readouterr().err


def test_different_text_is_an_error_and_different_tokenization_a_warning(root):
    tokenizer = AutoTokenizer.from_pretrained(root / "model")
    word_ids = tokenizer("river", add_special_tokens=False)["input_ids"]
    letter_ids = [i for letter in "river" for i in tokenizer(letter, add_special_tokens=False)["input_ids"]]
    assert word_ids != letter_ids
    assert "the tokens differ at token" in _difference(word_ids, letter_ids, tokenizer)
    with pytest.raises(RuntimeError, match="differs from the training text"):
        _difference(word_ids, letter_ids[:-1], tokenizer)


def test_exported_folder_is_uploaded_on_request(root, tmp_path, monkeypatch):
    import huggingface_hub

    calls = {}

    class Hub:
        def __init__(self, token):
            calls["token"] = token

        def create_repo(self, name, private, exist_ok):
            calls["private"] = private
            return huggingface_hub.RepoUrl(f"https://huggingface.co/{name}")

        def upload_folder(self, repo_id, folder_path, commit_message):
            calls.update(repo=repo_id, files=sorted(path.name for path in Path(folder_path).iterdir()))

    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)
    run(root, tmp_path / "out", export_hub_model_id="me/mine", hf_hub_token="secret")
    assert calls["repo"] == "me/mine"
    assert calls["token"] == "secret"
    assert calls["private"]
    assert "model.safetensors" in calls["files"]
