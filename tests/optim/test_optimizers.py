"""Every available optimizer updates weights, follows the schedule, applies weight decay, and resumes bitwise equal.
Optimizers of missing libraries are skipped. Tests of single families follow.
"""

import itertools
import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from burnish.checkpoint.snapshot import join, split
from burnish.config.errors import MissingExtraError, UserError
from burnish.optim import adam_mini, badam, builtin, low_rank, muon, refused
from burnish.optim.builtin import (
    OPTIMIZERS,
    check_optimizer,
    create_optimizer,
    missing_library,
    optimizer_notes,
)
from burnish.run.plan.plan import RunOptions, component_notes

pytestmark = pytest.mark.run

OFFERED = [m.name for m in OPTIMIZERS if "refused" not in m.metadata]
AVAILABLE = [name for name in OFFERED if not missing_library(name)]
MISSING = sorted({OPTIMIZERS.get(name).metadata["library"] for name in {*OFFERED} - {*AVAILABLE}})
WIDTH = 64  # a matrix of 64 x 64 is the smallest that the 8-bit libraries quantize


def options_for(name, **options):
    """Return the defaults of every option group in one object."""
    extra = {"finetuning_type": "full", "seed": 1, "learning_rate": 1e-2}
    named = {} if name == "badam" else {"optim": name}
    return RunOptions(**{**extra, **SWITCHES.get(name, {}), **named, **options})


SWITCHES = {
    "badam": {"use_badam": True, "badam_switch_interval": 2},
    "muon": {"use_muon": True},
    "adam_mini": {"use_adam_mini": True},
    "galore_adamw": {"galore_rank": 4, "galore_update_interval": 3},
    "galore_adafactor": {"galore_rank": 4, "galore_update_interval": 3},
    "galore_adamw_8bit": {"galore_rank": WIDTH, "galore_update_interval": 3},
    "apollo_adamw": {"apollo_rank": 4, "apollo_update_interval": 3},
}


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
    """A model, an optimizer and a decreasing learning rate. Batches depend on the step only."""

    def __init__(self, name, model=None, **options):
        self.model = model or small_model()
        self.optimizer = create_optimizer(self.model.named_parameters(), self.model, options_for(name, **options))
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
    """Write a state dict as a checkpoint does, tensors and JSON, and read it back."""
    tensors, data = split(state)
    assert all(type(tensor) is torch.Tensor and tensor.is_contiguous() for tensor in tensors.values())
    return join(tensors, json.loads(json.dumps(data)))


@pytest.mark.parametrize("library", MISSING)
def test_optimizers_of_a_library_are_available(library):
    pytest.skip(f"{library} is not installed: its optimizers are not tested")


@pytest.mark.parametrize("name", AVAILABLE)
def test_optimizer_updates_weights_and_reduces_the_loss(name):
    training = Training(name)
    before = training.weights()
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(99))
    first = (forward(training.model, x) - 1).square().mean()
    training.run(6)
    assert any(not torch.equal(before[key], value) for key, value in training.weights().items())
    assert all(torch.isfinite(value).all() for value in training.weights().values())
    assert (forward(training.model, x) - 1).square().mean() < first


@pytest.mark.sample(17)
@pytest.mark.parametrize("name", AVAILABLE)
def test_resumed_optimizer_is_bitwise_equal(name):
    whole = Training(name).run(8).weights()
    stopped = Training(name).run(5)  # inside a block of BAdam, and between projection updates of GaLore
    saved, rate = through_a_file(stopped.optimizer.state_dict()), through_a_file(stopped.scheduler.state_dict())

    resumed = Training(name, model=small_model(seed=5))
    resumed.model.load_state_dict(stopped.model.state_dict())
    resumed.optimizer.load_state_dict(saved)
    resumed.scheduler.load_state_dict(rate)
    resumed.steps = 5
    again = through_a_file(resumed.optimizer.state_dict())
    assert {k: v.tolist() for k, v in split(again)[0].items()} == {k: v.tolist() for k, v in split(saved)[0].items()}
    assert all(torch.equal(whole[key], value) for key, value in resumed.run(3).weights().items())


