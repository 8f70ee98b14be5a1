"""A step is the same on every backend and precision; unavailable combinations are rejected."""

import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from burnish import cli
from burnish.parallel import multi_process as parallel
from burnish.parallel import precision, process_counts, selection
from burnish.parallel import single as base
from burnish.parallel.accelerate_launch import mixed_precision
from burnish.parallel.checks import check_parallel, parallel_notes
from burnish.parallel.create import create_parallel
from burnish.parallel.fsdp.settings import fsdp_settings
from burnish.parallel.precision import (
    autocast_dtype,
    compute_sentence,
    cpu_instructions,
    frozen_dtype,
    full_eval_dtype,
    has_fast_bfloat16,
    supported_dtype,
)
from burnish.parallel.process_counts import world_size
from burnish.parallel.selection import device_of
from burnish.parallel.single import ParallelOptions, SingleProcess, compile_layers, set_seed
from burnish.trainer.trl.sft.config import SFTConfig
from two_processes import in_two_processes

pytestmark = pytest.mark.run

CPU = torch.device("cpu")


def options(**overrides):
    return ParallelOptions(**{"use_cpu": True, **overrides})


def small_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def take_steps(engine, rows_per_step, num_steps=3, micro=2, model=None):
    """Train on squared errors, with rows distributed over ranks as by the loader. Return the weights."""
    model = model or small_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    wrapped, optimizer = engine.prepare(model, optimizer)
    generator = torch.Generator().manual_seed(1)
    for _ in range(num_steps):
        inputs = torch.randn(rows_per_step, 4, generator=generator)
        targets = inputs.sum(1, keepdim=True)
        parts = [(inputs[i : i + micro], targets[i : i + micro]) for i in range(0, rows_per_step, micro)]
        parts = parts[engine.rank :: engine.world_size]
        weight = engine.sum(torch.tensor(float(sum(len(x) for x, _ in parts))))
        for index, (x, y) in enumerate(parts):
            with engine.microbatch(wrapped, last=index == len(parts) - 1):
                with engine.precision():
                    total = (wrapped(x) - y).square().sum()
                engine.backward(total / weight * engine.world_size)
        norm = engine.clip(list(model.parameters()), 1.0)
        engine.step(optimizer, torch.isfinite(norm))
        optimizer.zero_grad()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


# --- one process ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["tensor", "context", "sequence"])
def test_launcher_requesting_other_parallelism_is_rejected_by_name(kind, monkeypatch):
    variable = {"tensor": "PARALLELISM_CONFIG_TP_SIZE", "context": "PARALLELISM_CONFIG_CP_SIZE",
                "sequence": "PARALLELISM_CONFIG_SP_SIZE"}[kind]  # fmt: skip
    monkeypatch.setenv(variable, "2")
    (problem,) = check_parallel(options())
    assert f"burnish does not support {kind} parallelism" in str(problem)
    monkeypatch.setenv(variable, "1")
    assert check_parallel(options()) == []


def test_dtype_of_accelerate_launch_is_used_if_options_set_none(monkeypatch):
    from burnish import TrainingArguments
    from burnish.parallel.deepspeed.settings import fill_settings, zero_preset
    from burnish.run.plan.options import RunOptions

    cuda, overrides = torch.device("cuda"), RunOptions(use_cpu=True, deepspeed=zero_preset("zero2"))
    for reported, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16), ("no", None)):
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", reported)
        assert autocast_dtype(options(), cuda) == dtype
        assert fill_settings(overrides, 64, 2)[reported if dtype else "bf16"]["enabled"] is (dtype is not None)
        assert TrainingArguments(use_cpu=True).mixed_precision == reported
        assert any("ACCELERATE_MIXED_PRECISION" in note for note in parallel_notes(options())) is (dtype is not None)
        assert mixed_precision(options(bf16=True)) == "bf16"
        assert mixed_precision(options(pure_bf16=True)) == "no"
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
    assert "burnish supports bf16 and fp16" in str(check_parallel(options())[0])
    assert check_parallel(options(bf16=True)) == []


