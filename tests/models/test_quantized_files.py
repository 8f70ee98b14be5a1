"""Models stored in 4 bits (GPTQ and AWQ) are trained with LoRA on a CPU.

The files are packed here, in the published formats: GPTQ packs eight numbers along the inputs and stores zero points
minus one, https://github.com/AutoGPTQ/AutoGPTQ (auto_gptq/nn_modules/qlinear/qlinear_cuda_old.py, v0.7.1); AWQ packs
eight numbers along the outputs in the order 0, 2, 4, 6, 1, 3, 5, 7, https://github.com/casper-hansen/AutoAWQ
(awq/utils/packing_utils.py, v0.2.9). The layers are those of the library gptqmodel.
"""

# I inputs, O outputs, G inputs that share a scale

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from burnish.cli import main
from burnish.models.quantization.quantize import use_kernels_that_train
from burnish.run import build
from dense_weights import dense
from small_run import as_arguments, make_workspace

G = 16
IDS = torch.tensor([[5, 6, 7, 8, 9, 10]])
DESCRIBED = {
    "gptq": {"desc_act": False, "sym": True, "checkpoint_format": "gptq"},
    "awq": {"zero_point": True, "version": "gemm"},
}
LINEAR = "_proj.weight"


def packed(numbers, dim, order=range(8)):
    """Pack eight 4-bit numbers into each int32, the first into the lowest bits."""
    groups_of_8 = numbers.unflatten(dim, (-1, 8)).movedim(dim + 1, 0)
    words = sum(groups_of_8[entry] << (4 * place) for place, entry in enumerate(order))
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32).contiguous()


def quantized(weight, method):
    """Return the tensors of a quantized layer, and the (O, I) weight that they represent: 16 levels, zero point 8."""
    columns = weight.t().unflatten(0, (-1, G))  # (I / G, G, O)
    scales = (columns.abs().amax(1) / 7).half()
    numbers = (columns / scales[:, None].float()).round().clamp(-8, 7).long() + 8
    dequantized = ((numbers - 8) * scales[:, None].float()).flatten(0, 1).t()
    zeros, numbers = torch.full(scales.shape, 8), numbers.flatten(0, 1)
    if method == "gptq":
        groups = torch.arange(weight.shape[1]) // G
        result = {"qweight": packed(numbers, 0), "qzeros": packed(zeros - 1, 1), "g_idx": groups.int()}
    else:
        order = (0, 2, 4, 6, 1, 3, 5, 7)
        result = {"qweight": packed(numbers, 1, order), "qzeros": packed(zeros, 1, order)}
    return {**result, "scales": scales.contiguous()}, dequantized


def quantize(folder, method):
    """Rewrite the model in ``folder`` with packed layers, as on the hub. Return layer -> the weight it represents."""
    files, weights = {}, {}
    for name, weight in load_file(folder / "model.safetensors").items():
        if not name.endswith(LINEAR):
            files[name] = weight.half()
            continue
        layer = name.removesuffix(".weight")
        tensors, weights[layer] = quantized(weight, method)
        files |= {f"{layer}.{part}": tensor for part, tensor in tensors.items()}
    save_file(files, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    described = {"quant_method": method, "bits": 4, "group_size": G, **DESCRIBED[method]}
    (folder / "config.json").write_text(json.dumps({**config, "dtype": "float16", "quantization_config": described}))
    return weights


def ready(tmp_path, method, **options):
    """Return the options of a run with a packed base model, and the weights of its layers."""
    options = make_workspace(
        tmp_path, finetuning_type="lora", learning_rate=1e-2, plot_loss=False, max_steps=6, save_steps=4,
        save_strategy="steps", **options,
    )  # fmt: skip
    return options, quantize(tmp_path / "model", method)


@pytest.fixture
def models(monkeypatch):
    """Return the list of models that runs have trained, in order."""
    result = []
    original = build.resize_embeddings

    def common(model, *more):
        result.append(model)
        return original(model, *more)

    monkeypatch.setattr(build, "resize_embeddings", common)
    return result


def log_of(folder):
    return json.loads((folder / "trainer_state.json").read_text())["log_history"]


# gptqmodel compiles kernels for GPTQ.
@pytest.mark.parametrize("method", [pytest.param("gptq", marks=pytest.mark.slow), "awq"])
def test_prequantized_model_trains_resumes_generates_and_loads_in_peft(method, tmp_path, monkeypatch, models, capfd):
    pytest.importorskip("gptqmodel")
    if method == "gptq":
        pytest.importorskip("optimum")
    monkeypatch.setenv("BURNISH_CACHE", str(tmp_path / "cache"))
    overrides, weights = ready(tmp_path, method)
    before = (tmp_path / "model" / "model.safetensors").read_bytes()
    assert main(["train", *as_arguments(overrides)]) == 0
    assert f"On a CPU, {method}-quantized weights use the kernel" in capfd.readouterr().out

    losses = [entry["loss"] for entry in log_of(tmp_path / "out") if "loss" in entry]
    assert losses[-1] < losses[0] - 0.02
    assert (tmp_path / "model" / "model.safetensors").read_bytes() == before
    (model,) = models
    for layer, weight in weights.items():
        torch.testing.assert_close(dense(model.get_submodule(layer).base_layer), weight, rtol=1e-3, atol=1e-4)

    again = {**overrides, "output_dir": str(tmp_path / "again"), "save_steps": 6,
             "resume_from_checkpoint": str(tmp_path / "out" / "checkpoint-4")}  # fmt: skip
    assert main(["train", *as_arguments(again)]) == 0
    whole, resumed = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("out", "again"))
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    assert any(bool(tensor.any()) for name, tensor in whole.items() if "lora_B" in name)

    options = {"do_train": False, "do_predict": True, "predict_with_generate": True, "predict_metrics": "exact_match",
               "max_new_tokens": 3, "adapter_name_or_path": str(tmp_path / "out"), "output_dir": str(tmp_path / "said"),
               "eval_dataset": overrides["dataset"], "max_samples": 4}  # fmt: skip
    common = {name: overrides[name] for name in ("model_name_or_path", "finetuning_type", "use_cpu", "cutoff_len")}
    assert main(["train", *as_arguments({**common, **options})]) == 0
    assert len((tmp_path / "said" / "generated_predictions.jsonl").read_text().splitlines()) == 4

    peft = pytest.importorskip("peft")
    config = AutoConfig.from_pretrained(tmp_path / "model")
    use_kernels_that_train(config)
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "model", config=config)
    theirs = peft.PeftModel.from_pretrained(base, str(tmp_path / "out")).eval()
    with torch.no_grad():
        torch.testing.assert_close(theirs(IDS).logits, model.eval()(IDS).logits, rtol=2e-3, atol=2e-3)
        with theirs.disable_adapter():
            assert not torch.allclose(theirs(IDS).logits, model(IDS).logits, atol=1e-2)


@pytest.mark.parametrize("method", DESCRIBED)
def test_prequantized_model_without_library_suggests_installation(method, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr("burnish.models.quantization.quantize.find_spec", lambda name: None)
    options, _ = ready(tmp_path, method)
    assert main(["train", *as_arguments(options)]) == 2
    output = capfd.readouterr().err
    assert f"its weights are quantized with {method}" in output
    assert "pip install gptqmodel" in output
    assert not (tmp_path / "out").exists()
