"""Planning: decisions and rejections from the options alone."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from burnish.config.errors import UserError
from burnish.config.options import RawValue, specs
from burnish.models import attention_choice
from burnish.models.options import ModelOptions
from burnish.run.plan import checks
from burnish.run.plan.checks import trains
from burnish.run.plan.config_files import split_arguments
from burnish.run.plan.plan import RunOptions, aliases, component_checks, plan
from burnish.run.plan.unsupported import NO_EFFECT, UNSUPPORTED
from small_run import WALK_THROUGH


def raw_options(tmp_path: Path, **values: object) -> dict[str, RawValue]:
    """Return the options of a valid run, with ``values`` overriding or adding options."""
    values = {"model_name_or_path": "m", "dataset": "d", "output_dir": str(tmp_path / "out"), **values}
    return {name: RawValue(value, f"run.yaml, line {line}") for line, (name, value) in enumerate(values.items(), 1)}


def plan_errors(tmp_path: Path, **values: object) -> list[str]:
    with pytest.raises(UserError) as caught:
        plan(raw_options(tmp_path, **values))
    return [str(problem) for problem in caught.value.problems]


def test_value_is_parsed_as_declared_type_and_keeps_its_source(tmp_path: Path) -> None:
    made = plan(raw_options(tmp_path, learning_rate="1e-4", packing="no", save_strategy="no"))
    assert (made.options.learning_rate, made.options.packing, made.options.save_strategy) == (1e-4, False, "no")
    assert made.provenance["learning_rate"] == "run.yaml, line 4"


def test_all_problems_are_reported_together(tmp_path: Path) -> None:
    problems = plan_errors(
        tmp_path, learning_rat="1e-4", num_train_epochs="three", per_device_train_batch_size="0",
        finetuning_type="loar", eval_strategy="steps", fp8="true",
    )  # fmt: skip
    assert len(problems) == 6
    together = "\n".join(problems)
    assert 'Unknown option "learning_rat" in run.yaml, line 4. Did you mean "learning_rate"?' in together
    assert 'run.yaml, line 5: "num_train_epochs" must be a number' in together
    assert "run.yaml, line 6" in together
    assert 'Did you mean "lora"?' in together
    assert "run.yaml, line 8: eval_strategy: steps requires an evaluation dataset" in together
    assert 'run.yaml, line 9: burnish does not support "fp8".' in together


@pytest.mark.parametrize("name", ["logging_steps", "eval_steps", "save_steps", "warmup_steps"])
def test_infinite_number_of_steps_is_rejected(name: str, tmp_path: Path) -> None:
    (problem,) = plan_errors(tmp_path, **{name: "inf"})
    assert f'"{name}" must be' in problem
    assert "inf" in problem


def test_problems_have_at_most_four_lines(tmp_path: Path) -> None:
    for problem in plan_errors(tmp_path, eval_strategy="steps", save_strategy="epoch", load_best_model_at_end="true"):
        assert len(problem.splitlines()) <= 4


@pytest.mark.parametrize("name", ["flash_attention_2", "kernels-community/flash-attn2"])
def test_attention_for_gpus_is_rejected_on_cpu(name: str, tmp_path: Path) -> None:
    message = "\n".join(plan_errors(tmp_path, attn_implementation=name, use_cpu="true"))
    assert f"attn_implementation: {name} requires a GPU" in message


@pytest.mark.parametrize(("has_gpu", "missing"), [(False, "a GPU"), (True, "the library flash-attn")])
@pytest.mark.parametrize("name", ["fa2", "fa3", "fa4"])
def test_flash_attn_that_is_not_available_gives_a_note(
    name: str, has_gpu: bool, missing: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    monkeypatch.setattr(attention_choice, "_is_available", lambda name: False)
    (note,) = (note for note in plan(raw_options(tmp_path, flash_attn=name)).notes if "flash_attn" in note)
    assert f"flash_attn: {name} has no effect without {missing}" in note
    assert attention_choice.requested_attention(ModelOptions(flash_attn=name)) is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(attention_choice, "_is_available", lambda name: True)
    assert attention_choice.requested_attention(ModelOptions(flash_attn=name)) == f"flash_attention_{name[-1]}"


def test_flash_attention_is_rejected_in_float32(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(checks, "device_of", lambda options: torch.device("cuda"))
    overrides = plan(raw_options(tmp_path)).options
    float32, bf16 = (
        dataclasses.replace(overrides, attn_implementation="flash_attention_2", finetuning_type="full", bf16=is_half)
        for is_half in (False, True)
    )
    assert "this run computes in float32" in str(next(checks.check_flash_attention(float32)))
    assert list(checks.check_flash_attention(bf16)) == []


def test_consequential_errors_are_not_reported(tmp_path: Path) -> None:
    values = raw_options(tmp_path)
    values["output_dri"] = values.pop("output_dir")
    with pytest.raises(UserError) as caught:
        plan(values)
    assert [str(p) for p in caught.value.problems] == [
        'Unknown option "output_dri" in run.yaml, line 3. Did you mean "output_dir"?'
    ]


def test_training_is_the_default(tmp_path: Path) -> None:
    assert trains(plan(raw_options(tmp_path)).options)
    assert not trains(plan(raw_options(tmp_path, do_predict="true", val_size="0.1")).options)
    assert trains(plan(raw_options(tmp_path, do_predict="true", val_size="0.1", do_train="true")).options)
    assert "There is nothing to do" in plan_errors(tmp_path, do_train="false")[0]


def test_option_alias_is_accepted_and_mentioned(tmp_path: Path) -> None:
    made = plan(raw_options(tmp_path, evaluation_strategy="steps", val_size="0.1"))
    assert made.options.eval_strategy == "steps"
    assert made.provenance["eval_strategy"] == "run.yaml, line 4"
    assert any('"eval_strategy"' in note for note in made.notes)


def test_option_without_effect_gives_a_reason(tmp_path: Path) -> None:
    ignored = next(spec for spec in specs(RunOptions).values() if spec.ignored)
    value = not ignored.default if isinstance(ignored.default, bool) else "{}"
    notes = plan(raw_options(tmp_path, **{ignored.name: value})).notes
    assert any(ignored.name in note and ignored.ignored.rstrip(".") in note for note in notes)


def test_foreign_option_at_harmless_value_is_ignored(tmp_path: Path) -> None:
    made = plan(
        raw_options(tmp_path, push_to_hub="no", fp8="False", debug="", save_on_each_node="0", quantization_bit=None)
    )
    assert not made.notes
    assert "fp8" not in made.provenance


def test_foreign_option_without_effect_is_mentioned(tmp_path: Path) -> None:
    (note,) = plan(raw_options(tmp_path, vllm_gpu_util="0.9")).notes
    assert '"vllm_gpu_util" has no effect with infer_backend: huggingface' in note


def test_unused_eval_dataset_is_mentioned(tmp_path: Path) -> None:
    (note,) = plan(raw_options(tmp_path, val_size="0.1")).notes
    assert note.startswith("val_size: 0.1 is set, but the run never evaluates.")
    (note,) = plan(raw_options(tmp_path, eval_dataset="e")).notes
    assert note.startswith("eval_dataset is set, but the run never evaluates.")
    assert note.endswith("or do_train: true and do_eval: true.")
    assert not plan(raw_options(tmp_path, val_size="0.1", do_train="true", do_eval="true")).notes
    assert not plan(raw_options(tmp_path, val_size="0.1", eval_strategy="epoch")).notes
    assert not plan(raw_options(tmp_path, val_size="0.1", do_train="false", do_predict="true")).notes


@pytest.mark.parametrize("name", ["do_eval", "do_predict"])
def test_run_that_does_not_train_is_mentioned_unless_requested(tmp_path: Path, name: str) -> None:
    options = {"val_size": "0.1", "stage": "sft", name: "true"}
    notes = plan(raw_options(tmp_path, **options)).notes
    assert (
        f"Nothing is trained, because {name} is set and do_train is not. To train as well, set do_train: true." in notes
    )
    for value in ("true", "false"):
        assert not any("Nothing is trained" in n for n in plan(raw_options(tmp_path, do_train=value, **options)).notes)


def test_plan_is_immutable(tmp_path: Path) -> None:
    made = plan(raw_options(tmp_path))
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.world_size = 2  # type: ignore[misc]
    with pytest.raises(TypeError):
        made.provenance["seed"] = "me"  # type: ignore[index]


def test_derived_values_are_reported_with_their_source(tmp_path: Path) -> None:
    made = plan(raw_options(tmp_path, seed="7", save_steps="500"))
    changed = {spec.name: (value, where) for spec, value, where in made.non_default_options()}
    assert changed["seed"] == (7, "run.yaml, line 4")
    assert "save_steps" not in changed


def test_declared_options_are_not_listed_as_absent() -> None:
    claimed = {**specs(RunOptions), **aliases()}
    assert not sorted({*UNSUPPORTED, *NO_EFFECT} & set(claimed))


def test_every_option_of_peer_libraries_is_known_or_rejected_by_name(golden_folder: Path) -> None:
    lists = json.loads((golden_folder / "peer_arguments.json").read_text(encoding="utf-8"))
    names = [entry["name"] for entries in lists.values() if isinstance(entries, list) for entry in entries]
    assert "gradient_accumulation_steps" in names
    assert not [name for name in names if name not in {**specs(RunOptions), **aliases(), **UNSUPPORTED, **NO_EFFECT}]


def test_checks_of_every_component_are_called() -> None:
    names = {check.__name__ for check in component_checks()}
    assert {"check_intervals", "check_parallel", "check_trackers", "check_output_dir"} <= names


# --- output_dir -------------------------------------------------------------------------------------------------------


def test_folder_of_run_killed_during_its_first_write_is_reused(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / ".launch.json.incomplete").write_text("{")
    assert plan(raw_options(tmp_path)).options.resume == "auto"


def test_folder_with_other_files_is_rejected_without_overwrite(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("words")
    (problem,) = plan_errors(tmp_path)
    assert "contains other files: thesis.tex" in problem
    assert "overwrite_output_dir" in problem
    assert plan(raw_options(tmp_path, overwrite_output_dir="true")).options.overwrite_output_dir


def test_folder_with_checkpoints_is_resumed_by_default(tmp_path: Path) -> None:
    (tmp_path / "out" / "checkpoint-4").mkdir(parents=True)
    assert "that were not written by burnish: checkpoint-4." in plan_errors(tmp_path)[0]
    (tmp_path / "out" / "checkpoint-4" / "manifest.json").write_text("{}")
    assert plan(raw_options(tmp_path)).options.resume == "auto"
    assert "an earlier run" in plan_errors(tmp_path, resume="never")[0]


def test_output_dir_that_is_a_file_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("")
    assert "is a file" in plan_errors(tmp_path)[0]


@pytest.mark.parametrize("output_dir", [None, "", "  "])
def test_missing_output_dir_is_rejected(tmp_path: Path, output_dir: str | None) -> None:
    assert "output_dir is missing" in plan_errors(tmp_path, output_dir=output_dir)[0]


# --- options against each other ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("wish", [{"eval_strategy": "steps"}, {"do_eval": "true"}, {"eval_on_start": "true"}])
def test_evaluation_without_dataset_names_both_remedies(tmp_path: Path, wish: dict[str, str]) -> None:
    (problem,) = plan_errors(tmp_path, **wish)
    assert "eval_dataset" in problem
    assert "val_size" in problem


@pytest.mark.parametrize("schedule", ["reduce_lr_on_plateau", "greedy"])
def test_schedule_by_metric_requires_evaluations(tmp_path: Path, schedule: str) -> None:
    (problem,) = plan_errors(tmp_path, lr_scheduler_type=schedule)
    assert "Set eval_strategy: steps or epoch" in problem


@pytest.mark.parametrize(
    "wish",
    [{"load_best_model_at_end": "true", "save_steps": "500"}, {"lr_scheduler_type": "greedy"},
     {"lr_scheduler_type": "reduce_lr_on_plateau"}, {"save_strategy": "best"}],
)  # fmt: skip
def test_default_metric_is_refused_if_several_datasets_are_evaluated(tmp_path: Path, wish: dict[str, str]) -> None:
    values = {"eval_strategy": "steps", "eval_dataset": "debug,other", "eval_on_each_dataset": "true", **wish}
    options = plan(raw_options(tmp_path, **values)).options
    (problem,) = checks.check_best_model_metric(options, ["loss"], ["debug", "other"])
    assert "eval_debug_loss" in str(problem)
    assert list(checks.check_best_model_metric(options, ["loss"], [""])) == []
    unread = dataclasses.replace(
        options, load_best_model_at_end=False, lr_scheduler_type="linear", save_strategy="steps"
    )
    assert list(checks.check_best_model_metric(unread, ["loss"], ["debug", "other"])) == []


@pytest.mark.parametrize("schedule", ["reduce_lr_on_plateau", "greedy", "constant"])
def test_warmup_of_a_schedule_without_one_is_noted(tmp_path: Path, schedule: str) -> None:
    values = {"eval_strategy": "steps", "val_size": "2", "lr_scheduler_type": schedule, "warmup_steps": "3"}
    assert any("warmup_steps has no effect" in note for note in plan(raw_options(tmp_path, **values)).notes)


@pytest.mark.parametrize(("values", "note"), [
    ({"eval_steps": "5"}, '"eval_steps" has no effect: eval_strategy is no.'),
    ({"save_steps": "5", "save_strategy": "epoch"}, '"save_steps" has no effect: save_strategy is epoch.'),
    ({"logging_steps": "5", "logging_strategy": "epoch"}, '"logging_steps" has no effect: logging_strategy is epoch.'),
    ({"warmup_ratio": "0.1", "warmup_steps": "3"}, '"warmup_ratio" has no effect: warmup_steps is set.'),
    ({"mix_strategy": "interleave_under"}, '"mix_strategy" has no effect on a single dataset.'),
])  # fmt: skip
def test_unused_interval_is_noted(tmp_path: Path, values: dict, note: str) -> None:
    assert note in plan(raw_options(tmp_path, **values)).notes
    assert not any("has no effect" in note for note in plan(raw_options(tmp_path)).notes)


def test_logging_steps_that_set_the_interval_of_evaluations_are_not_noted(tmp_path: Path) -> None:
    values = {"logging_steps": "5", "logging_strategy": "epoch", "eval_strategy": "steps", "val_size": "2"}
    assert not any("has no effect" in note for note in plan(raw_options(tmp_path, **values)).notes)


@pytest.mark.parametrize("schedule", ["reduce_lr_on_plateau", "greedy"])
@pytest.mark.parametrize(("values", "is_noted"), [
    ({}, False), ({"metric_for_best_model": "accuracy"}, True), ({"greater_is_better": "true"}, True),
    ({"metric_for_best_model": "accuracy", "lr_scheduler_kwargs": '{"mode": "max"}'}, False),
])  # fmt: skip
def test_schedule_with_the_direction_of_a_loss_is_noted(
    tmp_path: Path, schedule: str, values: dict, is_noted: bool
) -> None:
    more = {"eval_strategy": "steps", "val_size": "2", "lr_scheduler_type": schedule, "compute_accuracy": "true"}
    notes = plan(raw_options(tmp_path, **more, **values)).notes
    assert any("although higher is better" in note for note in notes) is is_noted


def test_metric_of_one_dataset_requires_evaluations_on_each(tmp_path: Path) -> None:
    values = {"eval_strategy": "steps", "eval_dataset": "debug,other", "metric_for_best_model": "eval_debug_loss"}
    options = plan(raw_options(tmp_path, **values)).options
    (problem,) = checks.check_best_model_metric(options, ["loss"], [""])
    assert "Set eval_on_each_dataset: true." in problem.remedy
    assert list(checks.check_best_model_metric(options, ["loss"], ["debug", "other"])) == []
    separate = dataclasses.replace(options, eval_on_each_dataset=True)
    (problem,) = checks.check_best_model_metric(separate, ["loss"], ["another"])
    assert "eval_on_each_dataset" not in problem.remedy
    unknown = dataclasses.replace(options, metric_for_best_model="eval_debug_sari")
    assert "eval_on_each_dataset" not in next(checks.check_best_model_metric(unknown, ["loss"], [""])).remedy


def test_choice_of_words_given_as_a_mapping_or_a_list_names_the_choices(tmp_path: Path) -> None:
    for value in ({"rope_type": "yarn", "factor": 4.0}, ["yarn"]):
        (problem,) = plan_errors(tmp_path, rope_scaling=value)
        assert f'"rope_scaling" must be one of linear, dynamic, yarn, llama3. Received: {value!r}.' in problem


def test_loss_of_pairs_has_no_effect_on_other_stages(tmp_path: Path) -> None:
    for name in ("kto_pair", "exo_pair"):
        notes = plan(raw_options(tmp_path, stage="kto", pref_loss=name)).notes
        assert '"pref_loss" has no effect: stage is kto.' in notes
        assert plan_errors(tmp_path, stage="dpo", pref_loss=name)


def test_quantization_method_has_no_effect_without_bits(tmp_path: Path) -> None:
    notes = plan(raw_options(tmp_path, quantization_method="hqq")).notes
    assert '"quantization_method" (run.yaml, line 4) has no effect without "quantization_bit".' in notes
    assert "Set quantization_method: bnb" in plan_errors(tmp_path, quantization_method="hqq", quantization_bit="4")[0]


def test_flag_with_no_before_an_option_turns_it_off(tmp_path: Path) -> None:
    flags = "--model_name_or_path m --dataset d --no_enable_thinking --no_double_quantization --no-use-fast-tokenizer"
    file = raw_options(tmp_path, enable_thinking="true")
    made = plan(file | split_arguments(flags.split())[1])
    assert (made.options.enable_thinking, made.options.double_quantization) == (False, False)
    assert made.provenance["enable_thinking"] == "the command line"
    assert 'Unknown option "no_enable_thinking" in run.yaml' in plan_errors(tmp_path, no_enable_thinking="true")[0]
    for flag in (["--no_learning_rate"], ["--no_enable_thinking", "false"]):
        with pytest.raises(UserError, match="Unknown option"):
            plan(file | split_arguments(flag)[1])


def test_distribution_of_batches_has_no_effect(tmp_path: Path) -> None:
    notes = plan(raw_options(tmp_path, dispatch_batches="false", split_batches="true")).notes
    assert sum("has no effect: examples are distributed to processes by burnish itself." in note for note in notes) == 2


def test_names_of_early_versions_are_aliases(tmp_path: Path) -> None:
    old = {"num_layer_trainable": "3", "name_module_trainable": "mlp", "dev_ratio": "0.01"}
    options = plan(raw_options(tmp_path, finetuning_type="freeze", eval_strategy="steps", **old)).options
    assert (options.freeze_trainable_layers, options.freeze_trainable_modules) == (3, ["mlp"])
    assert options.val_size == 0.01


def test_load_best_model_requires_evaluations_at_checkpoints(tmp_path: Path) -> None:
    best = {"load_best_model_at_end": "true", "val_size": "0.1"}
    assert "eval_strategy is no" in plan_errors(tmp_path, **best)[0]
    assert "save_strategy: steps" in plan_errors(tmp_path, **best, eval_strategy="steps", save_strategy="epoch")[0]
    steps = {"eval_strategy": "steps", "save_strategy": "steps"}
    assert "multiple" in plan_errors(tmp_path, **best, **steps, eval_steps="3", save_steps="10")[0]
    assert "both fractions below 1" in plan_errors(tmp_path, **best, **steps, eval_steps="0.1", save_steps="10")[0]
    assert plan(raw_options(tmp_path, **best, **steps, eval_steps="0.1", save_steps="0.3"))
    assert plan(raw_options(tmp_path, **best, **steps, eval_steps="5", save_steps="10"))


# --- a command of another tool ----------------------------------------------------------------------------------------


def test_llamafactory_command_is_planned_unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    _, flags = split_arguments(WALK_THROUGH.split())
    options = plan(flags).options
    for name, item in flags.items():
        value = getattr(options, name)
        written = ",".join(map(str, value)) if isinstance(value, list) else str(value)
        assert written.lower() == item.value.lower() or float(value) == float(item.value), name
    assert (options.use_badam, options.fp16, options.packing, options.dataset) == (True, True, False, ["alpaca_zh"])


# --- defaults that depend on the run ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "rate"),
    [
        ({"stage": "dpo", "finetuning_type": "full"}, 5e-7), ({"stage": "dpo", "finetuning_type": "lora"}, 5e-6),
        ({"stage": "kto", "finetuning_type": "full"}, 5e-7), ({"stage": "sft"}, 5e-5), ({"stage": "rm"}, 5e-5),
        ({"stage": "dpo", "lr": "1e-6"}, 1e-6),
    ],
    ids=str,
)  # fmt: skip
def test_default_learning_rate_depends_on_stage(values: dict[str, str], rate: float, tmp_path: Path) -> None:
    made = plan(raw_options(tmp_path, **values))
    assert made.options.learning_rate == rate
    assert not [note for note in made.notes if note.startswith("learning_rate")]


def test_learning_rate_of_five_gives_a_note(tmp_path: Path) -> None:
    (note,) = [note for note in plan(raw_options(tmp_path, learning_rate="5")).notes if "learning_rate 5" in note]
    assert "Set learning_rate: 1e-5" in note


def test_default_logging_steps_log_50_times_per_run(tmp_path: Path) -> None:
    options = plan(raw_options(tmp_path, val_size="0.1", eval_strategy="steps")).options
    assert (options.logging_steps, options.logging_first_step, options.eval_steps) == (0.02, True, 500)
    options = plan(raw_options(tmp_path, logging_steps="7", val_size="0.1", eval_strategy="steps")).options
    assert (options.logging_steps, options.logging_first_step, options.eval_steps) == (7, False, None)
    for strategy in ("no", "epoch"):
        assert not plan(raw_options(tmp_path, logging_strategy=strategy)).options.logging_first_step


def test_packed_sequences_of_one_token_are_rejected(tmp_path):
    with pytest.raises(UserError, match="With cutoff_len: 1, packed sequences contain no token to predict"):
        plan(raw_options(tmp_path, stage="pt", cutoff_len=1))
