"""TrainingArguments: transformers' fields, old names, and messages for rejected values."""

import dataclasses
import json
import math
import re
import warnings
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_type_hints

import pytest
import torch
import transformers
from transformers import HfArgumentParser
from transformers.trainer_utils import IntervalStrategy, SchedulerType

import burnish
from burnish import RLOOConfig, SFTConfig, TrainingArguments
from burnish.config.conversion import members
from burnish.trainer.arguments.values import CHECKED_ELSEWHERE
from trainer_run import arguments

SPEC = Path(__file__).parents[1] / "golden" / "peer_arguments.json"


@pytest.mark.parametrize(
    ("kind", "listed"), [(TrainingArguments, "TrainingArguments"), (SFTConfig, "SFTConfig adds or changes")]
)
def test_every_field_exists_with_its_type_and_default(kind, listed):
    own, types = {field.name: field for field in dataclasses.fields(kind)}, get_type_hints(kind)
    for spec in json.loads(SPEC.read_text())[listed]:
        name, field = spec["name"], own[spec["name"]]
        default = field.default if field.default is not dataclasses.MISSING else field.default_factory()
        assert (type(default), default) == (type(spec["default"]), spec["default"]), name
        if name != "parallelism_config":  # accelerate's class, which burnish does not replace; every value is rejected
            assert str(types[name]).replace("typing.", "") == spec["type"], name


def test_every_field_of_installed_transformers_exists():
    own = {field.name for field in dataclasses.fields(TrainingArguments)}
    assert not {field.name for field in dataclasses.fields(transformers.TrainingArguments)} - own


@pytest.mark.parametrize(
    ("old", "name", "value"),
    [
        ({"evaluation_strategy": "epoch"}, "eval_strategy", "epoch"),
        ({"no_cuda": True}, "use_cpu", True),
        ({"per_gpu_train_batch_size": 3}, "per_device_train_batch_size", 3),
        ({"per_gpu_eval_batch_size": 3}, "per_device_eval_batch_size", 3),
        ({"warmup_ratio": 0.1}, "warmup_steps", 0.1),
        ({"group_by_length": True}, "train_sampling_strategy", "group_by_length"),
        ({"include_inputs_for_metrics": True}, "include_for_metrics", ["inputs"]),
        ({"include_tokens_per_second": True}, "include_num_input_tokens_seen", "all"),
        ({"adafactor": True}, "optim", "adafactor"),
        ({"logging_dir": "logs"}, "logging_dir", "logs"),
        ({"push_to_hub_model_id": "a/b"}, "hub_model_id", "a/b"),
        ({"gradient_checkpointing": True}, "activation_checkpointing", True),
        ({"save_safetensors": True}, "output_dir", "out"),
    ],
)
def test_deprecated_argument_name_works_with_one_warning(old, name, value):
    with pytest.warns(FutureWarning) as message:
        args = TrainingArguments("out", **old)
    assert getattr(args, name) == value
    assert len(message) == 1
    assert next(iter(old)) in str(message[0].message)


def test_unknown_argument_name_is_rejected():
    with pytest.raises(TypeError, match="learning_rat"):
        TrainingArguments("out", learning_rat=1)


def test_deprecated_names_work_in_a_subclass():
    @dataclasses.dataclass
    class CustomArguments(TrainingArguments):
        extra: int = 3

    with pytest.warns(FutureWarning):
        args = CustomArguments("out", no_cuda=True, extra=4)
    assert args.use_cpu
    assert args.extra == 4


def test_strings_become_transformers_enums_and_stay_strings():
    args = arguments("out", eval_strategy="steps", lr_scheduler_type="cosine")
    assert args.eval_strategy is IntervalStrategy.STEPS
    assert args.lr_scheduler_type is SchedulerType.COSINE
    assert args.eval_strategy == "steps"
    assert args.to_dict()["lr_scheduler_type"] == "cosine"