@pytest.mark.parametrize("name", AVAILABLE)
def test_optimizer_follows_the_schedule(name):
    """With a learning rate of 0, no weight changes. The reported rate is a number, not a tensor."""
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
    # Schedule-free: the training weights are an interpolation that continues to move at a rate of 0.
    assert all(unchanged) or name.startswith("schedule_free")


@pytest.mark.sample(12)
@pytest.mark.parametrize("name", AVAILABLE)
def test_weight_decay_shrinks_matrices(name):
    is_part_of_gradient = name in {"adagrad", "sgd"} or name.startswith("rmsprop")
    strength = 30.0 if is_part_of_gradient else 3.0
    plain, decayed = (Training(name, weight_decay=rate).run(20).weights() for rate in (0.0, strength))
    matrix = "layers.0.weight"
    assert decayed[matrix].norm() < 0.999 * plain[matrix].norm()


@pytest.mark.sample(17)
@pytest.mark.parametrize("name", AVAILABLE)
def test_each_adam_setting_is_used_or_reported_as_unused(name):
    """A setting changes the result, or a note says that it has no effect."""
    plain = Training(name).run(8).weights()
    for setting, value in (("adam_beta1", 0.5), ("adam_beta2", 0.6), ("adam_epsilon", 1.0)):
        options = options_for(name, **{setting: value})
        notes = " ".join(note for notes in component_notes() for note in notes(options))
        other = Training(name, **{setting: value}).run(8).weights()
        is_read = any(not torch.equal(plain[key], value) for key, value in other.items())
        assert is_read != (f'"{setting}" has no effect' in notes), setting


@pytest.mark.parametrize("name", AVAILABLE)
def test_unsupported_optimizer_argument_is_rejected(name):
    with pytest.raises(UserError, match="invalid optim_args"):
        Training(name, optim_args="no_such_thing=1")


@pytest.mark.parametrize("name", ["adamw_torch", "sgd", "galore_adamw"])
@pytest.mark.parametrize(
    "arguments", ["amsgrad", "eps=", "=1", "eps=1, eps=2", "lr=0.1", "weight_decay=0.1", "betas=(0.9, 0.95)"]
)
def test_malformed_optimizer_arguments_are_rejected(name, arguments):
    (problem,) = check_optimizer(options_for(name, optim_args=arguments))
    assert problem.option == "optim_args"


@pytest.mark.parametrize(
    ("name", "argument", "message"),
    [
        ("adafactor", "beta1=abc", "beta1 must be a number or true or false. Received: abc."),
        ("adafactor", "eps=1e-30", "eps has several values, which optim_args cannot set."),
        ("adafactor", "scale_parameter=no", "scale_parameter must be true or false. Received: no."),
        ("adafactor", "clip_threshold=nan", "clip_threshold must be a number. Received: nan."),
        ("adam_mini", "eps=small", "eps must be a number. Received: small."),
        ("adamw_torch", "amsgrad=1", "amsgrad must be true or false. Received: 1."),
        ("adamw_torch_fused", "foreach=true", "`fused` and `foreach` cannot be `True` together."),
        ("badam", "maximize=no", "maximize must be true or false. Received: no."),
        ("muon", "ns_steps=2.5", "ns_steps must be an integer. Received: 2.5."),
        ("sgd", "momentum=0.9, nesterov=no", "nesterov must be true or false. Received: no."),
        ("sgd", "nesterov=true", "Nesterov momentum requires a momentum and zero dampening."),
    ],
)
def test_argument_that_fails_or_is_misread_in_the_first_step_is_rejected(name, argument, message):
    with pytest.raises(UserError) as raised:
        Training(name, optim_args=argument)
    (problem,) = raised.value.problems
    selected = options_for(name).optim
    assert str(problem) == f'invalid optim_args for optim "{selected}": {message}'
    assert "optim_args" in problem.options


@pytest.mark.parametrize("argument", ["capturable=true", "differentiable=true"])
def test_argument_without_use_in_a_run_is_rejected(argument):
    (problem,) = check_optimizer(options_for("adamw_torch", optim_args=argument))
    assert f"cannot set {argument.removesuffix('=true')}" in str(problem)


