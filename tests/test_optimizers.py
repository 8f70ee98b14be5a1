"""The contract of the family of optimizers: every member that can be had here moves weights, follows the schedule,
decays weights, and goes on from the middle of a run with the same bits. Those whose library is missing are skipped by
name. Then what single families promise."""

import json

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from burnish.app.plan import RunOptions, component_notes
from burnish.core.errors import MissingExtraError, UserError
from burnish.core.snapshot import join, split
from burnish.optim import badam, builtin, low_rank, muon, refused
from burnish.optim.builtin import (
    OPTIMIZERS,
    check_optimizer,
    create_optimizer,
    missing_library,
    optimizer_notes,
)

HERE = [m.name for m in OPTIMIZERS if "refused" not in m.traits]
WIDTH = 64  # a matrix of 64 x 64 is the smallest that the 8-bit libraries quantise


def options_for(name, **given):
    """The defaults of every group, as the flat options object has them."""
    extra = {"finetuning_type": "full", "seed": 1, "learning_rate": 1e-2}
    named = {} if name == "badam" else {"optim": name}
    return RunOptions(**{**extra, **SWITCHES.get(name, {}), **named, **given})


SWITCHES = {
    "badam": {"use_badam": True, "badam_switch_interval": 2},
    "muon": {"use_muon": True},
    "galore_adamw": {"galore_rank": 4, "galore_update_interval": 3},
    "galore_adafactor": {"galore_rank": 4, "galore_update_interval": 3},
    "galore_adamw_8bit": {"galore_rank": WIDTH, "galore_update_interval": 3},
    "apollo_adamw": {"apollo_rank": 4, "apollo_update_interval": 3},
}


def skip_if_missing(name):
    if missing_library(name):
        pytest.skip(f"{name}: {OPTIMIZERS.get(name).traits['library']} is not installed")


def small_model(seed=0):
    torch.manual_seed(seed)
    return nn.ModuleDict(
        {
            "embed": nn.Linear(8, WIDTH),
            "layers": nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)]),
        }
    )


def forward(model, x):
    hidden = model["embed"](x)
    for layer in model["layers"]:
        hidden = layer(hidden).tanh()
    return hidden


class Training:
    """A model, an optimizer and a falling learning rate, on batches that are a function of the step."""

    def __init__(self, name, model=None, **given):
        self.model = model or small_model()
        self.optimizer = create_optimizer(self.model.named_parameters(), self.model, options_for(name, **given))
        self.scheduler = LambdaLR(self.optimizer, lambda step: 1 / (1 + step))
        self.steps = 0
        if hasattr(self.optimizer, "train"):
            self.optimizer.train()

    def run(self, steps):
        for _ in range(steps):
            x = torch.randn(16, 8, generator=torch.Generator().manual_seed(self.steps))
            (forward(self.model, x) - 1).square().mean().backward()
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
            self.steps += 1
        return self

    def weights(self):
        return {name: p.detach().clone() for name, p in self.model.named_parameters()}


def through_a_file(state):
    """What a checkpoint does to a state dict: tensors beside JSON, and back."""
    tensors, data = split(state)
    assert all(type(tensor) is torch.Tensor and tensor.is_contiguous() for tensor in tensors.values())
    return join(tensors, json.loads(json.dumps(data)))


@pytest.mark.parametrize("name", HERE)
def test_it_moves_the_weights_and_lowers_the_loss(name):
    skip_if_missing(name)
    training = Training(name)
    before = training.weights()
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(99))
    first = (forward(training.model, x) - 1).square().mean()
    training.run(6)
    assert any(not torch.equal(before[key], value) for key, value in training.weights().items())
    assert all(torch.isfinite(value).all() for value in training.weights().values())
    assert (forward(training.model, x) - 1).square().mean() < first