def test_dependent_arguments_are_derived():
    args = arguments("out", eval_strategy="steps", logging_steps=7, load_best_model_at_end=True, save_strategy="steps",
                     save_steps=14)  # fmt: skip
    assert (args.eval_steps, args.do_eval, args.metric_for_best_model, args.greater_is_better) == (
        7,
        True,
        "loss",
        False,
    )
    assert arguments("out", metric_for_best_model="accuracy").greater_is_better is True


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bf16": True, "fp16": True}, "At most one of fp16 and bf16"),
        ({"warmup_steps": -1}, "`warmup_steps` must be at least 0"),
        ({"logging_steps": 10.5}, "`logging_steps` must be an integer if it is greater than 1"),
        ({"save_strategy": "steps", "save_steps": math.inf}, "`save_steps` must be an integer .* Received: inf"),
        ({"logging_steps": 0}, "requires a non-zero `logging_steps`"),
        ({"eval_strategy": "steps", "eval_steps": 2.5}, "`eval_steps` must be an integer"),
        ({"eval_strategy": "steps", "load_best_model_at_end": True, "save_strategy": "epoch"}, "save_strategy epoch"),
        ({"eval_strategy": "steps", "eval_steps": 10, "save_strategy": "steps", "save_steps": 15,
          "load_best_model_at_end": True}, "to be a multiple of `eval_steps`"),
        ({"eval_strategy": "steps", "eval_steps": 0.1, "save_strategy": "steps", "save_steps": 15,
          "load_best_model_at_end": True}, "both fractions below 1"),
        ({"lr_scheduler_type": "reduce_lr_on_plateau"}, "requires an `eval_strategy`"),
        ({"dataloader_prefetch_factor": 2}, "requires `dataloader_num_workers` above 0"),
        ({"torch_empty_cache_steps": 0}, "must be a positive integer"),
        ({"eval_strategy": "sometimes"}, "sometimes"),
        ({"optim": "adamw_torh"}, r'Did you mean "adamw_torch"\?'),
        ({"deepspeed": {"optimizer": {"type": "Adam", "params": {"lr": 0.1}}}}, '"optimizer" of the DeepSpeed config'),
        ({"parallelism_config": object()}, "parallelism_config"),
    ],
)  # fmt: skip
def test_contradictory_arguments_are_rejected(options, message):
    with pytest.raises(ValueError, match=message):
        arguments("out", **options)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("per_device_train_batch_size", 0, "at least 1 example. Received: 0"),
        ("per_device_eval_batch_size", 0, "at least 1 example"),
        ("gradient_accumulation_steps", 0, "at least 1"),
        ("gradient_accumulation_steps", 1.5, "an integer. Received: 1.5"),
        ("learning_rate", -1e-3, "at least 0"),
        ("learning_rate", float("nan"), "a number"),
        ("learning_rate", "fast", "a number. Received: 'fast'"),
        ("num_train_epochs", -1, "at least 0"),
        ("weight_decay", -0.1, "at least 0"),
        ("adam_beta1", 1.5, "less than 1"),
        ("label_smoothing_factor", 1.5, "at most 1"),
        ("neftune_noise_alpha", -5, "at least 0"),
        ("eval_accumulation_steps", 0, "at least 1"),
        ("dataloader_num_workers", -1, "at least 0"),
        ("logging_steps", -1, "greater than 0"),
        ("max_length", 0, "at least 1 token"),
        ("dataset_num_proc", 0, "at least 1"),
        ("pad_to_multiple_of", 0, "at least 1 token"),
        ("pad_to_multiple_of", "-8", "at least 1 token"),
    ],
)
def test_number_that_makes_training_impossible_is_rejected(name, value, message):
    with pytest.raises(ValueError, match=f"`{name}` must be .*{message}"):
        SFTConfig("out", use_cpu=True, **{name: value})


def test_setters_and_subclasses_validate_like_the_constructor():
    with pytest.raises(ValueError, match="`per_device_train_batch_size` must be at least 1 example"):
        arguments("out").set_training(batch_size=0)

    @dataclasses.dataclass
    class CustomArguments(TrainingArguments):
        depth: int = -3

    assert CustomArguments("out", use_cpu=True).depth == -3
    with pytest.raises(ValueError, match="`gradient_accumulation_steps`"):
        CustomArguments("out", gradient_accumulation_steps=0)