def test_checking_arguments_keeps_the_random_state():
    model = small_model()
    before = torch.get_rng_state()
    create_optimizer(model.named_parameters(), model, options_for("sgd", optim_args="momentum=0.9"))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("argument", ["relative_step=True", "scale_parameter=True, warmup_init=True"])
def test_adafactor_without_the_learning_rate_of_the_run_is_rejected(argument):
    with pytest.raises(UserError, match="invalid optim_args"):
        Training("adafactor", optim_args=argument)


@pytest.mark.parametrize("name", AVAILABLE)
def test_parameter_without_gradient_is_unchanged(name):
    """It also gets no state yet, as an expert to which the router has sent no token."""
    training = Training(name, weight_decay=0.1)
    training.model["layers"][0].unused = nn.Linear(WIDTH, WIDTH)
    training.optimizer = create_optimizer(
        training.model.named_parameters(), training.model, options_for(name, weight_decay=0.1)
    )
    training.scheduler = LambdaLR(training.optimizer, lambda step: 1.0)
    if hasattr(training.optimizer, "train"):
        training.optimizer.train()
    before = training.weights()
    after = training.run(8).weights()  # RAdam's warmup takes six steps
    assert torch.equal(after["layers.0.unused.weight"], before["layers.0.unused.weight"])
    assert any(not torch.equal(after[key], before[key]) for key in before)


def test_settings_of_another_optimizer_are_reported():
    notes = " ".join(optimizer_notes(options_for("adamw_torch", badam_switch_interval=7, galore_rank=3)))
    assert '"badam_switch_interval" has no effect' in notes
    assert '"galore_rank" has no effect' in notes
    assert optimizer_notes(options_for("badam", badam_switch_interval=7)) == []


@pytest.mark.parametrize(("first", "second"), [("use_galore", "use_apollo"), ("use_badam", "use_adam_mini")])
def test_two_optimizer_switches_are_rejected(first, second):
    (problem,) = check_optimizer(options_for("adamw_torch", **{first: True, second: True}))
    assert "cannot be combined" in problem.what
    assert first in problem.what
    assert second in problem.what


@pytest.mark.parametrize(
    ("switch", "check"),
    [("use_badam", badam.check_badam), ("use_muon", muon.check_muon),
     ("use_adam_mini", adam_mini.check_adam_mini)],
)  # fmt: skip
def test_optimizer_switch_contradicts_another_optimizer_name(switch, check):
    (problem,) = check(options_for("adafactor", **{switch: True}))
    assert 'cannot be combined with "optim" adafactor' in problem.what
    assert list(check(options_for("adamw_torch", **{switch: True}))) == []


@pytest.mark.parametrize("name", sorted(refused._REFUSED))
def test_unavailable_optimizer_is_rejected_with_its_reason(name):
    (problem,) = check_optimizer(options_for(name))
    assert name in problem.what
    assert problem.remedy
    with pytest.raises(UserError, match=name):
        Training(name)


def test_every_transformers_optimizer_name_is_registered_or_rejected():
    from transformers.training_args import OptimizerNames

    assert all(name.value in OPTIMIZERS for name in OptimizerNames)


def test_missing_optimizer_library_is_reported_with_its_extra(monkeypatch):
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


def test_custom_learning_rate_becomes_a_separate_last_group():
    model = small_model()
    rates = {"layers.0.weight": 0.5, "layers.0.bias": 0.25}
    optimizer = create_optimizer(model.named_parameters(), model, options_for("adamw_torch", weight_decay=0.1), rates)
    result = {
        name: (group["lr"], group["weight_decay"]) for group in optimizer.param_groups for name in group["param_names"]
    }
    assert result["layers.0.weight"] == (0.5, 0.1)
    assert result["layers.0.bias"] == (0.25, 0.0)
    assert result["layers.2.weight"] == (1e-2, 0.1)
    assert optimizer.param_groups[0]["lr"] == 1e-2  # the value that is logged
    scheduler = LambdaLR(optimizer, lambda step: 1 / (1 + step))
    optimizer.step()
    scheduler.step()
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([rate / 2 for rate in scheduler.base_lrs])