@pytest.mark.parametrize("name", HERE)
def test_a_run_that_goes_on_from_its_state_ends_in_the_same_bits(name):
    skip_if_missing(name)
    whole = Training(name).run(8).weights()
    stopped = Training(name).run(5)  # in the middle of a block of BAdam, and between new directions of GaLore
    saved, rate = through_a_file(stopped.optimizer.state_dict()), through_a_file(stopped.scheduler.state_dict())

    resumed = Training(name, model=small_model(seed=5))
    resumed.model.load_state_dict(stopped.model.state_dict())
    resumed.optimizer.load_state_dict(saved)
    resumed.scheduler.load_state_dict(rate)
    resumed.steps = 5
    again = through_a_file(resumed.optimizer.state_dict())
    assert {k: v.tolist() for k, v in split(again)[0].items()} == {k: v.tolist() for k, v in split(saved)[0].items()}
    assert all(torch.equal(whole[key], value) for key, value in resumed.run(3).weights().items())


@pytest.mark.parametrize("name", HERE)
def test_it_follows_the_schedule(name):
    """At a learning rate of zero nothing moves; and the rate it reports is a number, not a tensor."""
    skip_if_missing(name)
    training = Training(name, weight_decay=0.1)
    training.run(2)
    assert [group["lr"] for group in training.optimizer.param_groups] == pytest.approx(
        [1e-2 / 3] * len(training.optimizer.param_groups)
    )
    assert isinstance(training.optimizer.param_groups[0]["lr"], float)
    for group in training.optimizer.param_groups:
        group["lr"] = 0.0
    before = training.weights()
    training.run(1)
    unchanged = [torch.allclose(before[key], value, atol=1e-6) for key, value in training.weights().items()]
    # Schedule-free: the weights of training are an average, which moves on towards what it averages.
    assert all(unchanged) or name.startswith("schedule_free")


@pytest.mark.parametrize("name", HERE)
def test_weight_decay_shrinks_matrices(name):
    skip_if_missing(name)
    is_part_of_gradient = name in {"adagrad", "sgd"} or name.startswith("rmsprop")
    strength = 30.0 if is_part_of_gradient else 3.0
    plain, decayed = (Training(name, weight_decay=rate).run(20).weights() for rate in (0.0, strength))
    matrix = "layers.0.weight"
    assert decayed[matrix].norm() < 0.999 * plain[matrix].norm()


@pytest.mark.parametrize("name", HERE)
def test_each_of_adams_settings_is_read_or_said_to_be_left_out(name):
    """A setting moves the weights elsewhere, or a note says that it does not."""
    skip_if_missing(name)
    plain = Training(name).run(8).weights()
    for setting, value in (("adam_beta1", 0.5), ("adam_beta2", 0.6), ("adam_epsilon", 1.0)):
        given = options_for(name, **{setting: value})
        notes = " ".join(note for notes in component_notes() for note in notes(given))
        other = Training(name, **{setting: value}).run(8).weights()
        is_read = any(not torch.equal(plain[key], value) for key, value in other.items())
        assert is_read != (f'"{setting}" has no effect' in notes), setting


@pytest.mark.parametrize("name", HERE)
def test_an_argument_that_it_does_not_take_is_refused(name):
    skip_if_missing(name)
    with pytest.raises(UserError, match="does not take all of optim_args"):
        Training(name, optim_args="no_such_thing=1")


@pytest.mark.parametrize("name", HERE)
def test_a_parameter_that_got_no_gradient_stays_where_it_is(name):
    """And has no state yet: a router's expert that no token went to."""
    skip_if_missing(name)
    training = Training(name, weight_decay=0.1)
    training.model["layers"][0].unused = nn.Linear(WIDTH, WIDTH)
    training.optimizer = create_optimizer(
        training.model.named_parameters(), training.model, options_for(name, weight_decay=0.1)
    )
    training.scheduler = LambdaLR(training.optimizer, lambda step: 1.0)
    if hasattr(training.optimizer, "train"):
        training.optimizer.train()
    before = training.weights()
    after = training.run(8).weights()  # RAdam waits for six
    assert torch.equal(after["layers.0.unused.weight"], before["layers.0.unused.weight"])
    assert any(not torch.equal(after[key], before[key]) for key in before)


def test_what_is_set_for_another_optimizer_is_said():
    notes = " ".join(optimizer_notes(options_for("adamw_torch", badam_switch_interval=7, galore_rank=3)))
    assert '"badam_switch_interval" has no effect' in notes
    assert '"galore_rank" has no effect' in notes
    assert optimizer_notes(options_for("badam", badam_switch_interval=7)) == []


