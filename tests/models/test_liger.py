"""Liger's kernels: where they are applied, what is rejected, and that its losses are never used.

A stand-in for the library records the requested kernels; the library itself is tested on a GPU, in test_gpu.py.
"""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from transformers.models.llama import modeling_llama

from burnish.config.errors import UserError
from burnish.models.patches import liger
from burnish.models.patches.liger import apply_liger, check_liger, takes_liger
from burnish.trainer.arguments.training import TrainingArguments
from burnish.trainer.trainer import Trainer
from burnish.utils.patching import patches_of, restore
from tiny_models import tiny_model, token_ids

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def fake_liger(monkeypatch):
    """Install a stand-in for Liger that supports Llama. It records the requested kernels in ``applied["switches"]`` and
    calls ``applied["does"]`` with the model."""
    applied = {"does": lambda model: None}

    def llama(rope=True, cross_entropy=False, fused_linear_cross_entropy=True, rms_norm=True, swiglu=True, model=None):
        pass

    def apply(model, **switches):
        applied["switches"] = switches
        applied["does"](model)

    library, parts, patches = (
        ModuleType(name)
        for name in ("liger_kernel", "liger_kernel.transformers", "liger_kernel.transformers.monkey_patch")
    )
    parts._apply_liger_kernel_to_instance = apply
    patches.MODEL_TYPE_TO_APPLY_LIGER_FN = {"llama": llama}
    for module in (library, parts, patches):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(liger, "find_spec", lambda name: name)
    yield applied
    restore(record for record in patches_of(torch.nn.Module()) if record.why is liger.LIGER)


def options(**overrides):
    defaults = {"enable_liger_kernel": None}
    return SimpleNamespace(**{**defaults, "liger_kernel_config": None, "use_cpu": True, **overrides})


@pytest.mark.usefixtures("fake_liger")
def test_liger_kernels_are_used_only_on_gpu():
    assert takes_liger(options(), GPU)
    assert not takes_liger(options(enable_liger_kernel=False), GPU)
    assert not takes_liger(options(), CPU)


def test_requesting_liger_on_cpu_or_without_library_is_rejected(monkeypatch):
    monkeypatch.setattr(liger, "find_spec", lambda name: None)
    message = "\n".join(map(str, check_liger(options(enable_liger_kernel=True))))
    assert '"enable_liger_kernel" is true, but its kernels run on a GPU only' in message
    assert "liger-kernel, which is not installed" in message
    assert message.count("enable_liger_kernel") == 1
    assert check_liger(options()) == []


def test_liger_losses_are_never_used(fake_liger):
    notes = apply_liger(tiny_model("llama"), {"rope": False, "fused_linear_cross_entropy": True})
    assert fake_liger["switches"] == {"rope": False, "cross_entropy": False, "fused_linear_cross_entropy": False}
    assert "fused_linear_cross_entropy has no effect" in notes[0]


@pytest.mark.usefixtures("fake_liger")
def test_unknown_liger_kernel_is_rejected_with_nearest_name():
    with pytest.raises(UserError, match=r'llama models have no "rmsnorm"\. Did you mean "rms_norm"'):
        apply_liger(tiny_model("llama"), {"rmsnorm": True})


@pytest.mark.usefixtures("fake_liger")
def test_unsupported_model_is_rejected_if_requested_or_unchanged():
    with pytest.raises(UserError, match='no kernels for a model of type "gpt2"'):
        apply_liger(tiny_model("gpt2"), None)
    assert apply_liger(tiny_model("gpt2"), None, is_asked=False) == []


def test_kernels_that_change_model_outputs_are_rejected(fake_liger):
    fake_liger["does"] = lambda model: model.model.norm.weight.data.mul_(1.5)
    with pytest.raises(UserError, match="change the output of this LlamaForCausalLM"):
        apply_liger(tiny_model("llama"), None)


class KernelNorm(torch.nn.Module):
    """A norm that fails on a CPU, as a GPU kernel does."""


def rotary_kernel(q, k, cos, sin):
    raise ValueError("cannot be accessed from Triton")


def test_other_models_of_the_family_are_not_changed(fake_liger, monkeypatch):
    """Liger replaces a class and a function of the family's Python module; a model on a CPU can run neither."""
    own_norm, own_rotary = modeling_llama.LlamaRMSNorm, modeling_llama.apply_rotary_pos_emb

    def replace(model):
        modeling_llama.LlamaRMSNorm = KernelNorm
        modeling_llama.apply_rotary_pos_emb = rotary_kernel

    fake_liger["does"] = replace
    monkeypatch.setattr(modeling_llama, "LlamaRMSNorm", own_norm)  # undone after the test
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", own_rotary)
    for _ in range(2):
        apply_liger(tiny_model("llama"), None)
    assert modeling_llama.LlamaRMSNorm is own_norm
    tiny_model("llama")(input_ids=token_ids())
    q, k, cos, sin = (torch.ones(1, 1, 2, 4) for _ in range(4))
    assert torch.equal(modeling_llama.apply_rotary_pos_emb(q, k, cos, sin)[0], own_rotary(q, k, cos, sin)[0])
    assert modeling_llama.apply_rotary_pos_emb.args == (rotary_kernel, own_rotary)  # not nested patches
    on_gpu = SimpleNamespace(is_cuda=True)
    with pytest.raises(ValueError, match="Triton"):
        modeling_llama.apply_rotary_pos_emb(on_gpu, k, cos, sin)


def test_refused_kernels_are_removed(fake_liger):
    own = modeling_llama.apply_rotary_pos_emb

    def replace(model):
        modeling_llama.apply_rotary_pos_emb = rotary_kernel
        model.model.norm.weight.data.mul_(1.5)

    fake_liger["does"] = replace
    with pytest.raises(UserError, match="change the output"):
        apply_liger(tiny_model("llama"), None)
    assert modeling_llama.apply_rotary_pos_emb is own


@pytest.mark.usefixtures("fake_liger")
def test_trainer_rejects_liger_on_cpu(tmp_path):
    rows = [{"input_ids": ids, "labels": ids} for ids in token_ids().tolist()]
    args = TrainingArguments(str(tmp_path), use_liger_kernel=True, use_cpu=True, report_to=[])
    with pytest.raises(UserError, match="GPU only"):
        Trainer(tiny_model("llama"), args, train_dataset=rows).train()