def test_galore_matches_formula():
    """One step of algorithm 2: the first step of AdamW is the sign of R, projected back."""
    training = Training("galore_adamw", galore_rank=4, galore_scale=0.5, galore_proj_type="std", adam_epsilon=1e-12)
    before = training.weights()["layers.0.weight"]
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))
    (forward(training.model, x) - 1).square().mean().backward()
    gradient = training.model["layers"][0].weight.grad.clone()
    training.optimizer.step()
    right = torch.linalg.svd(gradient, full_matrices=False)[2][:4]
    expected = before - 1e-2 * 0.5 * (gradient @ right.t()).sign() @ right
    torch.testing.assert_close(training.weights()["layers.0.weight"], expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["galore_adamw", "apollo_adamw"])
def test_low_rank_adamw_adds_epsilon_before_the_bias_correction(name):
    """As in the authors' code; torch.optim.AdamW adds it afterwards."""
    group = {"params": [nn.Parameter(torch.zeros(4))], "param_names": ["norm.weight"], "weight_decay": 0.0}
    matrix = {"params": [nn.Parameter(torch.ones(6, 4))], "param_names": ["layers.0.weight"], "weight_decay": 0.0}
    optimizer = OPTIMIZERS[name]([group, matrix], options_for(name, adam_epsilon=1e-3))
    first, second = torch.zeros(4), torch.zeros(4)
    expected = torch.zeros(4)
    for step in range(1, 4):
        gradient = torch.randn(4, generator=torch.Generator().manual_seed(step)) * 1e-3
        group["params"][0].grad, matrix["params"][0].grad = gradient.clone(), torch.ones(6, 4)
        optimizer.step()
        first, second = 0.9 * first + 0.1 * gradient, 0.999 * second + 0.001 * gradient**2
        rate = 1e-2 * (1 - 0.999**step) ** 0.5 / (1 - 0.9**step)
        expected -= rate * first / (second.sqrt() + 1e-3)
    torch.testing.assert_close(group["params"][0].data, expected, rtol=1e-4, atol=1e-7)


def test_galore_keeps_only_low_rank_moments():
    optimizer = Training("galore_adamw", galore_rank=4).run(1).optimizer
    sizes = {tuple(t.shape) for t in split(optimizer.state_dict())[0].values()}
    assert (WIDTH, 4) in sizes
    assert (WIDTH, WIDTH) not in sizes


def test_galore_matches_its_reference_library():
    galore_torch = pytest.importorskip("galore_torch")
    for side, shape in itertools.product(["std", "reverse_std", "right", "left", "full"], [(6, 10), (10, 6)]):
        matches_galore(galore_torch, side, shape)


def matches_galore(galore_torch, side, shape):
    start = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    own, theirs = (nn.Parameter(start.clone()) for _ in range(2))
    options = options_for("galore_adamw", galore_rank=3, galore_scale=0.5, galore_proj_type=side, adam_epsilon=1e-3)
    group = {"params": [own], "param_names": ["layers.0.weight"], "weight_decay": 0.0}
    optimizer = OPTIMIZERS["galore_adamw"]([group], options)
    settings = {"rank": 3, "update_proj_gap": 3, "scale": 0.5, "proj_type": side}
    oracle = galore_torch.GaLoreAdamW(
        [{"params": [theirs], **settings}], lr=1e-2, eps=1e-3, no_deprecation_warning=True
    )
    for step in range(7):
        own.grad = torch.randn(shape, generator=torch.Generator().manual_seed(step))
        theirs.grad = own.grad.clone()
        optimizer.step()
        oracle.step()
    torch.testing.assert_close(own.data, theirs.data, rtol=1e-4, atol=1e-5)


def test_apollo_matches_its_reference_library():
    apollo_torch = pytest.importorskip("apollo_torch")
    for options in itertools.product(["channel", "tensor"], [(6, 10), (10, 6)], [True, False]):
        matches_apollo(apollo_torch, *options)