def test_accelerate_launch_keeps_a_run_on_cpu(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: torch.device("cuda"))
    monkeypatch.setattr(process_counts, "_NVIDIA_GPUS", Path("nowhere"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    options = ParallelOptions()
    assert (device_of(options).type, world_size(options)) == ("cuda", 2)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    assert (device_of(options).type, world_size(options)) == ("cpu", 1)


def test_unsupported_accelerate_launch_settings_are_reported(monkeypatch):
    for variable, value in (("ACCELERATE_USE_FSDP", "true"), ("ACCELERATE_USE_MEGATRON_LM", "true"),
                            ("FSDP_IGNORED_MODULES", "head"), ("FSDP_BACKWARD_PREFETCH", "BACKWARD_PRE"),
                            ("ACCELERATE_DYNAMO_BACKEND", "INDUCTOR")):  # fmt: skip
        monkeypatch.setenv(variable, value)
    result = " ".join(str(problem) for problem in check_parallel(options()))
    assert "Megatron" in result
    assert 'FSDP_IGNORED_MODULES is "head"' in result
    assert "PREFETCH" not in result
    assert any("torch_compile_backend instead" in note for note in parallel_notes(options()))


def test_replicas_of_sharded_model_follow_accelerate_launch(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("PARALLELISM_CONFIG_DP_REPLICATE_SIZE", "2")
    assert fsdp_settings(options()).copies == 2


def test_engine_is_plain_torch_for_a_single_process(monkeypatch):
    assert type(create_parallel(options())) is SingleProcess
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert selection.parallel_name(options()) == "ddp"
    assert selection.parallel_name(options(engine="single")) == "single"


def test_both_engines_give_the_same_weights_on_one_process():
    single, accelerated = create_parallel(options()), create_parallel(options(engine="accelerate"))
    assert type(single) is not type(accelerated)
    assert torch.equal(take_steps(single, 8), take_steps(accelerated, 8))


def test_single_process_sum_and_gather_are_identity():
    engine, value = create_parallel(options(engine="accelerate")), torch.tensor([[1.0, 2.0]])
    assert torch.equal(engine.sum(value), value)
    assert torch.equal(engine.gather(value), value)
    model, _ = engine.prepare(inner := small_model(), None)
    assert engine.unwrap(model) is inner


def test_clipping_returns_norm_and_scales_gradients_to_limit():
    model = small_model()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    length = sum(p.numel() for p in model.parameters()) ** 0.5
    parameters = list(model.parameters())
    engine = SingleProcess(options())
    assert engine.clip(parameters, 0) == pytest.approx(length)
    assert engine.clip(parameters, 2 * length) == pytest.approx(length)
    assert all((p.grad == 1).all() for p in parameters)
    assert engine.clip(parameters, 0.5) == pytest.approx(length)
    assert engine.clip(parameters, 0) == pytest.approx(0.5, rel=1e-5)


def test_clipping_matches_torch():
    ours, theirs = small_model(), small_model()
    for model in (ours, theirs):
        model(torch.ones(3, 4)).sum().backward()
    norm = SingleProcess(options()).clip(list(ours.parameters()), 0.7)
    assert torch.equal(norm, nn.utils.clip_grad_norm_(theirs.parameters(), 0.7))
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))


def test_norm_without_gradients_is_zero():
    assert SingleProcess(options()).clip(list(small_model().parameters()), 1.0) == 0


def test_non_finite_update_is_never_applied():
    model = small_model()
    before = [p.detach().clone() for p in model.parameters()]
    engine = SingleProcess(options())
    _, optimizer = engine.prepare(model, torch.optim.AdamW(model.parameters(), fused=True))
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, torch.nan)
    assert engine.step(optimizer, torch.tensor(False)) is False
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    assert not optimizer.state
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    assert engine.step(optimizer, torch.tensor(True)) is True
    assert not any(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


def test_fused_optimizer_skips_non_finite_update_without_a_device_read(monkeypatch):
    """As on a GPU, the kernel receives the flag and the host does not read from the device."""
    model = small_model()
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    engine = SingleProcess(options())
    engine.device = torch.device("cuda")
    for finite in (False, True):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter) * (1.0 if finite else torch.nan)
        is_finite = torch.tensor(finite)
        monkeypatch.setattr(torch.Tensor, "__bool__", _refuse)
        assert engine.step(optimizer, is_finite) is True
        monkeypatch.undo()
        assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True)) is not finite


