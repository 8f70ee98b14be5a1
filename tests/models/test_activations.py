"""Activation checkpointing and offloading leave gradients unchanged."""

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM

from burnish.data.batches.batching import collate_padding_free
from burnish.models.patches.attention import make_padding_free
from burnish.parallel.checkpointing import checkpoint_activations
from burnish.parallel.checks import parallel_notes
from burnish.parallel.offloading import Offloading
from burnish.parallel.single import ParallelOptions, SingleProcess


def llama(vocab_size=64):
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=vocab_size, hidden_size=32, intermediate_size=64, num_hidden_layers=3,
                         num_attention_heads=4, num_key_value_heads=2)  # fmt: skip
    return LlamaForCausalLM(config)


def batch():
    ids = torch.arange(48).reshape(2, 24) % 64
    return {"input_ids": ids, "labels": ids}


def gradients(model):
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def trained(model, around=None):
    model.train()
    with around or torch.enable_grad():
        loss = model(**batch()).loss
    loss.backward()
    return gradients(model)


def kept_bytes(model):
    """Return the bytes that autograd keeps after a forward pass, without the weights."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    recorded = {}

    def keep(tensor):
        recorded[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    model.train()
    with saved_tensors_hooks(keep, lambda tensor: tensor):
        model(**batch())
    return sum(size for address, size in recorded.items() if address not in weights)


SOME_LAYERS = pytest.mark.skipif(
    not hasattr(LlamaForCausalLM, "activation_checkpointing_enable"), reason="needs transformers 5.23"
)


@pytest.mark.parametrize(
    "arguments",
    [{}, {"selective": True}, {"use_reentrant": True}, pytest.param({"every_n_layers": 2}, marks=SOME_LAYERS)],
)
def test_recomputation_gives_the_same_gradient(arguments):
    plain = trained(llama())
    model = llama()
    checkpoint_activations(model, arguments)
    result = trained(model)
    assert plain.keys() == result.keys()
    assert all(torch.equal(plain[name], result[name]) for name in plain)


def test_selective_checkpointing_saves_memory_without_recomputing_products():
    whole, selective, plain = llama(), llama(), llama()
    checkpoint_activations(whole, None)
    checkpoint_activations(selective, {"selective": True})
    assert kept_bytes(whole) < kept_bytes(plain) / 2
    assert num_operations(selective) == num_operations(plain) < num_operations(whole)


def num_operations(model):
    """Return the floating-point operations of matrix products and attention in a forward and a backward pass."""
    with FlopCounterMode(display=False) as counter:
        trained(model)
    return counter.get_total_flops()


class CountingOffload(Offloading):
    """Counts the bytes that it offloads."""

    moved_bytes = 0

    def _to_storage(self, tensor):
        packed = super()._to_storage(tensor)
        self.moved_bytes += tensor.nbytes if packed[1] is not None else 0
        return packed


def test_offloaded_activations_return_and_weights_stay():
    plain = trained(llama())
    model = llama()
    offloading = CountingOffload(model, torch.device("cpu"), smallest=0)
    result = trained(model, offloading.forward())
    assert all(torch.equal(plain[name], result[name]) for name in plain)
    assert offloading.moved_bytes > 0
    small = CountingOffload(model, torch.device("cpu"))
    trained(model, small.forward())
    assert small.moved_bytes == 0


def test_checkpointing_with_offload_moves_only_layer_inputs():
    model, every = llama(), llama()
    checkpoint_activations(model, None)
    inputs_offloaded, all_offloaded = (
        CountingOffload(each, torch.device("cpu"), smallest=2 * 24 * 32 * 4) for each in (model, every)
    )
    plain = trained(every, all_offloaded.forward())
    result = trained(model, inputs_offloaded.forward())
    assert all(torch.equal(plain[name], result[name]) for name in plain)
    assert 0 < inputs_offloaded.moved_bytes < all_offloaded.moved_bytes / 3


def test_engine_offloads_only_on_gpu_and_reports_it():
    options = ParallelOptions(use_cpu=True, activation_offloading=True)
    assert any("activation_offloading" in note for note in parallel_notes(options))
    engine = SingleProcess(options)
    model, _ = engine.prepare(llama(), None)
    with engine.precision():
        trained(model)


@pytest.mark.parametrize("arguments", [{}, {"selective": True}])
def test_flat_half_precision_sequences_are_recomputed(arguments):
    def flat_gradients(model):
        assert make_padding_free(model).is_padding_free
        rows = [{"input_ids": list(range(length)), "labels": list(range(length))} for length in (9, 30, 400)]
        made = {name: value for name, value in collate_padding_free(rows).items() if name != "loss_weights"}
        model.train()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(**made).loss
        loss.backward()
        return gradients(model)

    plain, model = flat_gradients(llama(512)), llama(512)
    checkpoint_activations(model, arguments)
    result = flat_gradients(model)
    assert all(torch.equal(plain[name], result[name]) for name in plain)