def matches_apollo(apollo_torch, growth, shape, is_front):
    start = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    own, theirs = (nn.Parameter(start.clone()) for _ in range(2))
    options = options_for(
        "apollo_adamw", apollo_rank=3, apollo_scale=4.0, apollo_proj="svd", apollo_scale_type=growth,
        apollo_scale_front=is_front, adam_epsilon=1e-3,
    )  # fmt: skip
    group = {"params": [own], "param_names": ["layers.0.weight"], "weight_decay": 0.0}
    optimizer = OPTIMIZERS["apollo_adamw"]([group], options)
    settings = {"rank": 3, "proj": "svd", "scale_type": growth, "update_proj_gap": 3, "scale": 4.0, "proj_type": "std"}
    oracle = apollo_torch.APOLLOAdamW(
        [{"params": [theirs], **settings}], lr=1e-2, eps=1e-3, no_deprecation_warning=True, scale_front=is_front
    )
    for step in range(7):
        own.grad = torch.randn(shape, generator=torch.Generator().manual_seed(step))
        theirs.grad = own.grad.clone()
        optimizer.step()
        oracle.step()
    torch.testing.assert_close(own.data, theirs.data, rtol=1e-3, atol=1e-5)


def test_optim_args_are_read_like_in_transformers():
    options = options_for("galore_adamw", galore_rank=None, optim_args="rank=7, update_proj_gap=5, scale=0.3")
    assert low_rank._galore_method(options)[1:4] == (7, 5, 0.3)
    assert low_rank._galore_method(options_for("galore_adamw", galore_rank=None, galore_update_interval=200))[1:4] == (
        128, 200, 0.25,
    )  # fmt: skip


@pytest.mark.parametrize("name", ["galore_adamw", "apollo_adamw"])
@pytest.mark.parametrize(
    "argument", ["rank=0", "rank=high", "rank=2.5", "update_proj_gap=0", "scale=-1", "scale=nan", "proj_type=lef"]
)
def test_invalid_argument_of_a_projection_is_rejected(name, argument):
    with pytest.raises(UserError, match=argument.split("=")[0]) as raised:
        Training(name, optim_args=argument)
    assert "optim_args" in raised.value.problems[0].options


@pytest.mark.parametrize("argument", ["proj=rand", "scale_type=chanel", "proj_type=full"])
def test_invalid_choice_of_apollo_is_rejected(argument):
    with pytest.raises(UserError, match=argument.split("=")[0]):
        Training("apollo_adamw", optim_args=argument)


def test_llamafactory_switches_use_llamafactory_defaults():
    """LLaMA-Factory 0.9.5, hparams/finetuning_args.py."""
    galore = low_rank._galore_method(options_for("adamw_torch", use_galore=True))
    assert galore[1:6] == (16, 200, 2.0, "std", "svd")
    apollo = low_rank._apollo_method(options_for("adamw_torch", use_apollo=True))
    assert apollo[1:] == (16, 200, 32.0, "std", "random", "channel", False)
    assert galore.targets == apollo.targets == ["all"]
    for optim in ("adamw_torch", "adamw_bnb_8bit", "adamw_8bit", "paged_adamw_8bit", "adafactor"):
        problems = list(low_rank.check_low_rank(options_for(optim, use_galore=True)))
        assert not any("works with optim" in problem.what for problem in problems), optim


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"use_galore": True, "finetuning_type": "lora"}, "finetuning_type: full"),
        ({"use_galore": True, "optim": "sgd"}, 'Received: "sgd"'),
        ({"use_apollo": True, "optim": "adafactor"}, 'Received: "adafactor"'),
    ],
)
def test_contradictory_low_rank_options_are_rejected(options, message):
    problems = list(low_rank.check_low_rank(options_for("adamw_torch", **options)))
    assert message in " ".join(str(problem) for problem in problems)


def test_target_without_matching_matrix_is_rejected():
    with pytest.raises(UserError, match="q_proj"):
        Training("galore_adamw", galore_target=["q_proj"])


@pytest.mark.parametrize("targets", [r"layers\.[02]\.w", [r"layers\.[02]\.w"], ["layers.0.w", "layers.2.w"], "all"])
def test_targets_of_a_projection_are_names_or_regular_expressions(targets):
    """A YAML file gives a list of one regular expression, a script the text."""
    optimizer = Training("galore_adamw", optim_target_modules=targets).optimizer
    names = [name for group in optimizer.param_groups[optimizer.num_plain :] for name in group["param_names"]]
    assert names == ["layers.0.weight", "layers.2.weight"]