def _refuse(tensor):
    raise AssertionError("the device was read")


def test_autocast_covers_forward_pass_and_weights_stay_float32():
    engine, model = SingleProcess(options(bf16=True)), small_model()
    with engine.precision():
        assert model(torch.ones(1, 4)).dtype == torch.bfloat16
    assert next(model.parameters()).dtype == torch.float32
    with SingleProcess(options()).precision():
        assert model(torch.ones(1, 4)).dtype == torch.float32


def test_non_tensor_batch_values_are_kept():
    batch = SingleProcess(options()).to_device({"input_ids": torch.ones(1), "max_length_q": 7})
    assert batch["max_length_q"] == 7


def test_checkpointing_of_unsupporting_model_is_rejected():
    with pytest.raises(ValueError, match="gradient_checkpointing is set"):
        SingleProcess(options(gradient_checkpointing=True)).prepare(small_model(), None)


def test_every_nth_layer_can_be_checkpointed():
    from tiny_models import tiny_model

    model = tiny_model()
    overrides = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"every_n_layers": 2}}
    if not hasattr(model, "activation_checkpointing_enable"):
        with pytest.raises(ValueError, match="require a newer version of transformers"):
            SingleProcess(options(**overrides)).prepare(model, None)
        return
    SingleProcess(options(**overrides)).prepare(model, None)
    assert [layer.gradient_checkpointing for layer in model.model.layers] == [True, False]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"every_n_layer": 2}, 'Did you mean "every_n_layers"'),
        ({"every_n_layers": 0}, "Received: 0"),
        ({"every_n_layers": True}, "Received: True"),
        ({"selective": True, "use_reentrant": True}, "requires non-reentrant"),
    ],
)
def test_unknown_checkpointing_arguments_are_rejected(overrides, message):
    (problem,) = check_parallel(options(gradient_checkpointing=True, gradient_checkpointing_kwargs=overrides))
    assert message in str(problem)


def test_checkpointing_arguments_without_checkpointing_are_reported():
    (note,) = parallel_notes(options(gradient_checkpointing_kwargs={"use_reentrant": False}))
    assert "no effect" in note
    overrides = {"offload": True}
    (note,) = parallel_notes(
        options(use_cpu=True, gradient_checkpointing=True, gradient_checkpointing_kwargs=overrides)
    )
    assert '"offload" has no effect on a CPU' in note


def test_compiled_model_takes_the_same_steps():
    compiled = SingleProcess(options(torch_compile=True, torch_compile_backend="eager"))
    assert torch.allclose(take_steps(compiled, 8), take_steps(SingleProcess(options()), 8), atol=1e-6)


def test_compile_uses_requested_backend_and_mode(monkeypatch):
    requests = []
    monkeypatch.setattr(base, "compile_layers", lambda model, **overrides: requests.append(overrides))
    for settings in ({}, {"torch_compile_backend": "eager", "torch_compile_mode": "reduce-overhead"}):
        SingleProcess(options(torch_compile=True, **settings)).prepare(small_model(), None)
        assert len(parallel_notes(options(**settings))) == len(settings)
    assert requests == [{"backend": "inductor", "mode": None}, {"backend": "eager", "mode": "reduce-overhead"}]


def test_ddp_options_are_passed_to_accelerate(monkeypatch):
    import accelerate

    from burnish.parallel.accelerate import _accelerator

    made = []
    monkeypatch.setattr(accelerate, "Accelerator", lambda kwargs_handlers, **_: made.append(kwargs_handlers))
    overrides = {"ddp_bucket_cap_mb": 7, "ddp_broadcast_buffers": False, "ddp_find_unused_parameters": True,
                 "ddp_static_graph": True, "ddp_timeout": 77, "ddp_backend": "gloo"}  # fmt: skip
    for requested, expected in ((options(), (25, True, True, False)), (options(**overrides), (7, False, True, True))):
        _accelerator(requested, is_on_cpu=True)
        ddp, group = made.pop()
        assert (ddp.bucket_cap_mb, ddp.broadcast_buffers, ddp.find_unused_parameters, ddp.static_graph) == expected
        assert (group.timeout.total_seconds(), group.backend) == (requested.ddp_timeout, requested.ddp_backend)


