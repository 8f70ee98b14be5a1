"""Concurrent completions: their number, insufficient memory, and temporarily merged adapters."""

from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from burnish.adapters.lora_model import merge_temporarily
from burnish.config.errors import UserError
from burnish.inference.forward import SlotForward
from burnish.inference.types import ROLLOUT, NoiseKey, Sampling
from burnish.models.patches.packed import packed_weights
from burnish.rollouts.completions import CompletionLimits, SlotSource
from burnish.run import rollouts
from small_run import make_model

PROMPTS = [[3 + at // 2 % 7, 20, 30 + at // 2] for at in range(16)]
KEYS = [NoiseKey(0, ROLLOUT, 1, at // 2, at % 2) for at in range(16)]
LIMITS = CompletionLimits(10, frozenset({2}), Sampling(seed=0))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("seats") / "model")


def adapted(folder, dtype=torch.float32, **options):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    config = LoraConfig(r=4, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM", **options)
    model = get_peft_model(model, config).eval()
    torch.manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.normal_(std=0.2)
    return model


def test_merged_adapter_gives_same_logits_and_restores_weights(folder):
    model, ids = adapted(folder), torch.tensor([PROMPTS[0]])
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    with torch.no_grad():
        plain, base = model(ids).logits, model.get_base_model()
        with merge_temporarily(base):
            layer = base.model.layers[0].self_attn.q_proj
            assert layer.merged
            assert not torch.equal(
                layer.base_layer.weight, before[next(n for n in before if "0.self_attn.q_proj.b" in n)]
            )
            torch.testing.assert_close(model(ids).logits, plain, atol=1e-5, rtol=1e-4)
        assert torch.equal(model(ids).logits, plain)
        with pytest.raises(KeyError), merge_temporarily(base):
            raise KeyError
    assert not layer.merged
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())


@pytest.mark.parametrize(("dtype", "options"), [(torch.bfloat16, {}), (torch.float32, {"use_dora": True})])
def test_adapter_that_cannot_be_merged_exactly_is_applied(folder, dtype, options):
    model = adapted(folder, dtype, **options)
    with merge_temporarily(model):
        assert not model.get_base_model().model.layers[0].self_attn.q_proj.merged


def test_adapter_of_a_head_that_is_tied_to_the_embedding_is_applied(folder):
    """Merging into the shared weight would also change the embedding."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.lm_head.weight = model.get_input_embeddings().weight
    model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "lm_head"])).eval()
    ids = torch.tensor([PROMPTS[0]])
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.normal_(std=0.2)
        plain = model(ids).logits
        with merge_temporarily(model):
            torch.testing.assert_close(model(ids).logits, plain, atol=1e-5, rtol=1e-4)


def test_completions_of_merged_and_applied_adapter_are_equal(folder):
    model = adapted(folder)
    made = [SlotSource(model, 8, 256, nullcontext, merging=each).complete(PROMPTS, KEYS, LIMITS)
            for each in (nullcontext, partial(merge_temporarily, model))]  # fmt: skip
    assert made[0] == made[1]


@pytest.mark.parametrize("is_adapted", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_completions_with_packed_and_plain_weights_are_equal(folder, is_adapted, dtype):
    model = adapted(folder) if is_adapted else AutoModelForCausalLM.from_pretrained(folder).eval()
    precision = partial(torch.autocast, "cpu", dtype, enabled=dtype != torch.float32)
    made = [
        SlotSource(model, 8, 256, precision, merging=partial(merge_temporarily, model), packing=each).complete(
            PROMPTS, KEYS, LIMITS
        )
        for each in (nullcontext, partial(packed_weights, model))
    ]
    assert made[0] == made[1]


def test_out_of_memory_retries_with_fewer_slots(folder, monkeypatch, capsys):
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    whole = SlotSource(model, 6, 256, nullcontext).complete(PROMPTS, KEYS, LIMITS)
    run, most = SlotForward.run, 6

    def bounded(self, first, rows):
        if len(rows) > most:
            raise torch.OutOfMemoryError("not enough memory")
        return run(self, first, rows)

    monkeypatch.setattr(SlotForward, "run", bounded)
    source = SlotSource(model, 16, 256, nullcontext)
    assert source.complete(PROMPTS, KEYS, LIMITS) == whole
    assert source.scheduler.facts().slots == 6
    assert source.complete(PROMPTS, KEYS, LIMITS) == whole
    output = " ".join(capsys.readouterr().out.split())
    assert "Out of memory with 16 concurrent completions" in output
    assert "restarts with 9." in output
    assert output.count("Out of memory") == 3


def test_insufficient_memory_for_one_completion_is_rejected(folder, monkeypatch):
    source = SlotSource(AutoModelForCausalLM.from_pretrained(folder).eval(), 2, 256, nullcontext)
    source.complete(PROMPTS, KEYS, LIMITS)

    def fails(self, first, rows):
        raise torch.OutOfMemoryError("not enough memory")

    source.free()
    monkeypatch.setattr(SlotForward, "run", fails)
    with pytest.raises(UserError, match="not enough memory for a single completion"):
        source.complete(PROMPTS, KEYS, LIMITS)


@pytest.mark.parametrize(
    ("requested", "gigabytes", "seats"), [(None, 1000, 48), (None, 0.01, 4), (None, 0, 1), (7, 0, 7)]
)
def test_number_of_slots_is_the_requested_one_or_fits_into_memory(folder, monkeypatch, requested, gigabytes, seats):
    monkeypatch.setattr(rollouts, "total_memory", lambda device: int(gigabytes * 1e9))
    config = AutoModelForCausalLM.from_pretrained(folder).config
    config.update({"num_hidden_layers": 4, "num_key_value_heads": 2, "head_dim": 64, "hidden_size": 512})
    objective = SimpleNamespace(
        choices=SimpleNamespace(max_concurrent_completions=requested, num_generations=8), rows_per_rank=6
    )
    assert rollouts.slots_of(objective, torch.device("cpu"), config, 150) == seats
