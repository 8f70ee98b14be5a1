"""The registry of patches to third-party code is complete, reversible as a whole, and accurate."""

import copy
import re
import sys
from pathlib import Path
from types import MethodType, ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from burnish.cli import main
from burnish.config.options import RawValue
from burnish.models.patches.rotation import patch_rotations
from burnish.run import build
from burnish.run.build import train_run
from burnish.run.plan.plan import Plan, plan
from burnish.utils.patching import (
    Reason,
    hook,
    patch,
    patch_summary,
    patches_in_words,
    patches_of,
    record,
    restore,
    temporary_hook,
)
from small_run import as_arguments, make_workspace

FASTER = Reason("layer", "it is faster")


def doubled(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return 2 * type(module).forward(module, x)


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))


def test_patch_is_registered_until_it_is_undone() -> None:
    layers, x = model(), torch.ones(1, 3)
    before = layers(x)
    made = [patch(layer, "forward", MethodType(doubled, layer), FASTER) for layer in layers]
    assert patches_of(layers) == made
    assert not torch.equal(layers(x), before)
    restore(made)
    assert torch.equal(layers(x), before)
    assert not patches_of(layers)
    assert not any("forward" in vars(layer) for layer in layers)


@pytest.mark.parametrize("first", [0, 1])
def test_nested_patches_can_be_undone_in_any_order(first: int) -> None:
    layer = nn.Linear(3, 3)
    made = [patch(layer, "speed", value, FASTER) for value in ("fast", "faster")]
    restore([made[first]])
    assert layer.speed == ("faster", "fast")[first]
    restore(made)
    assert not hasattr(layer, "speed")


def test_function_set_over_a_patch_is_kept() -> None:
    layer = nn.Linear(3, 3)
    made = patch(layer, "forward", MethodType(doubled, layer), FASTER)
    layer.forward = theirs = MethodType(doubled, layer)
    restore([made])
    assert layer.forward is theirs
    assert not patches_of(layer)


def test_copied_model_has_its_own_patches() -> None:
    layers = model()
    patch(layers[0], "forward", MethodType(doubled, layers[0]), FASTER)
    hook(layers[0], "forward", lambda *_: None, FASTER)
    other = copy.deepcopy(layers)
    restore(patches_of(other))
    assert "forward" not in vars(other[0])
    assert not other[0]._forward_hooks
    assert len(patches_of(layers)) == 2
    assert layers[0]._forward_hooks


def test_nested_attribute_is_restored() -> None:
    layers = model()
    made = patch(layers[0], "weight.note", "mine", FASTER)
    assert layers[0].weight.note == "mine"
    restore([made])
    assert not hasattr(layers[0].weight, "note")


def test_hook_is_called_until_it_is_removed() -> None:
    layers, calls = model(), []
    with temporary_hook(layers[0], "forward_pre", lambda module, options: calls.append(module), FASTER):
        layers(torch.ones(1, 3))
        assert patch_summary(layers) == ["1 forward_pre hook: 1 layer"]
    layers(torch.ones(1, 3))
    assert calls == [layers[0]]


def test_changes_by_another_library_are_recorded_and_undone() -> None:
    layers = model()

    def change() -> None:
        layers[0].forward = MethodType(doubled, layers[0])
        layers[1].register_forward_hook(lambda *_: None)

    made = record(layers, change, FASTER)
    assert [(record.owner, record.name) for record in made] == [(layers[0], "forward"), (layers[1], "forward hook")]
    restore(made)
    assert "forward" not in vars(layers[0])
    assert not layers[1]._forward_hooks


class Layer(nn.Module):
    """A layer that is defined in the Python module of a test."""


def test_patch_of_a_python_module_belongs_to_the_models_defined_there(monkeypatch: pytest.MonkeyPatch) -> None:
    file = ModuleType("rotary")
    file.rotate = before = lambda x: x
    monkeypatch.setitem(sys.modules, "rotary", file)
    monkeypatch.setattr(Layer, "__module__", "rotary")
    made = patch(file, "rotate", lambda x: -x, FASTER)
    assert patches_of(nn.Sequential(model(), Layer())) == [made]
    assert not patches_of(model())
    restore([made])
    assert file.rotate is before
    assert not patches_of(Layer())


def test_patch_of_a_class_belongs_to_the_models_that_use_it() -> None:
    made = patch(Layer, "forward", doubled, FASTER)
    assert patches_of(nn.Sequential(Layer(), Layer())) == [made]
    assert not patches_of(model())
    restore([made])
    assert not patches_of(Layer())