@pytest.mark.parametrize("targets", ["*.q_proj", ["*.q_proj"]])
def test_target_that_is_no_regular_expression_is_rejected(targets):
    with pytest.raises(UserError) as raised:
        Training("galore_adamw", optim_target_modules=targets)
    assert "optim_target_modules" in raised.value.problems[0].options


def test_muon_updates_layer_matrices_and_adamw_the_rest():
    optimizer = Training("muon").optimizer
    muon, adamw = optimizer.inner
    assert isinstance(muon, torch.optim.Muon)
    assert [tuple(p.shape) for group in muon.param_groups for p in group["params"]] == [(WIDTH, WIDTH)] * 2
    assert sum(len(group["params"]) for group in adamw.param_groups) == 6


# Adam-mini: heads of 4 x 8 inputs, 2 of them for keys and values


def small_llama(**changes):
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=20, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=4,
            num_key_value_heads=2, attention_bias=True, **changes,
        )
    )  # fmt: skip


def mini_of(model, **options):
    return create_optimizer(model.named_parameters(), model, options_for("adam_mini", **options))


def gradients(model, step, scale=1.0):
    generator = torch.Generator().manual_seed(step)
    for parameter in model.parameters():
        parameter.grad = (scale * torch.randn(parameter.shape, generator=generator)).to(parameter.dtype)


def test_adam_mini_matches_formula_per_head_neuron_or_token():
    model, beta1, beta2, rate, decay = small_llama(), 0.9, 0.999, 1e-2, 0.1
    optimizer = mini_of(model, weight_decay=decay)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    first, second = {}, {}
    for step in range(3):
        gradients(model, step)
        for name, p in model.named_parameters():
            first[name] = beta1 * first.get(name, 0) + (1 - beta1) * p.grad
            blocks = p.grad.square()
            if "q_proj.weight" in name or "k_proj.weight" in name:  # a head is four rows
                blocks = blocks.view(-1, 4, 16).mean((1, 2)).repeat_interleave(4)[:, None]
            elif p.ndim == 2:
                blocks = blocks.mean(1, keepdim=True)
            elif "norm" in name:
                blocks = blocks.mean()
            second[name] = beta2 * second.get(name, 0) + (1 - beta2) * blocks
            scale = (second[name] / (1 - beta2 ** (step + 1))).sqrt() + 1e-8
            shrunk = before[name] * (1 - rate * decay if p.ndim == 2 else 1)
            before[name] = shrunk - rate * first[name] / (1 - beta1 ** (step + 1)) / scale
        optimizer.step()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.detach(), before[name], msg=name)


def test_adam_mini_matches_its_reference_library():
    library = pytest.importorskip("adam_mini")
    own, theirs = small_llama(), small_llama()
    optimizer = mini_of(own, weight_decay=0.1)
    oracle = library.Adam_mini(
        theirs.named_parameters(), lr=1e-2, weight_decay=0.1, dim=16, n_heads=4, n_kv_heads=2, verbose=False
    )
    for step in range(5):
        gradients(own, step)
        gradients(theirs, step)
        optimizer.step()
        oracle.step()
    for (name, p), q in zip(own.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, q, msg=name)


def test_adam_mini_keeps_half_the_state_of_adamw():
    state_sizes = {}
    for name in ("adam_mini", "adamw_torch"):
        model = small_llama()
        gradients(model, 0)
        optimizer = create_optimizer(model.named_parameters(), model, options_for(name))
        optimizer.step()
        state_sizes[name] = sum(t.nbytes for t in split(optimizer.state_dict())[0].values() if t.numel() > 1)
    weights = sum(p.nbytes for p in small_llama().parameters())
    assert state_sizes["adamw_torch"] == 2 * weights
    # One number per token, neuron and head, and two per bias; biases are few in a large model.
    few = 2 * 20 + 2 * 24 + 16 + 8 + 16 + 4 + 2 + (16 + 8 + 8 + 16)
    assert state_sizes["adam_mini"] == weights + 4 * few


