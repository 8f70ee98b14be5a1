"""Estimates of ``explain`` compared with measurements during the run, for each method and optimizer."""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from burnish.checkpoint.snapshot import split
from burnish.config.errors import UserError
from burnish.config.options import RawValue
from burnish.explain.explain import Line, sections
from burnish.explain.model import CHECKED_AT_START
from burnish.loop.loop import Loop
from burnish.parallel.single import SingleProcess
from burnish.run import build
from burnish.run.plan.plan import Plan, plan
from burnish.run.plan.resources import formats_in, memory_of
from burnish.run.prepare import Prepared, prepare
from burnish.utils.patching import patches_in_words, patches_of
from representative import representative_slow
from small_run import make_model, make_workspace

pytestmark = pytest.mark.run

METHODS: dict[str, dict[str, Any]] = {
    "full": {},
    "full under bf16": {"bf16": True},
    "full in bfloat16": {"pure_bf16": True},
    "lora": {"finetuning_type": "lora", "lora_rank": 4},
    "lora with the head": {"finetuning_type": "lora", "lora_rank": 4, "additional_target": "lm_head", "bf16": True},
    "freeze": {"finetuning_type": "freeze", "freeze_trainable_layers": 1},
    "dora": {"finetuning_type": "lora", "lora_rank": 4, "use_dora": True},
    "oft": {"finetuning_type": "oft"},
    "lora with dropout": {"finetuning_type": "lora", "lora_rank": 4, "lora_dropout": 0.1},
    "checkpointing": {"gradient_checkpointing": True},
    "packing": {"packing": True, "cutoff_len": 64},
    "padded": {"padding_free": False},
    "full logits": {"fused_loss": False},
    "without patches": {"patches": False},
    "without patches under bf16": {"patches": False, "bf16": True},
    "without norm patches": {"leave_out": ["norm"]},
    "neftune": {"neftune_noise_alpha": 5},
}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    **{
        name: {"optim": name}
        for name in ("adamw_torch", "sgd", "adafactor", "lion_32bit", "adamw_8bit", "muon", "adam_mini")
    },
    "apollo": {"use_apollo": True, "apollo_rank": 8},
    "galore": {"use_galore": True, "galore_rank": 8},
}
LARGE = [f"{a} by {b}" for a in METHODS for b in OPTIMIZERS]
"""All combinations of methods and optimizers."""
BADAM: dict[str, dict[str, Any]] = {
    "ascending": {},
    "fixed block, bf16": {"badam_switch_mode": "fixed", "badam_start_block": 1, "bf16": True},
    "random": {"badam_switch_mode": "random"},
    "ratio": {"badam_mode": "ratio", "badam_update_ratio": 0.25},
}
CASES = {
    **{name: {**overrides, "optim": "adamw_torch"} for name, overrides in METHODS.items()},
    **{f"full by {name}": overrides for name, overrides in OPTIMIZERS.items()},
    **{f"lora by {name}": {**METHODS["lora"], **OPTIMIZERS[name]} for name in ("adafactor", "muon")},
    **{
        f"badam, {name}": {"use_badam": True, "badam_switch_interval": 2, **overrides}
        for name, overrides in BADAM.items()
    },
    "files in bfloat16": {"files": "bfloat16"},
    "badam, files in bfloat16": {"files": "bfloat16", "use_badam": True, "badam_switch_interval": 2},
}


FAST_CASES = ("full", "full under bf16", "lora", "freeze", "dora", "checkpointing", "packing", "full by adafactor",
         "full by apollo", "badam, ascending", "files in bfloat16")  # fmt: skip
"""Cases of ``make test``; the others are part of ``make test-slow``."""