@pytest.mark.parametrize(
    "options",
    [{"save_steps": -1}, {"save_total_limit": 0}, {"max_grad_norm": -1.0}, {"max_steps": -7}, {"learning_rate": 0.0},
     {"num_train_epochs": -1, "max_steps": 5}, {"num_train_epochs": 0}, {"eval_steps": 0},
     {"logging_strategy": "no", "logging_steps": 0}],
    ids=str,
)  # fmt: skip
def test_number_that_transformers_treats_as_none_is_accepted(options):
    args = arguments("out", **options)
    assert all(getattr(args, name) == value for name, value in options.items())


def test_number_can_be_given_as_text():
    """YAML parses 1e-4 in a config file of a script as text."""
    args = arguments("out", learning_rate="1e-4", per_device_train_batch_size="4", max_steps=1e3)
    assert (args.learning_rate, args.per_device_train_batch_size, args.max_steps) == (1e-4, 4, 1000)
    assert type(args.max_steps) is int


def test_fractional_step_intervals_can_be_multiples_of_each_other():
    arguments("out", eval_strategy="steps", eval_steps=0.1, save_strategy="steps", save_steps=0.3,
              load_best_model_at_end=True)  # fmt: skip


def test_arguments_without_effect_are_reported_once():
    with pytest.warns(UserWarning, match="average_tokens_across_devices") as message:
        arguments("out", average_tokens_across_devices=False)
    assert len(message) == 1


def test_accelerate_dispatch_settings_without_effect_are_reported():
    with pytest.warns(UserWarning, match="even_batches, split_batches|split_batches, even_batches") as message:
        arguments("out", accelerator_config={"split_batches": True, "even_batches": False})
    assert len(message) == 1


def test_kubeflow_is_notified_of_a_run_on_its_platform(monkeypatch):
    assert arguments("out", report_to="none").report_to == []
    assert arguments("out", report_to=None).report_to == []
    monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_URL", "https://trainer.example")
    assert arguments("out", report_to="none").report_to == ["kubeflow"]
    assert arguments("out", report_to=["kubeflow", "tensorboard"]).report_to == ["kubeflow", "tensorboard"]


def test_common_arguments_give_no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        arguments("out")


def test_command_line_is_parsed_by_transformers_parser():
    (args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(
        ["--output_dir", "o", "--use_cpu", "--learning_rate", "1e-3", "--lr_scheduler_kwargs", '{"num_cycles": "2"}']
    )
    assert args.learning_rate == 1e-3
    assert args.lr_scheduler_kwargs == {"num_cycles": 2}


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        (
            "lr_scheduler_kwargs",
            '{"num_cycles": 1, "num_cycles": 2}',
            '`lr_scheduler_kwargs` has the duplicate key "num_cycles"',
        ),
        ("model_init_kwargs", '{"a": {"b": 1, "b": 2}}', '`model_init_kwargs` has the duplicate key "b"'),
        ("dataset_kwargs", '{"a": 1', "`dataset_kwargs` must be a dictionary, or its JSON text"),
    ],
)
def test_invalid_dictionary_text_is_rejected_by_name(name, text, message):
    with pytest.raises(ValueError, match=message):
        SFTConfig("out", use_cpu=True, **{name: text})


def test_arguments_are_serializable():
    args = arguments("out", hub_token="secret")
    assert json.loads(args.to_json_string())["learning_rate"] == 0.1
    assert "secret" not in args.to_json_string()
    assert all(isinstance(v, bool | int | float | str) for v in args.to_sanitized_dict().values())
    assert "learning_rate=0.1" in str(args)


def test_derived_numbers_match_transformers():
    args = arguments("out", warmup_steps=0.1, per_device_eval_batch_size=3)
    assert (args.train_batch_size, args.eval_batch_size, args.n_gpu, args.world_size) == (4, 3, 0, 1)
    assert args.get_warmup_steps(171) == 18
    assert args.device.type == "cpu"
    assert arguments("out", warmup_steps=5).get_warmup_steps(171) == 5
    assert arguments("out", ddp_timeout=90).ddp_timeout_delta == timedelta(seconds=90)
    assert TrainingArguments.default_optim == transformers.TrainingArguments.default_optim


