"""Generation settings of a model folder: an invalid one is named before the model is loaded."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import GenerationConfig

from burnish import cli
from burnish.config.errors import UserError
from burnish.models.check import check_model
from burnish.models.generate import GenerationOptions, cache_argument, generate, generation_config
from burnish.models.generation_settings import _RULES, generation_file_problems, setting_problems
from burnish.models.load import load_model
from burnish.models.options import ModelOptions
from burnish.run.predictions.answers import is_plain
from tiny_models import saved_model, tiny_model, tiny_tokenizer

INVALID = ["", [], {"a": 1}, [[]], [["x"]], "x", -5, 10**30, float("nan"), True, 2.5]
VALID = {
    "eos_token_id": [2, 5], "pad_token_id": -1, "temperature": 1, "top_k": 50.0, "early_stopping": "never",
    "bad_words_ids": [[3, 4], [5]], "stop_strings": ["x"], "exponential_decay_length_penalty": [4, 1.5],
    "sequence_bias": [[[3], -1.0]], "do_sample": False, "max_new_tokens": None, "unknown": "x",
}  # fmt: skip


@pytest.mark.parametrize("name", _RULES)
def test_values_of_wrong_types_are_named(name: str) -> None:
    refused = [value for value in INVALID if setting_problems({name: value}, "here")]
    assert len(refused) >= len(INVALID) - 4
    for value in refused:
        (problem,) = setting_problems({name: value}, "here")
        assert str(problem).startswith(f'here: "{name}" must be ')


def test_valid_settings_are_accepted() -> None:
    assert not setting_problems(VALID, "here")
    assert not setting_problems(vars(GenerationConfig()), "here")


def test_file_that_is_not_json_is_reported_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved_model(tmp_path / "m")
    (tmp_path / "m/generation_config.json").write_text("{", encoding="utf-8")
    assert len(generation_file_problems(tmp_path / "m")) == 1
    (tmp_path / "d.json").write_text(json.dumps([{"instruction": "w1", "output": "w2"}]), encoding="utf-8")
    run = ["template=chatml", f"dataset={tmp_path / 'd.json'}", f"output_dir={tmp_path / 'o'}"]
    assert cli.main(["explain", f"model_name_or_path={tmp_path / 'm'}", *run]) == 2
    assert capsys.readouterr().err.count("not valid JSON") == 1


@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
def test_every_loading_names_the_setting(file: str, tmp_path: Path) -> None:
    """Also in ``config.json``, from which transformers reads the settings if there is no other file."""
    saved_model(tmp_path)
    (tmp_path / "generation_config.json").unlink()
    before = json.loads((tmp_path / "config.json").read_text(encoding="utf-8")) if file == "config.json" else {}
    (tmp_path / file).write_text(json.dumps({**before, "bad_words_ids": "x"}), encoding="utf-8")
    with pytest.raises(UserError, match='"bad_words_ids" must be a list of lists of token ids'):
        load_model(ModelOptions(model_name_or_path=str(tmp_path)))
    (problem,) = UserError(check_model(ModelOptions(model_name_or_path=str(tmp_path)))).problems
    assert f'{file}: "bad_words_ids" must be' in str(problem)


REFUSED_BY_GENERATE: list[dict[str, Any]] = [
    {"bad_words_ids": [[10**6]]}, {"stop_strings": ["w5"]}, {"penalty_alpha": 0.6}, {"force_words_ids": "x"},
    {"constraints": [1]}, {"prompt_lookup_num_tokens": 2}, {"sequence_bias": {"x": "y"}}, {"dola_layers": "high"},
]  # fmt: skip


@pytest.mark.parametrize("settings", REFUSED_BY_GENERATE, ids=str)
def test_setting_that_only_generate_refuses_is_one_sentence(settings: dict[str, Any]) -> None:
    model: Any = tiny_model()
    for name, value in settings.items():
        setattr(model.generation_config, name, value)
    options = GenerationOptions(max_new_tokens=2, do_sample=False, top_k=4)
    config = generation_config(model, tiny_tokenizer(), [2], options)
    with pytest.raises(UserError, match="transformers cannot generate with these settings"):
        generate(model, [[5, 6], [7]], config)


@pytest.mark.parametrize("setting", [{"num_return_sequences": 3}, {"return_dict_in_generate": True}], ids=str)
def test_settings_of_the_result_do_not_change_the_responses(setting: dict[str, Any]) -> None:
    model: Any = tiny_model()
    options = GenerationOptions(max_new_tokens=3, do_sample=False)
    plain = generate(model, [[5, 6], [7]], generation_config(model, tiny_tokenizer(), [2], options))
    for name, value in setting.items():
        setattr(model.generation_config, name, value)
    assert generate(model, [[5, 6], [7]], generation_config(model, tiny_tokenizer(), [2], options)) == plain


def test_cache_is_the_requested_one_for_a_model_with_its_own_default() -> None:
    """transformers replaces ``None`` with the setting of the model."""
    model: Any = tiny_model()
    options, caches = GenerationOptions(do_sample=False, max_new_tokens=2), []
    model.generation_config.cache_implementation = "static"

    def record(module: Any, args: Any, kwargs: Any) -> None:
        caches.append(type(kwargs[cache_argument(model)]).__name__)

    model.register_forward_pre_hook(record, with_kwargs=True)
    generate(model, [[5, 6]], generation_config(model, tiny_tokenizer(), [2], options))
    assert set(caches) == {"DynamicCache"}


def test_default_options_use_the_inference_engine() -> None:
    config = generation_config(tiny_model(), tiny_tokenizer(), [2], GenerationOptions())
    assert is_plain(config)
    config.cache_implementation = "static"
    assert not is_plain(config)