@pytest.mark.parametrize(("switch", "check"), [("use_badam", badam.check_badam), ("use_muon", muon.check_muon)])
def test_two_optimizers_at_once_are_refused(switch, check):
    (problem,) = check(options_for("adafactor", **{switch: True}))
    assert "adafactor asks for another" in problem.what
    assert check(options_for("adamw_torch", **{switch: True})) == []


@pytest.mark.parametrize("name", sorted(refused._REFUSED))
def test_what_cannot_be_had_is_refused_with_its_reason(name):
    (problem,) = check_optimizer(options_for(name))
    assert name in problem.what
    assert problem.remedy
    with pytest.raises(UserError, match=name):
        Training(name)


def test_every_name_of_transformers_is_a_member_or_refused():
    from transformers.training_args import OptimizerNames

    assert {name.value for name in OptimizerNames} <= set(OPTIMIZERS.names())


def test_a_missing_library_is_said_with_its_extra_before_anything_is_made(monkeypatch):
    monkeypatch.setattr(builtin, "find_spec", lambda name: None)
    (problem,) = check_optimizer(options_for("adamw_8bit"))
    assert "bitsandbytes" in problem.what
    assert "burnish[optimizers]" in problem.remedy
    with pytest.raises(UserError, match="bitsandbytes"):
        Training("adamw_8bit")
    assert issubclass(MissingExtraError, UserError)
    (problem,) = low_rank.check_low_rank(options_for("adamw_8bit", use_galore=True))
    assert "bitsandbytes" in problem.what


# --- single families --------------------------------------------------------------------------------------------------


def test_a_learning_rate_of_its_own_becomes_a_group_behind_the_others():
    model = small_model()
    rates = {"layers.0.weight": 0.5, "layers.0.bias": 0.25}
    optimizer = create_optimizer(model.named_parameters(), model, options_for("adamw_torch", weight_decay=0.1), rates)
    found = {
        name: (group["lr"], group["weight_decay"]) for group in optimizer.param_groups for name in group["param_names"]
    }
    assert found["layers.0.weight"] == (0.5, 0.1)
    assert found["layers.0.bias"] == (0.25, 0.0)
    assert found["layers.2.weight"] == (1e-2, 0.1)
    assert optimizer.param_groups[0]["lr"] == 1e-2  # what a log shows
    scheduler = LambdaLR(optimizer, lambda step: 1 / (1 + step))
    optimizer.step()
    scheduler.step()
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([rate / 2 for rate in scheduler.base_lrs])


def test_galore_is_its_formula():
    """One step of algorithm 2: AdamW's first step is the sign of R, projected back."""
    training = Training("galore_adamw", galore_rank=4, galore_scale=0.5, galore_proj_type="std")
    before = training.weights()["layers.0.weight"]
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))
    (forward(training.model, x) - 1).square().mean().backward()
    gradient = training.model["layers"][0].weight.grad.clone()
    training.optimizer.step()
    right = torch.linalg.svd(gradient, full_matrices=False)[2][:4]
    expected = before - 1e-2 * 0.5 * (gradient @ right.t()).sign() @ right
    torch.testing.assert_close(training.weights()["layers.0.weight"], expected, rtol=1e-4, atol=1e-6)


def test_galore_keeps_moments_of_the_rank_only():
    optimizer = Training("galore_adamw", galore_rank=4).run(1).optimizer
    sizes = {tuple(t.shape) for t in split(optimizer.state_dict())[0].values()}
    assert (WIDTH, 4) in sizes
    assert (WIDTH, WIDTH) not in sizes


