"""Attention over concatenated sequences equals attention over each sequence alone."""

import sys
from types import SimpleNamespace

import pytest
import torch
import transformers
from packaging.version import Version

from burnish.data.batches.batching import collate_padding_free
from burnish.kernels import attention
from burnish.kernels.attention import Scores, Sequences, flat_attention, masked_attention
from burnish.kernels.probe import find_head, isolates_sequences
from burnish.models.patches.attention import PaddingFree, make_padding_free
from burnish.parallel.single import ParallelOptions, SingleProcess
from tiny_shapes import KEEPS_APART, tiny

LENGTHS = [5, 1, 140, 33]


def inputs(heads=4, keys=2, size=8, value_size=8, dtype=torch.float32, lengths=LENGTHS):
    torch.manual_seed(3)
    shapes = [(heads, size), (keys, size), (keys, value_size)]
    return [torch.randn(sum(lengths), *shape, dtype=dtype, requires_grad=True) for shape in shapes]


def causal_sequences(lengths=LENGTHS):
    begins = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)
    return Sequences.alone(begins, max(lengths))


def reference(query, key, value, scores, lengths=LENGTHS):
    """Return attention from one (T, T) matrix in float64: tokens attend to preceding ones of their sequence."""
    owner = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    positions = torch.arange(len(owner))
    distance = positions[:, None] - positions[None, :]
    is_visible = (owner[:, None] == owner[None, :]) & (distance >= 0) & (distance < (scores.window or len(owner)))
    groups = query.shape[1] // key.shape[1]
    q, k, v = query.double(), key.double().repeat_interleave(groups, 1), value.double().repeat_interleave(groups, 1)
    attention_scores = torch.einsum("thd,shd->hts", q, k) * (scores.scale or q.shape[-1] ** -0.5)
    if scores.softcap:
        attention_scores = scores.softcap * torch.tanh(attention_scores / scores.softcap)
    attention_scores = attention_scores.masked_fill(~is_visible, float("-inf"))
    if scores.sinks is not None:
        attention_scores = torch.cat(
            [attention_scores, scores.sinks.double()[:, None, None].expand(-1, len(owner), 1)], -1
        )
    return torch.einsum("hts,shd->thd", attention_scores.softmax(-1)[..., : len(owner)], v)


CASES = {
    "plain": Scores(),
    "scaled": Scores(scale=0.5),
    "window": Scores(window=4),
    "window of a sequence's length": Scores(window=140),
    "softcap": Scores(softcap=2.0),
    "sinks": Scores(sinks=torch.tensor([0.5, -1.0, 2.0, 0.0])),
    "softcap and window": Scores(softcap=2.0, window=7),
}