def test_setters_can_be_chained():
    args = arguments("out").set_training(1e-4, batch_size=2).set_logging(steps=3).set_evaluate("epoch")
    assert (args.learning_rate, args.per_device_train_batch_size, args.logging_steps) == (1e-4, 2, 3)
    assert (args.eval_strategy, args.do_eval, args.do_train) == ("epoch", True, True)
    args.set_save("epoch").set_lr_scheduler("cosine", warmup_steps=2).set_optimizer("sgd").set_dataloader(3)
    assert (args.save_strategy, args.lr_scheduler_type, args.optim) == ("epoch", "cosine", "sgd")
    assert args.per_device_train_batch_size == 3


def test_output_dir_has_a_default():
    assert TrainingArguments().output_dir == "trainer_output"
    assert TrainingArguments("~/x").output_dir == str(Path.home() / "x")


@pytest.mark.parametrize("name", ["TrainingArguments", "Seq2SeqTrainingArguments"])
def test_flags_match_transformers(name):
    """Compare names, defaults, choices, and which flags need no value, as derived from the fields by the parser."""

    def flags(library):
        actions = HfArgumentParser(getattr(library, name))._actions
        return {action.dest: action for action in actions if action.dest != "help"}

    ours, theirs = flags(burnish), flags(transformers)
    is_newest = "activation_checkpointing" in theirs  # in 5.23; earlier versions have other defaults and fewer choices
    for flag, action in theirs.items():
        own = ours[flag]
        assert set(action.option_strings) <= set(own.option_strings), flag
        assert own.help, flag
        if flag != "ddp_backend":  # the choices depend on torch
            taken, known = set(own.choices or ()), set(action.choices or ())
            assert taken == known if is_newest else taken >= known, flag
        same = ("default", "nargs", "const") if is_newest else ("nargs", "const")
        assert [getattr(own, it) for it in same] == [getattr(action, it) for it in same], flag