def test_identical_layers_are_compiled_once_and_keep_their_names():
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, rows):
            return self.linear(rows).tanh()

    def stacked():
        torch.manual_seed(0)
        return nn.ModuleDict({"layers": nn.ModuleList(Layer() for _ in range(3))})

    def through(model, rows):
        for layer in model["layers"]:
            rows = layer(rows)
        return rows

    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward

    plain, model = stacked(), stacked()
    torch._dynamo.reset()
    compile_layers(model, backend=count)
    assert model.state_dict().keys() == plain.state_dict().keys()
    for num_rows in (3, 5, 7, 9):  # one graph for the first length, one for dynamic lengths
        rows = torch.randn(num_rows, 4, requires_grad=True)
        assert torch.equal(through(model, rows), through(plain, rows))
    assert 1 <= len(graphs) <= 2


def test_seed_initializes_every_generator():
    import numpy

    draws = []
    for _ in range(2):
        set_seed(2**33 + 5)
        draws.append((random.random(), numpy.random.rand(), torch.rand(1).item()))
    assert draws[0] == draws[1]


@pytest.mark.parametrize("status", [0, 1, 130])
def test_process_group_of_a_command_is_closed_but_that_of_a_script_is_not(status, monkeypatch):
    monkeypatch.setattr(cli, "main", lambda argv: create_parallel(options(fsdp=["full_shard"])) and status)
    monkeypatch.setattr(cli.gc, "freeze", lambda: None)
    monkeypatch.setattr(cli, "exit_quietly", lambda status: None)
    ended_with = []
    monkeypatch.setattr(cli, "exit_without_finalization", ended_with.append)
    assert cli.command([]) == status
    assert not dist.is_initialized()
    assert ended_with == [status]
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert cli.command([]) == status
    assert dist.is_initialized()
    assert ended_with == [status]


@pytest.mark.slow
def test_process_group_of_a_script_trainer_is_closed_at_exit():
    script = (
        "import atexit, torch.distributed as dist\n"
        "atexit.register(lambda: print(dist.is_initialized()))\n"
        "from burnish.parallel.create import create_parallel\n"
        "from burnish.parallel.options import ParallelOptions\n"
        "create_parallel(ParallelOptions(use_cpu=True, fsdp=['full_shard']))\n"
        "print(dist.is_initialized())\n"
    )
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert process.stdout.split() == ["True", "False"], process.stderr


def test_process_group_stays_open_after_a_failed_script(monkeypatch):
    create_parallel(options(fsdp=["full_shard"]))
    monkeypatch.setattr(sys, "last_value", ValueError(), raising=False)
    parallel._close_at_exit()
    assert dist.is_initialized()
    monkeypatch.undo()
    parallel._close_at_exit()
    assert not dist.is_initialized()


# --- several processes ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def two_process_results(tmp_path_factory):
    """Return a folder with the results of two processes."""
    folder = tmp_path_factory.mktemp("two")
    in_two_processes(check_each_rank, str(folder))
    return folder


def check_each_rank(folder):
    check_two_ranks(folder)
    check_two_ranks_of_a_language_model(folder)


def check_two_ranks(folder):
    """Check the backend in each of two processes."""
    engine = create_parallel(options(ddp_backend="gloo"))
    assert type(engine).__name__ == "DdpParallel"
    assert engine.world_size == 2
    weights = take_steps(engine, 8)
    torch.save(weights, f"{folder}/weights{engine.rank}.pt")
    assert engine.sum(torch.tensor(engine.rank + 1.0)) == 3
    ragged = torch.full((1, 2 + engine.rank), engine.rank)
    assert engine.gather(ragged).tolist() == [[0, 0, -100], [1, 1, 1]]

    model = small_model()
    wrapped, optimizer = engine.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    assert engine.unwrap(wrapped) is model
    wrapped(torch.ones(1, 4)).sum().backward()
    # Only the loss of the second rank is not finite; neither rank may step.
    assert engine.step(optimizer, torch.tensor(engine.rank == 0)) is False
    engine.barrier()