@pytest.mark.parametrize("scores", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("keys", [4, 2, 1], ids=["a key per query", "shared keys", "one key"])
def test_each_sequence_matches_its_single_result(scores, keys):
    tensors = inputs(keys=keys)
    mixed = flat_attention(*tensors, causal_sequences(), scores)
    expected = reference(*tensors, scores)
    assert (mixed - expected).abs().max() < 1e-5
    grad = torch.randn_like(mixed)
    for ours, theirs in zip(
        torch.autograd.grad(mixed, tensors, grad), torch.autograd.grad(expected, tensors, grad.double()), strict=True
    ):
        assert (ours - theirs).abs().max() < 1e-5


def test_value_can_have_another_size_than_key():
    tensors = inputs(keys=4, value_size=6)
    assert (flat_attention(*tensors, causal_sequences(), Scores()) - reference(*tensors, Scores())).abs().max() < 1e-5


@pytest.mark.parametrize("length", [100, 600], ids=["short", "blockwise"])
def test_bfloat16_is_as_accurate_as_plain_attention(length):
    lengths = [length]
    tensors = inputs(dtype=torch.bfloat16, lengths=lengths)
    exact = reference(*tensors, Scores(), lengths)
    query, key, value = (t.transpose(0, 1).repeat_interleave(4 // t.shape[1], 0) for t in tensors)
    scores = (query @ key.transpose(1, 2) * 8**-0.5).masked_fill(torch.ones(length, length).triu(1).bool(), -torch.inf)
    plain = (scores.softmax(-1, dtype=torch.float32).bfloat16() @ value).transpose(0, 1)
    ours = flat_attention(*tensors, causal_sequences(lengths), Scores())
    assert (ours - exact).abs().mean() < 1.05 * (plain - exact).abs().mean()


def test_autocast_sets_dtype_even_if_queries_and_values_differ():
    query, key, value = inputs()
    with torch.autocast("cpu", torch.bfloat16):
        mixed = flat_attention(query, key, value.bfloat16(), causal_sequences(), Scores())
    assert mixed.dtype == torch.bfloat16


@pytest.mark.parametrize("before", [1, 37, 300])
def test_long_sequence_attends_to_a_shared_prefix_and_causally_to_itself(before):
    length = attention._LONG + 7
    key, value = (torch.randn(before + length, 2, 8, requires_grad=True) for _ in range(2))
    query = torch.randn(length, 4, 8, requires_grad=True)
    bounds = (torch.tensor([0, count], dtype=torch.int32) for count in (length, before + length))
    (begins, key_begins), width = bounds, before + length
    result = flat_attention(query, key, value, Sequences(begins, length, key_begins, width), Scores())
    padded_query = torch.cat([query.new_zeros(before, 4, 8), query])
    expected = reference(padded_query, key, value, Scores(), [width])[before:]
    assert (result - expected).abs().max() < 1e-5
    upstream = torch.randn_like(result)
    grads = (torch.autograd.grad((output * upstream).sum(), (query, key, value)) for output in (result, expected))
    for gradient, expected_gradient in zip(*grads, strict=True):
        assert (gradient - expected_gradient).abs().max() < 1e-4


def test_dropout_zeroes_weights_and_keeps_the_mean():
    ones = [torch.ones(4000, 1, 1), torch.zeros(4000, 1, 1), torch.ones(4000, 1, 1)]
    torch.manual_seed(0)
    mixed = flat_attention(*ones, causal_sequences([100] * 40), Scores(dropout=0.3))
    assert mixed.mean() == pytest.approx(1, abs=0.02)
    assert mixed.std() > 0.01


def test_masked_attention_accepts_both_mask_types():
    query, key, value = (tensor.transpose(0, 1) for tensor in inputs())
    is_visible = torch.rand(query.shape[1], query.shape[1]) > 0.3
    is_visible.fill_diagonal_(True)
    bias = torch.zeros(is_visible.shape).masked_fill(~is_visible, float("-inf"))
    from_boolean = masked_attention(query, key, value, is_visible, Scores())
    assert torch.equal(from_boolean, masked_attention(query, key, value, bias, Scores()))


# --- the kernels of a GPU, tested on a CPU ----------------------------------------------------------------------------


def test_kernel_is_selected_by_its_capabilities(monkeypatch):
    monkeypatch.setattr(attention, "_is_installed", lambda name: name.startswith("torch"))
    assert attention.kernel_for(torch.bfloat16, Scores(window=4)) is attention._torch_varlen
    assert attention.kernel_for(torch.float32, Scores()) is None
    assert attention.kernel_for(torch.bfloat16, Scores(softcap=30.0)) is None
    assert attention.kernel_for(torch.bfloat16, Scores(dropout=0.1)) is None
    monkeypatch.setattr(attention, "_is_installed", lambda name: True)
    assert attention.kernel_for(torch.float16, Scores(softcap=30.0, dropout=0.1)) is attention._flash_attn
    assert attention.kernel_for(torch.float16, Scores(sinks=torch.zeros(4))) is None


def test_flash_attention_is_fetched_if_torch_lacks_it_and_kernels_is_installed(monkeypatch):
    class FlashAttention:
        def flash_attn_varlen_func(q, k, v, cu_q, cu_k, max_q, max_k, **overrides):
            return q, overrides

    hub = SimpleNamespace(get_kernel=lambda name, version: FlashAttention)
    monkeypatch.setitem(sys.modules, "kernels", hub)
    monkeypatch.setattr(attention, "_is_installed", lambda name: name != "flash_attn")
    for cached_function in (attention._flash_of_hub, attention._flash_function):
        cached_function.cache_clear()
    try:
        assert attention.kernel_for(torch.bfloat16, Scores()) is attention._torch_varlen
        capped = Scores(softcap=30.0, window=4)
        kernel = attention.kernel_for(torch.bfloat16, capped)
        _, options = kernel(*inputs(), causal_sequences(), capped)
        assert options["softcap"] == 30.0
        assert options["window_size"] == (3, 0)
        hub.get_kernel = lambda name, version: (_ for _ in ()).throw(OSError("no network"))
        attention._flash_of_hub.cache_clear()
        with pytest.warns(UserWarning, match="no network.*a separate call per sequence"):
            assert attention.kernel_for(torch.bfloat16, capped) is None
    finally:
        for cached_function in (attention._flash_of_hub, attention._flash_function):
            cached_function.cache_clear()


@pytest.mark.parametrize("shares_keys", [True, False], ids=["torch 2.12", "torch 2.11"])
@pytest.mark.parametrize("window", [None, 4])
def test_torch_kernel_receives_equivalent_attention(monkeypatch, shares_keys, window):
    def stand_in(query, key, value, cu_q, cu_k, max_q, max_k, *, scale, window_size, enable_gqa=False):
        assert (query.shape[1] != key.shape[1]) == enable_gqa
        assert window_size == (-1 if window is None else window - 1, 0)
        left = window_size[0] + 1 if window_size[0] >= 0 else None
        return reference(query, key, value, Scores(scale, left)).float()

    monkeypatch.setattr(attention, "_varlen_attn", lambda: (stand_in, shares_keys))
    tensors, scores = inputs(), Scores(window=window)
    output = attention._torch_varlen(*tensors, causal_sequences(), scores)
    assert (output - flat_attention(*tensors, causal_sequences(), scores)).abs().max() < 1e-5


def test_compiled_layer_has_no_graph_break_at_torch_kernel(monkeypatch):
    """A graph break per layer would silently make layers slower."""

    def stand_in(query, key, value, *where, enable_gqa=False, **options):
        return query * key.mean() + value.mean()

    monkeypatch.setattr(attention, "_WITH_KERNELS", {"cpu"})
    monkeypatch.setitem(attention._INSTALLED_MODULES, "flash_attn", False)
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", stand_in)
    tensors = [tensor.bfloat16() for tensor in inputs()]
    compiled = torch.compile(flat_attention, backend="eager", fullgraph=True)
    assert torch.equal(compiled(*tensors, causal_sequences(), Scores()), stand_in(*tensors))


# --- transformers' models ---------------------------------------------------------------------------------------------


def flat(*sequences):
    return collate_padding_free([{"input_ids": ids, "labels": ids} for ids in sequences])


def logits(model, batch):
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    with torch.no_grad():
        return model.eval()(**inputs, use_cache=False).logits


def rows(*lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 97, (n,), generator=generator).tolist() for n in lengths]


@pytest.mark.parametrize("family", KEEPS_APART)
def test_flat_sequences_get_logits_of_single_ones(family):
    model, sequences = tiny(family), rows(7, 1, 12)
    single = torch.cat([logits(model, {"input_ids": torch.tensor([ids])}) for ids in sequences], 1)
    assert make_padding_free(model) == PaddingFree(True)
    assert model.config._attn_implementation == "burnish"
    assert (logits(model, flat(*sequences)) - single).abs().max() < 1e-5 * single.abs().max()


before_524 = pytest.mark.skipif(
    Version(transformers.__version__) >= Version("5.24"), reason="transformers 5.24 passes the boundaries of sequences"
)


@pytest.mark.parametrize("family", ["stablelm", pytest.param("gptj", marks=before_524)])
def test_model_without_sequence_boundaries_attends_under_a_mask(family):
    model = tiny(family)
    before = model.config._attn_implementation
    layout = make_padding_free(model)
    assert layout.is_padding_free
    assert "uses an attention mask" in layout.note
    assert model.config._attn_implementation == before


@pytest.mark.parametrize("family", ["bloom", pytest.param("falcon", marks=before_524), "mamba"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_model_that_mixes_neighbors_is_detected(family, dtype):
    layout = make_padding_free(tiny(family, dtype))
    assert not layout.is_padding_free
    assert "batches are padded" in layout.note


def test_requested_attention_is_unchanged():
    model = tiny("llama")
    model.set_attn_implementation("eager")
    make_padding_free(model, own_attention=False)
    assert model.config._attn_implementation == "eager"


def test_attention_check_does_not_change_the_model():
    model = tiny("llama", attention_dropout=0.1)
    model.model.layers[0].eval()
    modes = [module.training for module in model.modules()]
    before, parameters = torch.get_rng_state(), [p.clone() for p in model.parameters()]
    isolates_sequences(model)
    find_head(model)
    assert torch.equal(torch.get_rng_state(), before)
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(p, q) and p.grad is None for p, q in zip(model.parameters(), parameters, strict=True))


@pytest.mark.parametrize("family", ["llama", "gemma2", "mistral", "gpt_oss"])
def test_non_flat_batches_use_original_attention(family):
    model = tiny(family)
    batch = {"input_ids": torch.tensor(rows(9, 9)), "attention_mask": torch.ones(2, 9, dtype=torch.long)}
    batch["attention_mask"][0, :4] = 0
    before = logits(model, batch)
    make_padding_free(model)
    is_token = batch["attention_mask"].bool()
    assert (logits(model, batch) - before)[is_token].abs().max() < 1e-5 * before.abs().max()


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_generation_is_unchanged(family):
    model = tiny(family).eval()
    options = {"input_ids": torch.tensor(rows(6, 6)), "max_new_tokens": 8, "do_sample": False}
    before = model.generate(**options)
    make_padding_free(model)
    assert torch.equal(model.generate(**options), before)


def test_burnish_attention_is_not_saved_in_config(tmp_path):
    model = tiny("llama")
    make_padding_free(model)
    model.save_pretrained(tmp_path)
    assert "burnish" not in (tmp_path / "config.json").read_text()


def test_gradients_through_checkpointed_layers_are_equal():
    model, sequences = tiny("qwen2"), rows(7, 12)
    make_padding_free(model)
    batch = flat(*sequences)
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    gradients = []
    for checkpointed in (False, True):
        SingleProcess(ParallelOptions(use_cpu=True, gradient_checkpointing=checkpointed)).prepare(model, None)
        model.train().zero_grad()
        model(**inputs, use_cache=False).logits.square().sum().backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


HEADS = {"llama": (1, None), "gemma2": (1, 30.0), "cohere": (0.0625, None), "granite": (0.25, None), "phi": (1, None)}


@pytest.mark.parametrize("family", HEADS)
def test_head_of_a_model_is_found(family):
    head = find_head(tiny(family))
    assert (head.scale, head.softcap) == HEADS[family]


def test_head_with_additional_operations_is_detected():
    capped, adapted, hooked = tiny("gemma2"), tiny(), tiny()
    capped.config.final_logit_softcapping = None
    capped.forward = lambda *args, own=capped.forward, **kwargs: _capped(own(*args, **kwargs))
    assert find_head(capped) is None
    adapted.lm_head = torch.nn.Sequential(adapted.lm_head)
    assert find_head(adapted) is None
    hooked.lm_head.register_forward_hook(lambda *_: None)
    assert find_head(hooked) is None


def _capped(output):
    output.logits = 30 * torch.tanh(output.logits / 30)
    return output


@pytest.mark.parametrize("window", [None, 5, 4200])
def test_few_tokens_after_long_prefix_allocate_no_square_mask(window):
    """The mask has a row for each of these tokens only, not for each token of the longest sequence."""
    length, before = 3, attention._MOST_KEPT + 10
    size = before + length
    mask = attention._band_mask(length, before, before, window, torch.bfloat16, torch.device("cpu"))
    assert mask.untyped_storage().nbytes() == length * size * 2
    distance = torch.arange(before, size)[:, None] - torch.arange(size)
    assert torch.equal(mask == 0, (distance >= 0) & (distance < (window or size)))
