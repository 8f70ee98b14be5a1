"""BAdam: one block at a time for exactly its interval, and resume within a block."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from burnish.checkpoint.checkpoint import load
from burnish.config.errors import UserError
from burnish.optim.badam import BadamOptions, blocks_of, check_badam
from burnish.optim.builtin import OptimOptions, create_optimizer
from regression_run import StopAt, make_run, same, weights

pytestmark = pytest.mark.run

NUM_LAYERS = 3


class Layered(nn.Module):
    """An input layer, three hidden layers and an output layer."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.embed = nn.Linear(4, 6)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(NUM_LAYERS))
        self.head = nn.Linear(6, 1)
        self.to(dtype)

    def forward(self, inputs):
        hidden = self.embed(inputs.to(self.embed.weight.dtype))
        for layer in self.layers:
            hidden = hidden + layer(hidden).tanh()
        return self.head(hidden).squeeze(-1).float()


def badam_options(**options):
    merged = {**vars(OptimOptions(learning_rate=1e-2)), **vars(BadamOptions(use_badam=True)), "seed": 1}
    return SimpleNamespace(**{**merged, **options})


def optimizer_of(model, **options):
    return create_optimizer(model.named_parameters(), model, badam_options(**options))


def updates(optimizer, model, count):
    """Return the layer that changed in each of ``count`` updates."""
    changed = []
    for _ in range(count):
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        model(torch.randn(5, 4)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        moved = {name.rsplit(".", 1)[0] for name, p in model.named_parameters() if not torch.equal(p, before[name])}
        changed.append(moved)
    return changed


def layers_moved(**options):
    torch.manual_seed(0)
    model = Layered()
    moved = updates(optimizer_of(model, **options), model, options.pop("count", 8))
    assert all(len(names) == 1 for names in moved)
    return [int(next(iter(names)).split(".")[1]) for names in moved]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"badam_switch_mode": "ascending"}, [0, 0, 1, 1, 2, 2, 0, 0]),
        ({"badam_switch_mode": "descending"}, [2, 2, 1, 1, 0, 0, 2, 2]),
        ({"badam_switch_mode": "ascending", "badam_start_block": 1}, [1, 1, 2, 2, 0, 0, 1, 1]),
        ({"badam_switch_mode": "fixed"}, [0] * 8),
        ({"badam_switch_mode": "fixed", "badam_start_block": 2}, [2] * 8),
        ({"badam_switch_interval": -1, "badam_start_block": 1}, [1] * 8),
    ],
)
def test_each_block_gets_its_interval_in_requested_order(options, expected):
    assert layers_moved(**{"badam_switch_interval": 2, **options}) == expected