class Measurement:
    """Measures a run: rows and tokens per step, bytes of gradients and activations."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.rows: list[int] = []
        self.tokens: list[int] = []
        self.activations: list[int] = []
        self.gradients, self.run, self.patched = 0, None, []
        step, clip, train = Loop.step, SingleProcess.clip, Loop.train
        precision = SingleProcess.precision

        def counted_step(run: Any, group: Any) -> None:
            self.rows.append(group.num_rows)
            self.tokens += [batch["input_ids"].numel() for batch in group.batches]
            self.patched = [(entry.name, entry.why) for entry in patches_of(run.model)]
            step(run, group)

        def measured_clip(engine: Any, parameters: Any, limit: float) -> Any:
            grads = [p.grad for p in self.run.model.parameters() if p.grad is not None]
            self.gradients = max(self.gradients, sum(grad.nbytes for grad in grads))
            return clip(engine, parameters, limit)

        def measured_train(run: Any) -> Any:
            self.run, self.before = run, {n: p.detach().clone() for n, p in run.model.named_parameters()}
            return train(run)

        @contextmanager
        def measured_precision(engine: Any) -> Iterator[None]:
            """Record the bytes that autograd keeps between the forward and the backward pass, without weights."""
            weights = {p.untyped_storage().data_ptr() for p in self.run.model.parameters()}
            saved: dict[int, torch.Tensor] = {}

            def save(tensor: torch.Tensor) -> torch.Tensor:
                if (pointer := tensor.untyped_storage().data_ptr()) not in weights:
                    saved[pointer] = tensor
                return tensor

            with precision(engine), torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
                yield
            self.activations.append(sum(tensor.untyped_storage().nbytes() for tensor in saved.values()))

        patch.setattr(SingleProcess, "precision", measured_precision)
        patch.setattr(Loop, "step", counted_step)
        patch.setattr(SingleProcess, "clip", measured_clip)
        patch.setattr(Loop, "train", measured_train)

    @property
    def moved(self) -> tuple[int, int]:
        """The number of elements of the tensors that changed, and the number of elements that changed."""
        pairs = [(p.detach(), self.before[name]) for name, p in self.run.model.named_parameters()]
        tensor_elements = sum(p.numel() for p, before in pairs if not torch.equal(p, before))
        return tensor_elements, sum(int((p != before).sum()) for p, before in pairs)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: make_model(tmp_path_factory.mktemp(name) / "model", dtype=name) for name in ("float32", "bfloat16")}


def prepare_run(
    folder: Path, run_options: dict[str, Any], models: dict[str, Path]
) -> tuple[Plan, Prepared, dict[str, str]]:
    options = make_workspace(folder, **{
        "max_steps": 5, "save_strategy": "no", "learning_rate": 0.01, "lr_scheduler_type": "constant",
        "model_name_or_path": str(models[run_options.get("files", "float32")]),
        **{name: value for name, value in run_options.items() if name != "files"},
    })  # fmt: skip
    run_plan = plan({name: RawValue(value, "the command line") for name, value in options.items()})
    prepared = prepare(run_plan)
    return run_plan, prepared, {line.label: line.text for line in reversed(lines_of(run_plan, prepared))}


def lines_of(run_plan: Plan, prepared: Prepared) -> list[Line]:
    return [line for section in sections(run_plan, prepared) for line in section.lines]


def check_activations(run_plan: Plan, prepared: Prepared, measured: Measurement) -> None:
    """Check that the estimated terms of the forward pass are within a quarter of the memory that autograd kept. Tensors
    whose size does not depend on the tokens, such as gradients of the head, are large in a model this small."""
    options = run_plan.options
    for tokens, saved in zip(measured.tokens, measured.activations, strict=True):
        terms = memory_of(options, prepared.config, prepared.sizes, prepared.formats, tokens)
        expected = sum(t.num_bytes for t in terms if t.name in ("activations", "logits", "DoRA", "cast weights"))
        if options.finetuning_type == "oft":
            assert "excludes activations of the oft method" in next(t.reason for t in terms if t.name == "activations")
            assert saved > 0.6 * expected
            continue
        assert saved < 1.25 * expected
        # Layers below the first trained one keep nothing, and recomputed activations are kept only temporarily.
        is_upper_bound = options.finetuning_type == "freeze" or options.use_badam or options.gradient_checkpointing
        assert is_upper_bound or saved > 0.45 * expected


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "name", representative_slow([*CASES, *(name for name in LARGE if name not in CASES)], FAST_CASES)
)
def test_run_matches_explain(name: str, models: dict[str, Path], tmp_path: Path, monkeypatch: Any) -> None:
    method, _, optimizer = name.partition(" by ")
    overrides = CASES[name] if name in CASES else {**METHODS[method], **OPTIMIZERS[optimizer]}
    if overrides.get("optim") in ("lion_32bit", "adamw_8bit"):
        pytest.importorskip("bitsandbytes")
    try:
        run_plan, prepared, message = prepare_run(tmp_path, overrides, models)
    except UserError as error:
        if name in LARGE:
            pytest.skip(f"these options cannot be combined: {error}")
        raise
    measured = Measurement(monkeypatch)
    assert build.train_run(run_plan).exit_code is None
    model, options = measured.run.model, run_plan.options

    trained = prepared.sizes.trained
    changed_tensors, changed_elements = measured.moved
    assert message["trained"].startswith(f"{trained:,} of {sum(p.numel() for p in model.parameters()):,}")
    if options.use_badam and options.badam_mode == "ratio":
        assert trained / 2 < changed_elements <= trained
    elif options.optim == "sgd":  # some updates of norms are below half a unit in the last place
        assert 0.9 * trained <= changed_tensors <= trained
    else:
        assert changed_tensors == trained

    terms = {
        term.name: term.num_bytes for term in memory_of(options, prepared.config, prepared.sizes, prepared.formats, 60)
    }
    assert terms["weights"] == sum(p.nbytes for p in model.parameters())
    assert terms["gradients"] == measured.gradients
    state, _ = split(measured.run.optimizer.state_dict(), copy=False)
    weights = {p.data_ptr() for p in model.parameters()}
    states = sum(t.nbytes for t in state.values() if t.numel() > 1 and t.data_ptr() not in weights)
    states += sum(places.nbytes for _, places, _ in getattr(measured.run.optimizer, "_parts", ()))
    assert terms.get("optimizer", 0) == pytest.approx(states, rel=0.1)

    check_activations(run_plan, prepared, measured)
    lines = lines_of(run_plan, prepared)
    patched = [line.text for line in lines if line.label == "patched"]
    checked_at_start = {line.text.partition(":")[0] for line in lines if line.text.endswith(CHECKED_AT_START)}
    assert patched == (
        patches_in_words((n, why) for n, why in measured.patched if why.kind not in checked_at_start) or ["none"]
    )
    assert (not measured.patched) == ("without patches" in name)

    assert measured.rows == [4] * 5 or options.packing
    assert "= effective batch size 4" in message["processes"] or options.packing
    assert message["total"].startswith("5 steps")
    (file,) = (tmp_path / "out").glob("*model.safetensors")
    with safe_open(file, "pt") as saved:
        dtypes = {str(saved.get_tensor(key).dtype) for key in saved.keys()}  # noqa: SIM118
    stored, _ = formats_in(model)
    if "formats" in message:
        assert f", {str(stored).removeprefix('torch.')} in memory" in message["formats"]
        reported = re.search(r"saved in (\w+)", message["formats"])
        assert reported is None or dtypes == {f"torch.{reported[1]}"}
    else:
        assert str(stored) == f"torch.{overrides.get('files', 'float32')}"
        assert dtypes == {str(stored)} or options.finetuning_type in ("lora", "oft")
    card = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert f"{trained:,}" in card


def test_badam_blocks_are_shown_by_explain_and_during_the_run(
    models: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    """The trained blocks and their order match the output, and parameters outside of the blocks do not change."""
    options = {"use_badam": True, "badam_switch_interval": 2, "badam_switch_mode": "descending", "badam_verbose": 1}
    run_plan, _, message = prepare_run(tmp_path, options, models)
    assert message["blocks"].endswith(
        "model.layers.0 to model.layers.1, descending: 1, 0, ...; switched every 2 updates, 3 times"
    )
    assert message["never trained"].startswith("20,512, outside the layers: model.embed_tokens.weight, ")
    measured, active = Measurement(monkeypatch), []
    step = Loop.step

    def recorded_step(run: Any, group: Any) -> None:
        active.append({name for name, p in run.model.named_parameters() if p.requires_grad})
        step(run, group)

    monkeypatch.setattr(Loop, "step", recorded_step)
    build.train_run(run_plan)
    blocks = [{re.match(r".*layers\.(\d)", name)[1] for name in names} for names in active]  # type: ignore[index]
    assert blocks == [{"1"}, {"1"}, {"0"}, {"0"}, {"1"}]
    never_trained = [name for name in measured.before if "layers" not in name]
    assert all(
        torch.equal(dict(measured.run.model.named_parameters())[name], measured.before[name]) for name in never_trained
    )
    output = re.sub(r"\s+", " ", capsys.readouterr().out)
    assert f"Blocks: {message['blocks']}." in output
    assert "15,488 of 36,000 parameters are trained" in output
    assert json.loads((tmp_path / "out" / "train_results.json").read_text())["train_loss"] > 0