@pytest.mark.slow
def test_two_processes_take_the_steps_of_one(two_process_results):
    first, second = (torch.load(two_process_results / f"weights{rank}.pt") for rank in range(2))
    assert torch.equal(first, second)
    assert (first - take_steps(SingleProcess(options()), 8)).abs().max() < 1e-6


def check_two_ranks_of_a_language_model(folder):
    from burnish.data.batches.loader import _without_labels
    from tiny_shapes import tiny
    from training_step import fit_objective, rows, split_rows

    engine = create_parallel(options(ddp_backend="gloo"))
    objective, module = fit_objective(model := tiny("qwen2"))
    wrapped, _ = engine.prepare(module, None)
    batches = [objective.collate(part) for part in split_rows(rows(6), 2)[engine.rank :: 2]]
    if len(batches) == 1:  # three micro-batches on two ranks: the second gets one without labels
        batches.append(_without_labels(batches[0]))
    weight = engine.sum(torch.stack([objective.num_items(batch) for batch in batches]).sum())
    for index, batch in enumerate(batches):
        with engine.microbatch(wrapped, last=index == len(batches) - 1):
            engine.backward(objective.loss(wrapped, batch).total / weight * engine.world_size)
    if engine.rank == 0:
        torch.save({name: p.grad for name, p in model.named_parameters()}, f"{folder}/gradients.pt")
    engine.barrier()


@pytest.mark.slow
def test_two_processes_give_language_model_gradients_of_one(two_process_results):
    from tiny_shapes import tiny
    from training_step import gradients, rows

    theirs = torch.load(two_process_results / "gradients.pt")
    _, ours = gradients(tiny("qwen2"), [rows(6)])
    assert max((theirs[name] - ours[name]).abs().max() for name in ours) < 1e-6


# --- options ----------------------------------------------------------------------------------------------------------


def problems(**overrides):
    return [str(problem) for problem in check_parallel(options(**overrides))]


def test_two_compute_dtypes_are_contradictory():
    assert '"bf16" and "fp16"' in problems(bf16=True, fp16=True)[0]
    assert problems(fp16=True, pure_bf16=True)
    assert problems(bf16_full_eval=True, fp16_full_eval=True)
    assert not problems(bf16=True)
    assert not problems()


@pytest.mark.parametrize(("name", "value", "near"), [("backend", "inducter", "inductor"), ("mode", "fast", "default")])
def test_unknown_compile_backend_is_rejected_with_available_ones(name, value, near):
    (problem,) = problems(torch_compile=True, **{f"torch_compile_{name}": value})
    assert f'"torch_compile_{name}": unknown value "{value}"' in problem
    assert near in problem
    assert not problems(torch_compile=True, torch_compile_backend="aot_eager", torch_compile_mode="reduce-overhead")


def test_single_process_engine_is_rejected_for_several_processes(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert "4 processes" in problems(engine="single")[0]


@pytest.fixture
def instructions(monkeypatch):
    """Return a function that sets the simulated processor: torch's capability, bfloat16 support, oneDNN's limit."""

    def set_processor(capability="AVX512", has_bfloat16=True, has_amx=False, limit=None, is_amx_generation=False):
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: has_bfloat16)
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: has_amx)
        monkeypatch.setattr(precision.platform, "machine", lambda: "x86_64")
        monkeypatch.setattr(precision, "is_amx_generation", lambda: is_amx_generation)
        monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
        monkeypatch.delenv("DNNL_MAX_CPU_ISA", raising=False)
        if limit:
            monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", limit)

    return set_processor


@pytest.mark.parametrize(
    ("processor", "name"),
    [
        ({}, "AVX512-BF16"),
        ({"has_amx": True}, "AMX"),
        ({"has_bfloat16": False}, "AVX512"),
        ({"capability": "AVX2"}, "AVX2"),
        ({"capability": "DEFAULT"}, "SSE4"),
        ({"limit": "AVX2"}, "AVX2"),
        ({"limit": "AVX512_CORE_VNNI"}, "AVX512"),
        ({"limit": "AVX512_CORE_BF16", "has_amx": True}, "AVX512-BF16"),
        ({"limit": "avx512_core_amx", "has_amx": True}, "AMX"),
    ],
)
def test_cpu_instructions_respect_torch_and_onednn_limits(processor, name, instructions):
    instructions(**processor)
    assert cpu_instructions() == name
    assert has_fast_bfloat16() is (name in ("AMX", "AVX512-BF16"))
    instructions(**processor, is_amx_generation=True)
    assert has_fast_bfloat16() is (name == "AMX")