def test_random_blocks_occur_once_per_pass_and_depend_only_on_the_seed():
    first = layers_moved(badam_switch_mode="random", badam_switch_interval=1, count=9)
    torch.rand(3)
    assert layers_moved(badam_switch_mode="random", badam_switch_interval=1, count=9) == first
    assert all(sorted(first[i : i + 3]) == [0, 1, 2] for i in (0, 3, 6)[: len(first) // 3])


def test_weight_decay_is_the_given_one_and_skips_biases():
    model = Layered()
    optimizer = optimizer_of(model, weight_decay=0.3)
    assert [group["weight_decay"] for group in optimizer.inner.param_groups] == [0.3, 0.0]
    assert [len(group["params"]) for group in optimizer.inner.param_groups] == [1, 1]


def test_block_updates_match_adamw():
    torch.manual_seed(0)
    model, plain = Layered(), Layered()
    plain.load_state_dict(model.state_dict())
    ours = optimizer_of(model, weight_decay=0.1)
    layer = plain.layers[0]
    groups = [{"params": [layer.weight], "weight_decay": 0.1}, {"params": [layer.bias], "weight_decay": 0.0}]
    theirs = torch.optim.AdamW(groups, lr=1e-2)
    for _ in range(4):
        inputs = torch.randn(5, 4)
        for m, optimizer in ((model, ours), (plain, theirs)):
            m(inputs).square().sum().backward()
            optimizer.step()
            m.zero_grad()
    assert torch.equal(model.layers[0].weight, plain.layers[0].weight)
    assert torch.equal(model.layers[0].bias, plain.layers[0].bias)


def test_only_active_block_has_gradients_and_moments():
    model = Layered()
    optimizer = optimizer_of(model, badam_start_block=1)
    model(torch.randn(5, 4)).sum().backward()
    assert {name for name, p in model.named_parameters() if p.grad is not None} == {"layers.1.weight", "layers.1.bias"}
    optimizer.step()
    assert len(optimizer.inner.state) == 2


def test_bfloat16_model_keeps_float32_copies_of_active_block_only():
    torch.manual_seed(0)
    model = Layered(torch.bfloat16)
    optimizer = optimizer_of(model, learning_rate=1e-5)
    before = model.layers[0].weight.detach().clone()
    active = [t for group in optimizer.inner.param_groups for t in group["params"]]
    assert {t.dtype for t in active} == {torch.float32}
    copies = active[0].clone()
    updates(optimizer, model, 5)
    assert not torch.equal(active[0], copies)  # the float32 copy accumulates steps that are too small for bfloat16
    assert model.layers[0].weight.dtype == torch.bfloat16
    assert torch.equal(model.layers[0].weight, active[0].bfloat16())
    assert before.shape == active[0].shape


@pytest.mark.parametrize("mask", ["adjacent", "scatter"])
def test_ratio_mode_updates_its_fraction_of_entries(mask):
    torch.manual_seed(0)
    model = Layered()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = optimizer_of(model, badam_mode="ratio", badam_update_ratio=0.25, badam_mask_mode=mask)
    updates(optimizer, model, 3)
    for name, parameter in model.named_parameters():
        moved = (parameter != before[name]).sum().item()
        assert moved == (round(parameter.numel() * 0.25) if "layers" in name else 0)


class Tied(Layered):
    """The output layer is tied to the embedding, as in Qwen2-0.5B, so it has no parameter of its own name."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(7, 6), nn.Linear(6, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = hidden + layer(hidden).tanh()
        return self.head(hidden)


@pytest.mark.parametrize("mode", ["layer", "ratio"])
def test_model_with_tied_embeddings_trains_its_layers(mode):
    torch.manual_seed(0)
    model = Tied()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = optimizer_of(model, badam_mode=mode, badam_switch_interval=1)
    for _ in range(NUM_LAYERS):
        model(torch.tensor([1, 2, 3])).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    moved = {name.rsplit(".", 1)[0] for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert moved == {f"layers.{number}" for number in range(NUM_LAYERS)}


@pytest.mark.parametrize("settings", [{}, {"badam_switch_mode": "random"}, {"badam_mode": "ratio"}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_run_stopped_inside_a_block_resumes_bitwise_equal(tmp_path, settings, dtype):
    def run(name, callbacks=()):
        torch.manual_seed(0)
        made, options = make_run(tmp_path / name, callbacks, model=Layered(dtype), save_strategy="no", **overrides)
        return made, options

    overrides = {"use_badam": True, "badam_switch_interval": 4, **settings}
    whole, _ = run("whole")
    whole.train()
    first, _ = run("cut", [StopAt(6)])
    first.train()
    second, _ = run("cut")
    load(tmp_path / "cut" / "checkpoint-6", second.parts)
    second.train()
    assert same(weights(second), weights(whole))
    assert not same(weights(first), weights(whole))


def test_blocks_are_numbered_layers_in_numeric_order():
    names = ["embed.weight", *(f"model.layers.{i}.mlp.weight" for i in (0, 10, 2)), "model.layers.2.experts.7.weight"]
    assert list(blocks_of(names)) == ["model.layers.0", "model.layers.2", "model.layers.10"]


def test_unsupported_badam_options_are_rejected():
    assert "finetuning_type" in str(next(check_badam(badam_options(finetuning_type="lora"))))
    assert "badam_switch_interval" in str(
        next(check_badam(badam_options(finetuning_type="full", badam_switch_interval=0)))
    )
    with pytest.raises(UserError, match="must be below 3"):
        optimizer_of(Layered(), badam_start_block=3)
    with pytest.raises(UserError, match="no layers"):
        optimizer_of(nn.Linear(2, 2))
