"""What ``burnish explain`` says: sizes that are right, rows that show what is trained, one layout for all of it."""

from typing import Any

import pytest
import torch

from burnish.app.estimate import Formats, Shape, disk_bytes, layer_bytes_per_token, memory_terms, shown_bytes
from burnish.app.explain_view import Line, Sample, Section, drawn, plain


def tiny_config(layers: int) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=160, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip


def saved_bytes(model: torch.nn.Module, tokens: int) -> int:
    """What autograd keeps after the forward pass of the layers, parameters left out."""
    own = {p.data_ptr() for p in model.parameters()} | {b.data_ptr() for b in model.buffers()}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.data_ptr() not in own:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(input_ids=torch.zeros(1, tokens, dtype=torch.long), use_cache=False)
        return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_activations_of_a_layer_are_those_that_autograd_keeps(dtype: torch.dtype) -> None:
    from transformers import LlamaModel

    tokens = 96
    one, two = (saved_bytes(LlamaModel(tiny_config(layers)).to(dtype).train(), tokens) for layers in (1, 2))
    estimate = tokens * layer_bytes_per_token(Shape.of(tiny_config(1)), dtype.itemsize)
    assert two - one == pytest.approx(estimate, rel=0.02)


def test_the_shape_is_read_from_a_config_of_any_family() -> None:
    from transformers import GPT2Config

    assert Shape.of(tiny_config(3)) == Shape(layers=3, hidden=64, intermediate=160, keys=32, vocabulary=128)
    assert Shape.of(GPT2Config(n_embd=32, n_head=4, n_layer=2, vocab_size=50)) == Shape(2, 32, 128, 32, 50)


def test_full_training_with_adam_takes_sixteen_bytes_a_parameter() -> None:
    shape = Shape.of(tiny_config(2))
    terms = memory_terms(1000, 1000, shape, Formats(4, 4, 4, 8), tokens=0, loss_bytes=0, recompute=False)
    assert {term.name: term.num_bytes for term in terms} == {"weights": 4000, "gradients": 4000, "optimizer": 8000}


def test_an_adapter_pays_for_what_moves_only() -> None:
    shape = Shape.of(tiny_config(2))
    terms = memory_terms(1000, 10, shape, Formats(2, 4, 2, 8), tokens=0, loss_bytes=0, recompute=False)
    found = {term.name: term.num_bytes for term in terms}
    assert found == {"weights": 990 * 2 + 10 * 4, "cast weights": 20, "gradients": 40, "optimizer": 80}


def test_checkpointing_keeps_one_layer_and_the_inputs_of_the_others() -> None:
    shape = Shape.of(tiny_config(10))
    full, less = (
        memory_terms(0, 0, shape, Formats(4, 4, 4, 8), tokens=7, loss_bytes=0, recompute=recompute)[0].num_bytes
        for recompute in (False, True)
    )
    assert full == 10 * 7 * layer_bytes_per_token(shape, 4)
    assert less == 7 * (layer_bytes_per_token(shape, 4) + 10 * 64 * 4)


def test_the_disk_holds_the_model_the_checkpoints_and_one_under_way() -> None:
    assert disk_bytes(model_bytes=100, checkpoint_bytes=300, checkpoints=0) == 100
    assert disk_bytes(model_bytes=100, checkpoint_bytes=300, checkpoints=2) == 100 + 3 * 300


@pytest.mark.parametrize(
    ("count", "text"), [(12, "12 bytes"), (2048, "2.0 KiB"), (150 * 2**20, "150 MiB"), (3 * 2**29, "1.5 GiB")]
)
def test_bytes_are_shown_as_a_person_says_them(count: int, text: str) -> None:
    assert shown_bytes(count) == text


# --- the layout -------------------------------------------------------------------------------------------------------


def an_explanation() -> tuple[list[Any], list[Any]]:
    long = "word " * 60
    sections = [Section("Model", [Line("model", "Tiny", "run.yaml, line 1"), Line("a_label_longer_than_most", long)])]
    return sections, [Sample("Row 1 of 9", [("user\nhello ", False), ("hi!", True), ("x" * 2000, False)])]


def test_what_is_trained_is_marked_without_colours() -> None:
    text = plain(*an_explanation())
    assert "user\n  hello ⟦hi!⟧" in text
    assert "Tiny  (run.yaml, line 1)" in text
    assert all(len(line) <= 120 for line in text.splitlines() if "xxx" not in line)


def test_a_long_piece_gives_up_its_middle() -> None:
    assert "1,400 characters" in plain(*an_explanation())


def test_in_a_terminal_the_same_words_are_coloured() -> None:
    from rich.text import Text

    text = drawn(*an_explanation(), width=100)
    assert isinstance(text, Text)
    styles = {text.plain[span.start : span.end].strip(): str(span.style) for span in text.spans}
    assert "green" in styles["hi!"]
    assert "green" not in styles["user\n  hello"]
    assert "(run.yaml, line 1)" in text.plain