def test_second_moments_stay_float32_across_bfloat16_checkpoint():
    """In bfloat16, a decay by 1/1000 is less than half a rounding step, so the moments would never decrease."""
    model = small_llama().bfloat16()
    optimizer = mini_of(model)
    gradients(model, 0)
    optimizer.step()
    again = mini_of(model)
    again.load_state_dict(through_a_file(optimizer.state_dict()))
    weight = model.model.layers[0].self_attn.v_proj.weight
    assert again.state[weight]["exp_avg"].dtype == torch.bfloat16
    assert torch.equal(again.state[weight]["exp_avg_sq"], optimizer.state[weight]["exp_avg_sq"])
    assert again.state[weight]["exp_avg_sq"].dtype == torch.float32


def test_adam_mini_splits_transposed_weights_by_neuron():
    model = GPT2LMHeadModel(GPT2Config(n_embd=8, n_head=2, n_layer=1, vocab_size=10, n_positions=4))
    optimizer = mini_of(model)
    gradients(model, 0)
    optimizer.step()
    moments = {name: tuple(optimizer.state[p]["exp_avg_sq"].shape) for name, p in model.named_parameters()}
    assert moments["transformer.h.0.mlp.c_fc.weight"] == (1, 32)
    assert moments["transformer.wte.weight"] == (10, 1)
    assert moments["transformer.h.0.ln_1.weight"] == (1,)


def test_unknown_number_of_heads_must_be_given():
    model = nn.ModuleDict({"q_proj": nn.Linear(4, 4)})
    with pytest.raises(UserError, match="num_attention_heads"):
        mini_of(model)


def test_schedule_free_evaluates_averaged_weights():
    pytest.importorskip(OPTIMIZERS.get("schedule_free_adamw").metadata["library"])
    training = Training("schedule_free_adamw").run(3)
    trained = training.weights()
    training.optimizer.eval()
    averaged = training.weights()
    training.optimizer.train()
    assert any(not torch.equal(trained[key], averaged[key]) for key in trained)
    for key, value in training.weights().items():
        torch.testing.assert_close(value, trained[key])


@pytest.mark.parametrize(
    "name", [name for name in ("adamw_8bit", "lion_8bit", "ademamix_8bit", "rmsprop_bnb_8bit") if name in AVAILABLE]
)
@pytest.mark.parametrize("copy", [True, False])
def test_8_bit_moments_are_saved_once_and_resume_bitwise_equal(name, copy, tmp_path):
    whole, stopped = Training(name).run(6), Training(name).run(3)
    tensors, data = split(stopped.optimizer.state_dict(), copy=copy)
    save_file(tensors, tmp_path / "optimizer.safetensors")  # refuses tensors that share memory
    again = Training(name)
    again.model.load_state_dict(stopped.model.state_dict())
    again.optimizer.load_state_dict(join(load_file(tmp_path / "optimizer.safetensors"), json.loads(json.dumps(data))))
    again.scheduler.load_state_dict(stopped.scheduler.state_dict())
    again.steps = 3
    final_weights = again.run(3).weights()
    assert all(torch.equal(value, final_weights[key]) for key, value in whole.weights().items())


def test_embedding_moments_have_32_bits():
    pytest.importorskip("bitsandbytes")

    def embedding(seed=0):
        torch.manual_seed(seed)
        return nn.ModuleDict({"embed": nn.Embedding(128, WIDTH), "head": nn.Linear(WIDTH, WIDTH)})

    model = embedding()
    optimizer = create_optimizer(model.named_parameters(), model, options_for("adamw_8bit"))
    model["head"](model["embed"](torch.arange(8))).square().mean().backward()
    optimizer.step()
    kinds = {name: optimizer.state[p]["state1"].dtype for name, p in model.named_parameters()}
    assert kinds["embed.weight"] == torch.float32
    assert kinds["head.weight"] == torch.uint8


@pytest.mark.skipif(missing_library("stable_adamw") != [], reason="needs torch-optimi")
def test_stable_adamw_selects_no_triton_kernel_on_cpu():
    """The library selects its kernels if Triton is installed, even without a GPU, and then fails."""
    groups = [{"params": [nn.Parameter(torch.ones(2))]}]
    made = OPTIMIZERS["stable_adamw"](groups, options_for("stable_adamw"))
    assert made.defaults["triton"] is False
