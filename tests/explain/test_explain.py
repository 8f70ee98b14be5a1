"""``burnish explain``: correct sizes, rows with marked trained tokens, one layout for all."""

import copy
import re
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from burnish.config.options import RawValue
from burnish.explain.model import tried_patches
from burnish.explain.view import Line, Sample, Section, styled_text, without_colors
from burnish.kernels.tied import TIED
from burnish.run.plan.memory import DecoderShape, Formats, disk_bytes, layer_bytes_per_token, memory_terms, shown_bytes
from burnish.run.plan.options import RunOptions
from burnish.run.plan.plan import Plan, plan
from burnish.run.plan.resources import Sizes


def tiny_config(layers: int) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=160, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip


def test_tied_embedding_is_listed_by_the_config_of_the_whole_model() -> None:
    from transformers import Qwen2_5_VLConfig

    options = RunOptions(model_name_or_path="x", fused_loss=True)
    is_listed = [
        TIED in tried_patches(options, Qwen2_5_VLConfig(tie_word_embeddings=tied), False) for tied in (True, False)
    ]
    assert is_listed == [True, False]


def saved_bytes(model: torch.nn.Module, tokens: int) -> int:
    """Return the bytes that autograd saves in the forward pass of the layers, without parameters."""
    own_pointers = {p.data_ptr() for p in model.parameters()} | {b.data_ptr() for b in model.buffers()}
    saved: dict[int, torch.Tensor] = {}

    def save(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.data_ptr() not in own_pointers:
            saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        model(input_ids=torch.zeros(1, tokens, dtype=torch.long), use_cache=False)
        return sum(tensor.untyped_storage().nbytes() for tensor in saved.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_estimated_layer_activations_match_autograd(dtype: torch.dtype) -> None:
    from transformers import LlamaModel

    tokens = 96
    one, two = (saved_bytes(LlamaModel(tiny_config(layers)).to(dtype).train(), tokens) for layers in (1, 2))
    estimate = tokens * layer_bytes_per_token(DecoderShape.of(tiny_config(1)), dtype.itemsize)
    assert two - one == pytest.approx(estimate, rel=0.02)


def test_model_shape_is_read_from_any_config() -> None:
    from transformers import GPT2Config

    assert DecoderShape.of(tiny_config(3)) == DecoderShape(
        layers=3, hidden=64, intermediate=160, keys=32, vocabulary=128
    )
    assert DecoderShape.of(GPT2Config(n_embd=32, n_head=4, n_layer=2, vocab_size=50)) == DecoderShape(
        2, 32, 128, 32, 50
    )


def test_full_training_with_adam_uses_16_bytes_per_parameter() -> None:
    shape = DecoderShape.of(tiny_config(2))
    terms = memory_terms(1000, 1000, shape, Formats(4, 4, 4, 8), tokens=0)
    assert {term.name: term.num_bytes for term in terms} == {"weights": 4000, "gradients": 4000, "optimizer": 8000}


def test_adapter_memory_counts_trained_weights_only() -> None:
    shape = DecoderShape.of(tiny_config(2))
    terms = memory_terms(1000, 10, shape, Formats(2, 4, 2, 8), tokens=0)
    result = {term.name: term.num_bytes for term in terms}
    assert result == {"weights": 990 * 2 + 10 * 4, "cast weights": 20, "gradients": 40, "optimizer": 80}
    without_copies = memory_terms(1000, 10, shape, Formats(2, 4, 2, 8), tokens=0, copies=False)
    assert {term.name for term in without_copies} == result.keys() - {"cast weights"}


def test_checkpointing_keeps_one_layer_and_inputs_of_the_others() -> None:
    shape = DecoderShape.of(tiny_config(10))
    full, checkpointed = (
        memory_terms(0, 0, shape, Formats(4, 4, 4, 8), tokens=7, recompute=recompute)[0].num_bytes
        for recompute in (False, True)
    )
    assert full == 10 * 7 * layer_bytes_per_token(shape, 4)
    assert checkpointed == 7 * (layer_bytes_per_token(shape, 4) + 10 * 64 * 4)


def test_activation_estimates_of_offloading_and_selective_checkpointing() -> None:
    shape = DecoderShape.of(tiny_config(10))
    sizes = [{}, {"offload": True}, {"recompute": True}, {"recompute": True, "selective": True}]
    full, offloaded, recomputed, selective = (
        memory_terms(0, 0, shape, Formats(4, 4, 4, 8), tokens=7, **options)[0].num_bytes for options in sizes
    )
    assert offloaded == full // 10
    assert recomputed < selective < full


def test_disk_estimate_includes_model_checkpoints_and_pending_one() -> None:
    assert disk_bytes(model_bytes=100, checkpoint_bytes=300, checkpoints=0) == 100
    assert disk_bytes(model_bytes=100, checkpoint_bytes=300, checkpoints=2) == 100 + 3 * 300


@pytest.mark.parametrize(
    ("count", "text"), [(12, "12 bytes"), (2048, "2.0 KiB"), (150 * 2**20, "150 MiB"), (3 * 2**29, "1.5 GiB")]
)
def test_byte_counts_are_human_readable(count: int, text: str) -> None:
    assert shown_bytes(count) == text


# --- the layout -------------------------------------------------------------------------------------------------------


def example_explanation() -> tuple[list[Any], list[Any]]:
    long_text = "word " * 60
    sections = [
        Section("Model", [Line("model", "Tiny", "run.yaml, line 1"), Line("a_label_longer_than_most", long_text)])
    ]
    return sections, [Sample("Row 1 of 9", [("user\nhello ", False), ("hi!", True), ("x" * 2000, False)])]


def test_secrets_are_masked_in_a_terminal_too() -> None:
    sections = [Section("Options", [Line("infer_url", "https://me:canary123@host/v1", "run.yaml, line 2")])]
    samples = [Sample("Example 1", [("hf_aaaaaaaaaaCANARY", True), ("https://me:canary123@host", False)])]
    for text in (styled_text(sections, samples, 80).plain, without_colors(sections, samples)):
        assert "canary" not in text.lower()
        assert text.count("https://me:") == 2


def test_trained_tokens_are_marked_without_colors() -> None:
    text = without_colors(*example_explanation())
    assert "user\n  hello ⟦hi!⟧" in text
    assert "Tiny  (run.yaml, line 1)" in text
    assert all(len(line) <= 120 for line in text.splitlines() if "xxx" not in line)


def test_trained_line_break_is_visible() -> None:
    sample = Sample("Row 1 of 1", [("question\n", False), ("answer\n", True)])
    assert "question\n  ⟦answer↵" in without_colors([], [sample])


def test_control_characters_of_data_are_shown_as_symbols() -> None:
    sections, samples = [Section("Data", [Line("columns", "a\x1b[2J")])], [Sample("Example", [("b\x1b[31m\x07", True)])]
    for text in (without_colors(sections, samples), styled_text(sections, samples, 80).plain):
        assert "a␛[2J" in text
        assert "b␛[31m␇" in text


def test_source_of_a_value_is_never_wrapped() -> None:
    for width in range(40, 100):
        section = Section("S", [Line("label", "some words that fill the line up", "runs/run.yaml, line 12")])
        assert "(run.yaml, line 12)" in without_colors([section], [], width)


def test_long_text_is_abbreviated_in_the_middle() -> None:
    assert "1,400 characters" in without_colors(*example_explanation())


def test_terminal_output_has_same_words_in_color() -> None:
    from rich.text import Text

    text = styled_text(*example_explanation(), width=100)
    assert isinstance(text, Text)
    styles = {text.plain[span.start : span.end].strip(): str(span.style) for span in text.spans}
    assert "green" in styles["hi!"]
    assert "green" not in styles["user\n  hello"]
    assert "(run.yaml, line 1)" in text.plain


def test_terminal_rows_wrap_between_words() -> None:
    words = [f"word{number}" for number in range(40)]
    sample = Sample("Row 1 of 1", [(" ".join(words[:25]) + " ", False), (" ".join(words[25:]) + "\nand more", True)])
    lines = styled_text([], [sample], width=30).plain.split("\n")[2:]
    assert all(len(line) <= 30 for line in lines)
    assert [word for line in lines for word in line.split()] == [*words[:-1], "word39↵", "and", "more"]


# --- a run ------------------------------------------------------------------------------------------------------------

SIZES = Sizes("LlamaForCausalLM", 20_000, 20_000, 20_000, saves_whole_model=True)
DEMO = Path(__file__).parents[2] / "src" / "burnish" / "demo"


@pytest.fixture
def make_plan(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that returns the plan of a small run with changed options, in an empty working directory."""
    monkeypatch.setenv("BURNISH_CACHE", str(tmp_path_factory.mktemp("cache")))
    monkeypatch.chdir(tmp_path)

    def make(**changes: Any) -> Plan:
        values = {
            "model_name_or_path": str(DEMO / "model"), "dataset_dir": str(DEMO / "data"), "dataset": "demo_train",
            "max_samples": 90, "output_dir": "out", "finetuning_type": "full", "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 4, **changes,
        }  # fmt: skip
        return plan({name: RawValue(value, f"run.yaml, line {n}") for n, (name, value) in enumerate(values.items(), 1)})

    return make


def explained_lines(run: Plan) -> dict[str, str]:
    """Return label -> text of all lines; of lines with the same label, the first."""
    from burnish.explain.explain import sections
    from burnish.run.prepare import prepare

    lines = [line for section in sections(run, prepare(run)) for line in section.lines]
    return {line.label: line.text for line in reversed(lines)}


def test_planned_steps_match_the_training_loop(make_plan: Any) -> None:
    lines = explained_lines(make_plan(num_train_epochs=2, save_steps=0.25, eval_strategy="epoch", val_size=10))
    assert lines["processes"] == "x 1 = effective batch size 8"
    assert lines["epoch"] == "80 examples / 8 = 10 steps"
    assert lines["total"] == "10 x 2 epochs = 20 steps"
    assert lines["save"] == "every 5 steps, 4 times"
    assert lines["evaluate"] == "after every epoch"
    assert lines["evaluation"].startswith("10 examples")


def test_log_of_the_first_step_is_planned_for_every_strategy(make_plan: Any) -> None:
    first = {"logging_first_step": True}
    assert explained_lines(make_plan(logging_strategy="no"))["log"] == "never"
    assert explained_lines(make_plan(logging_strategy="no", **first))["log"] == "after the first step"
    lines = explained_lines(make_plan(logging_strategy="epoch", **first))
    assert lines["log"] == "after the first step and after every epoch"


def test_source_of_a_value_is_shown(make_plan: Any, capsys: pytest.CaptureFixture[str]) -> None:
    from burnish.explain.explain import explain

    explain(make_plan(seed=7))
    assert "DefaultFlowCallback" not in capsys.readouterr().out
    explain(make_plan(seed=7), shows_all=True)
    text = capsys.readouterr().out
    assert re.search(r"seed +7 \(default 42\)  \(run.yaml, line 9\)", text)
    assert re.search(r"accumulation +x 4  \(run.yaml, line 8\)", text)
    assert "DefaultFlowCallback" in text
    assert "⟦" in text
    assert all(len(line) <= 120 for line in text.splitlines())


def test_explain_writes_no_files(make_plan: Any, tmp_path: Path) -> None:
    explained_lines(make_plan())
    assert list(tmp_path.iterdir()) == []


def test_planning_does_not_change_options(make_plan: Any) -> None:
    run = make_plan(eval_strategy="steps", val_size=0.1, packing=True, finetuning_type="lora")
    before = copy.deepcopy(vars(run.options))
    explained_lines(run)
    assert vars(run.options) == before


def test_sample_shows_row_and_its_labels(make_plan: Any) -> None:
    from burnish.explain.explain import samples
    from burnish.run.prepare import prepare

    run = make_plan()
    prepared = prepare(run)
    first, middle = samples(run, prepared)
    row = prepared.rows[0]
    assert "".join(text for text, _ in first.pieces) == prepared.tokenizer.decode(row["input_ids"])
    trained_ids = [token for token in row["labels"] if token != -100]
    assert "".join(text for text, is_trained in first.pieces if is_trained) == prepared.tokenizer.decode(trained_ids)
    assert middle.title == "Example 46 of 90, trained tokens"


def test_packs_are_described_by_fill_ratio(make_plan: Any) -> None:
    lines = explained_lines(make_plan(packing=True, cutoff_len=64))
    packs = int(lines["training set"].split(" packs of ")[0])
    assert lines["training set"].endswith("packs of 90 examples")
    assert packs < 90
    assert 50 < float(re.search(r"are ([\d.]+)% full", lines["packing"])[1]) <= 100  # type: ignore[index]


@pytest.mark.parametrize(
    "changes",
    [{"finetuning_type": "full"}, {"finetuning_type": "lora", "lora_rank": 4},
     {"finetuning_type": "lora", "additional_target": "lm_head"},
     {"finetuning_type": "freeze", "freeze_trainable_layers": 1}],
    ids=str,
)  # fmt: skip
def test_reported_sizes_match_the_model(make_plan: Any, changes: dict[str, Any]) -> None:
    from burnish.adapters.base import ADAPTERS, trainable_summary
    from burnish.models.load import load_config, load_model
    from burnish.models.tokens import load_tokenizer, resized_meta_model
    from burnish.run.plan.resources import sizes_of

    options = make_plan(**changes).options
    adapter = ADAPTERS[options.finetuning_type](options, ())
    sizes = sizes_of(adapter, resized_meta_model(load_config(options), load_tokenizer(options), options), options)
    model = ADAPTERS[options.finetuning_type](options, ()).attach(load_model(options))
    assert (sizes.trained, sizes.total) == trainable_summary(model)


def test_adam_keeps_two_states_per_parameter_and_sgd_none(make_plan: Any) -> None:
    from burnish.models.load import load_config
    from burnish.run.plan.resources import formats_of

    config = load_config(make_plan().options)
    assert formats_of(make_plan(optim="adamw_torch").options, config, SIZES).moments == 8
    assert formats_of(make_plan(optim="sgd").options, config, SIZES).moments == 0


@pytest.mark.parametrize("arguments", [{}, {"optim_args": "amsgrad=true"}])
def test_state_of_adamw_is_counted_as_after_a_step(make_plan: Any, arguments: dict[str, str]) -> None:
    from burnish.models.load import load_config
    from burnish.models.tokens import load_tokenizer, resized_meta_model
    from burnish.optim.builtin import create_optimizer
    from burnish.run.plan.resources import _bytes_of, _state_without_weights

    options = make_plan(optim="adamw_torch", **arguments).options
    model = resized_meta_model(load_config(options), load_tokenizer(options), options).float()
    optimizer = create_optimizer(model.named_parameters(), model, options)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    assert _state_without_weights(options, model, torch.float32) == _bytes_of(optimizer)


def test_explain_reads_no_weights(make_plan: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from burnish.run.recovery import fingerprints

    monkeypatch.setattr(fingerprints, "base_fingerprint", lambda options: pytest.fail("weights on a hub are fetched"))
    assert explained_lines(make_plan())["starts"] == "at step 0"


@pytest.mark.parametrize("has_checkpoint", [True, False])
def test_explain_says_in_one_line_that_a_run_is_finished(
    make_plan: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, has_checkpoint: bool
) -> None:
    from burnish.run.recovery.resume import Start

    start = Start(tmp_path if has_checkpoint else None, (), "out is finished.\n  To train further, increase max_steps.")
    monkeypatch.setattr("burnish.explain.explain.start_of", lambda *_: start)
    assert explained_lines(make_plan())["starts"] == "out is finished. To train further, increase max_steps."


def test_insufficient_disk_space_is_rejected_with_both_sizes(make_plan: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from burnish.loop.schedule import plan_steps
    from burnish.models.load import load_config
    from burnish.run.plan import resources

    options = make_plan(save_steps=2, save_total_limit=3).options
    config, steps = load_config(options), plan_steps(options, 90)
    sizes = resources.Sizes("LlamaForCausalLM", 20_000, 20_000, 20_000, saves_whole_model=True)
    formats = resources.formats_of(options, config, sizes)
    assert not list(resources.check_disk(options, config, sizes, formats, steps))
    monkeypatch.setattr(resources, "free_disk", lambda folder: 60_000)
    (problem,) = resources.check_disk(options, config, sizes, formats, steps)
    assert "58.6 KiB free" in str(problem)
    assert "3 checkpoints" in str(problem)
    assert "save_total_limit: 1" in str(problem)


def test_records_of_a_streamed_dataset_are_read_later(make_plan: Any) -> None:
    lines = explained_lines(make_plan(streaming=True, max_steps=2, eval_dataset="demo_heldout"))
    assert not any(character.isdigit() for character in lines["records"])


def test_dataset_smaller_than_a_step_gives_a_note(make_plan: Any) -> None:
    assert "each epoch is one step" in explained_lines(make_plan(max_samples=3)).get("", "")


def test_run_without_training_reports_no_training_memory(make_plan: Any, capsys: pytest.CaptureFixture[str]) -> None:
    from burnish.explain.explain import explain

    changes = {"bf16": True, "use_cpu": True, "val_size": 8, "do_eval": True}
    explain(make_plan(**changes, do_train=True))
    trained = capsys.readouterr().out
    explain(make_plan(**changes, do_train=False))
    evaluated = capsys.readouterr().out
    for word in ("gradients", "optimizer", "updates in float32", "Trains every weight"):
        assert word in trained
        assert word not in evaluated
    assert "x 2 bytes" in evaluated
    assert "none: the run only evaluates or predicts  (run.yaml, line" in evaluated


def test_evaluation_only_run_is_explained(make_plan: Any, capsys: pytest.CaptureFixture[str]) -> None:
    from burnish.explain.explain import explain

    run = make_plan(
        eval_dataset="demo_heldout", dataset=None, do_eval=True, per_device_eval_batch_size=4, max_samples=30
    )
    lines = explained_lines(run)
    assert lines["datasets"] == "demo_heldout"
    assert lines["batches"] == "8 batches of 4 examples"
    assert lines["evaluates"] == "the loss: eval_results.json"
    assert "% of the tokens" in lines["measured"]
    assert lines["trained"].startswith("none")
    assert "activations" in lines
    explain(run, shows_all=True)
    text = capsys.readouterr().out
    assert "on_evaluate" in text
    assert "Example 16 of 30, measured tokens in" in text
    for word in ("on_step_end", "on_train_begin", "on_save", "trained tokens in", "Steps", "training set", "disk  "):
        assert word not in text
    assert (
        "18 examples (not used by this run)"
        in explained_lines(make_plan(max_samples=20, val_size=2, do_eval=True))["training set"]
    )


@pytest.mark.parametrize(
    ("requested", "events"),
    [
        ("do_eval", "on_init_end on_log on_prediction_step on_evaluate"),
        ("do_predict", "on_init_end on_log on_prediction_step on_predict"),
        ("do_predict predict_with_generate", "on_init_end on_prediction_step on_predict"),
    ],
)
def test_explained_events_match_fired_events(make_plan: Any, requested: str, events: str) -> None:
    from burnish.loop.events import CallbackHandler
    from burnish.run.build import train_run
    from burnish.run.callbacks import events_of

    options = {"eval_dataset": "demo_heldout", "dataset": None, "predict_metrics": "exact_match", "max_new_tokens": 2}
    run = make_plan(max_samples=8, use_cpu=True, **options, **dict.fromkeys(requested.split(), True))
    fired_events, fire = set(), CallbackHandler.fire

    def recorded_fire(handler: CallbackHandler, event: str, **details: Any) -> Any:
        fired_events.add(event)
        return fire(handler, event, **details)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CallbackHandler, "fire", recorded_fire)
        train_run(run)
    assert fired_events == set(events_of(run.options)) == set(events.split())


def test_explain_reports_skipped_tokens_for_padding_free_packs(make_plan: Any) -> None:
    """As in ``build.py``, packs are padding-free even with ``padding_free: false``."""
    assert "skipped tokens" in explained_lines(make_plan(packing=True, padding_free=False, cutoff_len=256))
    assert "skipped tokens" not in explained_lines(make_plan(padding_free=False, needed_tokens_only=True))
    assert "skipped tokens" not in explained_lines(make_plan(neftune_noise_alpha=5.0))


def test_unknown_system_memory_is_not_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from burnish.run.plan.resources import available_memory

    def unknown() -> None:
        raise FileNotFoundError(2, "No such file or directory", "/proc/meminfo")

    monkeypatch.setattr(psutil, "virtual_memory", unknown)
    options = {"use_cpu": True, "output_dir": "o", "model_name_or_path": "m", "dataset": "d"}
    assert available_memory(plan({name: RawValue(value) for name, value in options.items()}).options) == 0