def test_class_whose_python_module_is_unknown_has_no_patches() -> None:
    unknown = type("Unknown", (nn.Linear,), {"__module__": "never_imported"})(3, 3)
    assert not patches_of(unknown)
    assert not record(unknown, lambda: None, FASTER)
    assert not patch_rotations(unknown)


def test_patches_are_counted_by_target_and_reason() -> None:
    norm, gated = Reason("norm", "one pass"), Reason("gated layer", "one pass")
    message = patches_in_words([*[("forward", norm)] * 14, *[("forward", gated)] * 2, ("forward hook", norm)])
    assert message == ["16 forward methods: 14 norms, 2 gated layers", "1 forward hook: 1 norm"]


def test_plural_of_a_counted_patch_is_that_of_its_first_noun() -> None:
    layer = Reason("layer under gradient checkpointing", "gradient_checkpointing is set")
    message = patches_in_words([("gradient_checkpointing", layer)] * 3)
    assert message == ["3 gradient_checkpointing flags: 3 layers under gradient checkpointing"]


# --- patches of a run -------------------------------------------------------------------------------------------------

RUNS = {
    "full": {"finetuning_type": "full"},
    "bfloat16": {"finetuning_type": "full", "bf16": True},
    "lora": {"finetuning_type": "lora"},
    "freeze": {"finetuning_type": "freeze", "freeze_trainable_layers": 1},
    "noise and checkpointing": {"finetuning_type": "full", "neftune_noise_alpha": 5, "gradient_checkpointing": True},
    "some left out": {"finetuning_type": "full", "leave_out": ["norm", "tied embedding"]},
    "none": {"finetuning_type": "full", "patches": False},
}


def planned(folder: Path, **options: object) -> Plan:
    overrides = make_workspace(folder, **{"max_steps": 3, "save_strategy": "no", **options})
    return plan({name: RawValue(value, "the command line") for name, value in overrides.items()})


@pytest.mark.sample(3)
@pytest.mark.run
@pytest.mark.parametrize("name", RUNS)
def test_explain_lists_the_patches_of_the_run(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Patches that depend on the structure are counted in advance; others are listed as possible."""
    argv = as_arguments(make_workspace(tmp_path, max_steps=1, save_strategy="no", **RUNS[name]))
    assert main(["explain", *argv]) == 0
    explained = re.sub(r"\n {12,}", " ", capsys.readouterr().out.split("\n\n")[0])  # join wrapped lines
    models: list[Any] = []
    monkeypatch.setattr(build, "counts_of", lambda model, sizes: models.append(model) or (0, 0))
    assert main(["train", *argv]) == 0
    message = patch_summary(models[-1])
    reasons = re.findall(r"patch +([a-z -]+?): (.*)", explained)
    optional_kinds = [kind for kind, why in reasons if "checked at start" in why]
    counted = {kind: int(number) for number, kind in kinds_in("; ".join(message)) if kind not in optional_kinds}
    assert counted == {kind: int(number) for number, kind in kinds_in(explained)}
    assert {kind for _, kind in kinds_in("; ".join(message))} <= counted.keys() | set(optional_kinds)
    assert bool(re.search(r"patched +none", explained)) == (not counted)
    assert (name == "none") == (not message)
    assert "burnish's code" not in (tmp_path / "out" / "README.md").read_text()
    assert "atched" not in capsys.readouterr().out


def kinds_in(text: str) -> list[tuple[str, str]]:
    """Return ``[("2", "gated layer"), ...]``, without the target (forward or hook)."""
    result = re.findall(r"(?:[:,] )(\d+) ([a-z -]+?)s?(?=,|;|$|\n)", text)
    return [(number, kind.strip()) for number, kind in result]


@pytest.mark.sample(2)
@pytest.mark.run
@pytest.mark.parametrize(
    "options", [{}, {"bf16": True}, {"finetuning_type": "lora", "lora_rank": 4}, {"packing": True}]
)
def test_losses_without_patches_are_equal_up_to_rounding(
    options: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BURNISH_CACHE", str(tmp_path / "cache"))
    overrides = {"finetuning_type": "full", "template": "qwen", "learning_rate": 1e-3, **options}
    defaults, plain = (
        train_run(planned(tmp_path / str(on), patches=on, **overrides)).output.training_loss for on in (True, False)
    )
    # float32 sums in another order; bfloat16 products, rounded by up to 1/256, over three steps
    assert defaults == pytest.approx(plain, rel=2e-3 if "bf16" in options else 2e-6)