@pytest.mark.parametrize("side", ["std", "reverse_std", "right", "left", "full"])
@pytest.mark.parametrize("shape", [(6, 10), (10, 6)])
def test_galore_matches_its_authors_library(side, shape):
    galore_torch = pytest.importorskip("galore_torch")
    start = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    own, theirs = (nn.Parameter(start.clone()) for _ in range(2))
    options = options_for("galore_adamw", galore_rank=3, galore_scale=0.5, galore_proj_type=side, adam_epsilon=1e-12)
    group = {"params": [own], "param_names": ["layers.0.weight"], "weight_decay": 0.0}
    optimizer = OPTIMIZERS["galore_adamw"]([group], options)
    settings = {"rank": 3, "update_proj_gap": 3, "scale": 0.5, "proj_type": side}
    oracle = galore_torch.GaLoreAdamW(
        [{"params": [theirs], **settings}], lr=1e-2, eps=1e-12, no_deprecation_warning=True
    )
    for step in range(7):
        own.grad = torch.randn(shape, generator=torch.Generator().manual_seed(step))
        theirs.grad = own.grad.clone()
        optimizer.step()
        oracle.step()
    torch.testing.assert_close(own.data, theirs.data, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("growth", ["channel", "tensor"])
@pytest.mark.parametrize("shape", [(6, 10), (10, 6)])
@pytest.mark.parametrize("is_front", [True, False])
def test_apollo_matches_its_authors_library(growth, shape, is_front):
    apollo_torch = pytest.importorskip("apollo_torch")
    start = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    own, theirs = (nn.Parameter(start.clone()) for _ in range(2))
    options = options_for(
        "apollo_adamw", apollo_rank=3, apollo_scale=4.0, apollo_proj="svd", apollo_scale_type=growth,
        apollo_scale_front=is_front, adam_epsilon=1e-12,
    )  # fmt: skip
    group = {"params": [own], "param_names": ["layers.0.weight"], "weight_decay": 0.0}
    optimizer = OPTIMIZERS["apollo_adamw"]([group], options)
    settings = {"rank": 3, "proj": "svd", "scale_type": growth, "update_proj_gap": 3, "scale": 4.0, "proj_type": "std"}
    oracle = apollo_torch.APOLLOAdamW(
        [{"params": [theirs], **settings}], lr=1e-2, eps=1e-12, no_deprecation_warning=True, scale_front=is_front
    )
    for step in range(7):
        own.grad = torch.randn(shape, generator=torch.Generator().manual_seed(step))
        theirs.grad = own.grad.clone()
        optimizer.step()
        oracle.step()
    torch.testing.assert_close(own.data, theirs.data, rtol=1e-3, atol=1e-5)


def test_optim_args_are_read_where_transformers_users_write_them():
    given = options_for("galore_adamw", galore_rank=None, optim_args="rank=7, update_proj_gap=5, scale=0.3")
    assert low_rank._galore_method(given)[1:4] == (7, 5, 0.3)
    assert low_rank._galore_method(options_for("galore_adamw", galore_rank=None, galore_update_interval=200))[1:4] == (
        128, 200, 0.25,
    )  # fmt: skip
    factory = options_for("adamw_torch", use_galore=True)
    assert low_rank._galore_method(factory)[1:4] == (16, 200, 2.0)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"use_galore": True, "use_apollo": True}, "two optimizers"),
        ({"use_galore": True, "finetuning_type": "lora"}, "finetuning_type: full"),
        ({"use_galore": True, "optim": "sgd"}, 'optim "sgd"'),
        ({"use_apollo": True, "optim": "adafactor"}, 'optim "adafactor"'),
    ],
)
def test_contradictions_of_low_rank_are_refused(given, words):
    problems = low_rank.check_low_rank(options_for("adamw_torch", **given))
    assert words in " ".join(str(problem) for problem in problems)


def test_a_target_that_names_no_matrix_is_refused():
    with pytest.raises(UserError, match="q_proj"):
        Training("galore_adamw", galore_target=["q_proj"])


def test_muon_moves_the_matrices_of_layers_and_adamw_the_rest():
    optimizer = Training("muon").optimizer
    muon, adamw = optimizer.inner
    assert isinstance(muon, torch.optim.Muon)
    assert [tuple(p.shape) for group in muon.param_groups for p in group["params"]] == [(WIDTH, WIDTH)] * 2
    assert sum(len(group["params"]) for group in adamw.param_groups) == 6


def test_schedule_free_evaluates_other_weights_than_it_trains():
    skip_if_missing("schedule_free_adamw")
    training = Training("schedule_free_adamw").run(3)
    trained = training.weights()
    training.optimizer.eval()
    averaged = training.weights()
    training.optimizer.train()
    assert any(not torch.equal(trained[key], averaged[key]) for key in trained)
    for key, value in training.weights().items():
        torch.testing.assert_close(value, trained[key])