def test_checkpointing_flag_needs_no_value():
    for flag in ("--gradient_checkpointing", "--activation_checkpointing"):
        (args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(["--output_dir", "o", flag])
        assert args.activation_checkpointing is True
        assert args.gradient_checkpointing is True


def test_deprecated_flags_keep_their_meaning():
    flags = ["--evaluation_strategy", "epoch", "--no_cuda", "--warmup_ratio", "0.1", "--overwrite_output_dir"]
    (args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(["--output_dir", "o", *flags])
    assert (args.eval_strategy, args.use_cpu, args.warmup_steps) == ("epoch", True, 0.1)
    assert args.overwrite_output_dir is True


def test_script_can_read_a_deprecated_name():
    args = arguments("out", eval_strategy="epoch")
    assert args.evaluation_strategy == "epoch"
    assert not args.tpu_metrics_debug
    assert not args.overwrite_output_dir
    with pytest.raises(AttributeError, match="evaluation_strategi"):
        args.evaluation_strategi  # noqa: B018


def test_warmup_ratio_one_is_all_steps_and_warmup_steps_one_is_one():
    with pytest.warns(FutureWarning, match="warmup_ratio"):
        assert arguments("out", warmup_ratio=1.0).get_warmup_steps(50) == 50
    assert arguments("out", warmup_steps=1.0).get_warmup_steps(50) == 1
    with pytest.warns(FutureWarning, match="warmup_ratio"):
        assert arguments("out", warmup_ratio=1.0, warmup_steps=7).get_warmup_steps(50) == 7


def test_warmup_ratio_above_one_is_rejected(tmp_path):
    with pytest.raises(ValueError, match="must be in"):
        TrainingArguments(str(tmp_path), warmup_ratio=5)


CHOICES = [
    (kind, name)
    for kind in (TrainingArguments, SFTConfig)
    for name, spec in kind.declared.items()
    if spec.choices and str in members(spec.type) and name not in CHECKED_ELSEWHERE
]


@pytest.mark.parametrize(("kind", "name"), CHOICES, ids=lambda value: getattr(value, "__name__", value))
def test_invalid_choice_is_rejected(kind, name, tmp_path):
    with pytest.raises(ValueError, match=f"nonsense|{name}"):
        kind(str(tmp_path), use_cpu=True, **{name: "nonsense"})
    kind(str(tmp_path), use_cpu=True, report_to="none", **{name: kind.declared[name].choices[0]})


@pytest.mark.parametrize(
    ("options", "meant"), [("evalution_strategy", ' Did you mean "eval_strategy"?'), ("xyzzy", "")]
)
def test_misspelled_argument_is_rejected_with_a_suggestion(options, meant, tmp_path):
    message = f"TrainingArguments.__init__() got an unexpected keyword argument '{options}'.{meant}"
    with pytest.raises(TypeError) as result:
        TrainingArguments(str(tmp_path), **{options: "no"})
    assert str(result.value) == message


@pytest.mark.parametrize(
    ("kind", "name", "expected"),
    [
        (RLOOConfig, "loss_type", "It is an argument of CPOConfig, DPOConfig, GRPOConfig, KTOConfig, SFTConfig."),
        (TrainingArguments, "predict_with_generate", "It is an argument of Seq2SeqTrainingArguments."),
        (
            TrainingArguments,
            "max_length",
            "It is an argument of CPOConfig, DPOConfig, GRPOConfig, KTOConfig, ORPOConfig and 3 more.",
        ),
    ],
)
def test_argument_of_another_config_is_rejected_with_its_name(kind, name, expected, tmp_path):
    with pytest.raises(TypeError, match=re.escape(f"unexpected keyword argument '{name}'. {expected}")):
        kind(str(tmp_path), **{name: 1})


# --- arguments of another type ----------------------------------------------------------------------------------------

CONFIGS = [name for name in burnish.__all__ if name.endswith(("Config", "Arguments"))]
TRAINERS = [name for name in burnish.__all__ if name.endswith("Trainer")]


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("output_dir", [4, True, b"out", ["out"], {"learning_rate": 1}], ids=str)
def test_an_output_dir_of_another_type_is_refused_in_a_sentence(kind: str, output_dir: Any) -> None:
    with pytest.raises(TypeError, match=r"`output_dir` must be a str or a path. Received: "):
        getattr(burnish, kind)(output_dir)


@pytest.mark.parametrize("kind", TRAINERS)
@pytest.mark.parametrize("model", [4, b"model", [], object()], ids=lambda model: type(model).__name__)
def test_a_model_of_another_type_is_refused_in_a_sentence(kind: str, model: Any) -> None:
    with pytest.raises(TypeError, match=r"`model` must be a .* Received: "):
        getattr(burnish, kind)(model)


@pytest.mark.parametrize("kind", TRAINERS)
@pytest.mark.parametrize("args", [4, "out", [], {"output_dir": "out"}], ids=lambda args: type(args).__name__)
def test_args_of_another_type_are_refused_in_a_sentence(kind: str, args: Any) -> None:
    model = torch.nn.Linear(2, 2)
    model.config = SimpleNamespace(name_or_path="")
    with pytest.raises(TypeError, match=r"`args` must be an instance of [A-Za-z0-9]+. Received: "):
        getattr(burnish, kind)(model, args=args)


@pytest.mark.parametrize(
    ("name", "value"),
    [("callbacks", 4), ("callbacks", [4]), ("callbacks", "log"), ("optimizers", 4), ("optimizers", [None]),
     ("optimizer_cls_and_kwargs", 4), ("compute_metrics", 4), ("data_collator", 4)],
)  # fmt: skip
def test_other_arguments_of_another_type_are_refused_in_a_sentence(name: str, value: Any, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r" (must|should) be a "):
        burnish.Trainer(torch.nn.Linear(2, 2), burnish.TrainingArguments(str(tmp_path)), **{name: value})
