"""Quantized ``burnish export``: calibration data, files in the folder, and checks before the work.

If gptqmodel is installed, it quantizes a small model on the CPU, which is loaded in transformers. Other tests use a
stand-in package of a few lines that copies the folder.
"""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

from burnish.cli import main
from burnish.config.errors import UserError
from burnish.config.options import RawValue
from burnish.export.export import export
from burnish.models.quantization import export as quantized_export
from burnish.models.quantization.export import group_of, perplexity
from burnish.models.quantization.quantize import use_kernels_that_train
from small_run import make_model, records

pytestmark = pytest.mark.run

STAND_IN = """
import json, shutil
class GPTQModel:
    @classmethod
    def load(cls, source, config, **more):
        made = cls()
        made.source, made.config, made.more = source, config, more
        return made
    def quantize(self, rows, **more):
        self.rows = rows
        if len(rows) == 13:
            raise ValueError("thirteen rows are too many")
    def save(self, target, **more):
        shutil.copytree(self.source, target)
        told = {"rows": self.rows, "config": self.config, **self.more, **more}
        open(target + "/quantize_config.json", "w").write(json.dumps(told))
        open(target + "/quant_log.csv", "w").write("layer,loss")
"""
CONFIGS = "def GPTQConfig(**given): return given\ndef AWQConfig(**given): return {'awq': True, **given}\n"


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("quantized")
    make_model(root / "model", hidden_size=64, intermediate_size=128, num_key_value_heads=4)
    (root / "rows.json").write_text(json.dumps(records(40)))
    return root


@pytest.fixture
def stand_in_package(tmp_path, monkeypatch):
    """A package "gptqmodel" that the quantization process imports instead of the library."""
    package = tmp_path / "stand_in" / "gptqmodel"
    (package / "quantization").mkdir(parents=True)
    (package / "__init__.py").write_text(STAND_IN)
    (package / "quantization" / "__init__.py").write_text("")
    (package / "quantization" / "config.py").write_text(CONFIGS)
    source = str(Path(__file__).parents[2] / "src")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(package.parent), source]))
    monkeypatch.setattr("burnish.models.quantization.export.find_spec", lambda name: object())
    return package.parent