def test_float16_on_cpu_runs_as_bfloat16_if_supported_and_is_reported(instructions):
    instructions()
    assert autocast_dtype(options(fp16=True), CPU) == torch.bfloat16
    assert "bfloat16" in parallel_notes(options(fp16=True))[0]
    assert parallel_notes(options(bf16=True)) == []
    instructions("AVX2")
    assert autocast_dtype(options(fp16=True), CPU) is None
    assert "float32. This processor (AVX2) emulates bfloat16" in parallel_notes(options(fp16=True))[0]
    assert autocast_dtype(options(bf16=True), CPU) == torch.bfloat16
    for name in ("bf16", "pure_bf16"):
        (note,) = parallel_notes(options(**{name: True}))
        assert "(AVX2) emulates bfloat16 matrix multiplication" in note
        assert f"Set {name}: false" in note


def test_slow_bfloat16_products_are_not_chosen_for_training_and_are_reported(instructions):
    instructions(is_amx_generation=True)
    half = torch.bfloat16
    assert frozen_dtype(options(), CPU, half) == torch.float32
    assert frozen_dtype(options(bf16=True), CPU, half) == half
    assert supported_dtype(half, CPU) == half  # inference
    assert autocast_dtype(options(fp16=True), CPU) is None
    slower = "(AVX512-BF16 without AMX) multiplies matrices more slowly in bfloat16"
    assert slower in parallel_notes(options(fp16=True))[0]
    assert slower in parallel_notes(options(bf16=True))[0]
    assert "because that is faster on this device" in compute_sentence(torch.float32, half, CPU)
    assert not SFTConfig("out", report_to="none").bf16
    instructions()
    assert SFTConfig("out", report_to="none").bf16


def test_frozen_weights_are_float32_if_bfloat16_is_emulated_or_disabled(instructions):
    half, gpu = torch.bfloat16, torch.device("cuda")
    for capability, defaults in (("AVX512", half), ("AVX2", torch.float32)):
        instructions(capability)
        assert frozen_dtype(options(), CPU, half) == defaults
        assert frozen_dtype(options(), CPU, torch.float16) == torch.float32
        assert frozen_dtype(options(), gpu, torch.float16) == torch.float16
        assert frozen_dtype(options(bf16=True), CPU, torch.float32) == half
        assert frozen_dtype(options(pure_bf16=True), CPU, torch.float32) == half
        for device in (CPU, gpu):
            assert frozen_dtype(options(bf16=False), device, half) == torch.float32


def test_float16_requires_loss_scale_and_bfloat16_weights_no_autocast():
    assert autocast_dtype(options(fp16=True), torch.device("cuda")) == torch.float16
    assert autocast_dtype(options(bf16=True, pure_bf16=True), CPU) is None
    assert not SingleProcess(options(bf16=True)).scales_loss
    assert SingleProcess(options(bf16=True)).parts == {}


def test_evaluation_has_its_own_dtype():
    assert full_eval_dtype(options(bf16_full_eval=True)) == torch.bfloat16
    assert full_eval_dtype(options(fp16_full_eval=True)) == torch.float16
    assert full_eval_dtype(options()) is None


def test_gradients_of_repeated_indices_are_added_in_one_order():
    """As in models with experts, which read the hidden state of a token once for each expert (with two experts, the
    order of the sum has no effect)."""
    SingleProcess(options())
    generator = torch.Generator().manual_seed(3)
    indices = torch.randint(16, (20_000,), generator=generator)
    factors = torch.randn(len(indices), 64, generator=generator)

    def gradient():
        hidden = torch.zeros(16, 64, requires_grad=True)
        (hidden[indices] * factors).sum().backward()
        return hidden.grad

    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        first = gradient()
        assert all(torch.equal(gradient(), first) for _ in range(8))
    finally:
        torch.set_num_threads(threads)