@pytest.fixture
def stand_in(stand_in_package, monkeypatch):
    """The stand-in package, imported in this process."""

    def run_in_process(command, **more):
        quantized_export.main(Path(command[-1]))
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.syspath_prepend(stand_in_package)
    for name in [name for name in sys.modules if name.split(".")[0] == "gptqmodel"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(quantized_export.subprocess, "run", run_in_process)
    yield
    for name in [name for name in sys.modules if name.split(".")[0] == "gptqmodel"]:
        del sys.modules[name]


def run(root: Path, target: Path, **options) -> Path:
    options = {"model_name_or_path": str(root / "model"), "export_dir": str(target), "template": "chatml",
               "export_quantization_bit": 4, "export_quantization_dataset": str(root / "rows.json"),
               **options}  # fmt: skip
    return export({name: RawValue(value, "the command line") for name, value in options.items()})


def test_template_rows_calibrate_and_others_measure_perplexity(root, tmp_path, stand_in, capsys):
    folder = run(root, tmp_path / "out", export_quantization_nsamples=20, export_quantization_maxlen=48)
    stored = json.loads((folder / "quantize_config.json").read_text())
    assert len(stored["rows"]) == 20
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = [tokenizer.decode(row["input_ids"]) for row in stored["rows"]]
    assert all(text.startswith("<|im_start|>user\nRepeat") for text in texts)
    assert max(len(row["input_ids"]) for row in stored["rows"]) <= 48
    assert stored["config"] == {"bits": 4, "group_size": 64, "offload_to_disk": False, "act_group_aware": True}
    assert stored["device"] == "cpu"
    assert "Perplexity on 4 other examples" in capsys.readouterr().out


def test_quantized_folder_is_complete_without_temporary_files(root, tmp_path, stand_in):
    folder = run(root, tmp_path / "place" / "out")
    assert {path.name for path in folder.iterdir()} == {
        "README.md", "chat_template.jinja", "config.json", "generation_config.json", "model.safetensors",
        "quantize_config.json", "tokenizer.json", "tokenizer_config.json",
    }  # fmt: skip
    assert [path.name for path in folder.parent.iterdir()] == ["out"]
    card = (folder / "README.md").read_text()
    assert "GPTQ, 4 bits, group size 64, calibrated with 36 examples." in card
    assert "vllm serve out" in card
    header = yaml.safe_load(card.split("---")[1])
    assert header["tags"] == ["burnish", "gptq"]
    assert str(root) not in card


def test_perplexity_uses_eval_dataset_if_given(root, tmp_path, stand_in, capsys):
    (tmp_path / "held.json").write_text(json.dumps(records(3)))
    run(root, tmp_path / "out", eval_dataset=str(tmp_path / "held.json"))
    output = capsys.readouterr().out
    assert "calibrated with 40 examples" in output
    assert "Perplexity on 3 other examples" in output


def test_perplexity_is_exp_of_mean_loss_over_trained_tokens(root):
    model = AutoModelForCausalLM.from_pretrained(root / "model").eval()
    ids, labels = [5, 6, 7, 8, 9], [-100, -100, 7, 8, -100]
    with torch.no_grad():
        expected = model(input_ids=torch.tensor([ids]), labels=torch.tensor([labels])).loss.exp().item()
    assert perplexity(model, [{"input_ids": ids, "labels": labels}]) == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_library_failure_is_reported_and_leaves_no_folder(root, tmp_path, stand_in_package):
    with pytest.raises(RuntimeError, match="thirteen rows are too many"):
        run(root, tmp_path / "place" / "out", export_quantization_nsamples=13)
    assert list((tmp_path / "place").iterdir()) == []


REJECTED = {
    "awq with 8 bits": (
        {"export_quantization_method": "awq", "export_quantization_bit": 8},
        "export_quantization_bit: 4",
    ),
    "5 bits": ({"export_quantization_bit": 5}, "export_quantization_bit"),
    "no data": ({"export_quantization_dataset": None}, "no dataset is set"),
    "a missing dataset": ({"export_quantization_dataset": "nowhere.json"}, "nowhere"),
    "gguf and quantization": ({"export_format": "gguf"}, "export_gguf_type: q4_0"),
    "unknown method": ({"export_quantization_method": "aqlm"}, "gptq"),
}


@pytest.mark.parametrize("name", REJECTED)
def test_invalid_quantized_export_is_rejected_before_reading_weights(root, tmp_path, stand_in, name):
    options, message = REJECTED[name]
    with pytest.raises(UserError, match=message):
        run(root, tmp_path / "place" / "out", **options)
    assert not (tmp_path / "place").exists()


def test_missing_quantization_library_is_reported_with_its_extra(root, tmp_path, monkeypatch):
    monkeypatch.setattr("burnish.models.quantization.export.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r'"burnish\[gptq\]"'):
        run(root, tmp_path / "out")


def test_incompatible_layers_are_reported(tmp_path, stand_in):
    make_model(tmp_path / "model")  # its intermediate size is 48
    (tmp_path / "rows.json").write_text(json.dumps(records(4)))
    with pytest.raises(UserError, match=r"(?s)q_proj has 32 and 32.*export_quantization_method: gptq"):
        run(tmp_path, tmp_path / "out", export_quantization_method="awq")


def test_model_without_linear_layers_is_rejected_by_name(tmp_path, stand_in):
    make_model(tmp_path / "model")
    GPT2LMHeadModel(GPT2Config(vocab_size=320, n_embd=32, n_layer=1, n_head=2)).save_pretrained(tmp_path / "model")
    (tmp_path / "rows.json").write_text(json.dumps(records(4)))
    with pytest.raises(UserError, match=r"GPT2LMHeadModel has no torch\.nn\.Linear layers"):
        run(tmp_path, tmp_path / "out")


def test_group_size_is_the_largest_divisor_of_all_layers(root, tmp_path):
    assert group_of(AutoModelForCausalLM.from_pretrained(root / "model")) == 64
    assert group_of(AutoModelForCausalLM.from_pretrained(make_model(tmp_path / "model"))) == -1


def test_llamafactory_quantization_config_is_accepted(root, tmp_path, stand_in, monkeypatch, capsys):
    monkeypatch.chdir(root)
    Path("c4_demo.jsonl").write_text("".join(json.dumps({"text": f"stone {n} river lamp"}) + "\n" for n in range(30)))
    Path("quantize.yaml").write_text(
        "### model\nmodel_name_or_path: model\ntemplate: qwen3_nothink\ntrust_remote_code: true\n\n"
        f"### export\nexport_dir: {tmp_path / 'gptq'}\n"
        "export_quantization_bit: 4\n"
        "export_quantization_dataset: c4_demo.jsonl\nexport_size: 5\nexport_device: cpu\nexport_legacy_format: false\n"
    )
    assert main(["export", "quantize.yaml"]) == 0
    stored = json.loads((tmp_path / "gptq" / "quantize_config.json").read_text())
    assert AutoTokenizer.from_pretrained("model").decode(stored["rows"][0]["input_ids"]).startswith("stone ")


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_4_bit_model_loads_in_transformers_with_similar_outputs(method, root, tmp_path):
    for library in ("gptqmodel", "optimum"):
        if find_spec(library) is None:
            pytest.skip(f"{library} is not installed")
    folder = run(root, tmp_path / "out", export_quantization_method=method)
    config = AutoConfig.from_pretrained(folder)
    use_kernels_that_train(config)
    model = AutoModelForCausalLM.from_pretrained(folder, config=config).eval()
    assert any(hasattr(module, "qweight") for module in model.modules())
    original = AutoModelForCausalLM.from_pretrained(root / "model").eval()
    rows = [{"input_ids": list(range(20, 60)), "labels": list(range(20, 60))}]
    with torch.compiler.set_stance("force_eager"):  # no kernel is compiled for a single row
        result = perplexity(model, rows)
    assert result == pytest.approx(perplexity(original, rows), rel=0.05)
    assert result != perplexity(original, rows)
