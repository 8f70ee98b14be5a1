"""Added tokens: from their description to trained rows that are saved, exported and loaded elsewhere."""

import json

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from burnish.cli import main
from burnish.config.errors import UserError
from burnish.config.options import RawValue
from burnish.data.stats import DataStats
from burnish.loop.types import Example, Message
from burnish.models.load import load_model
from burnish.models.options import ModelOptions
from burnish.models.tokens import load_tokenizer, resize_embeddings
from burnish.run.plan.plan import plan
from burnish.run.prepare import prepare
from run_outputs import weights_in
from small_run import as_arguments, make_model, make_workspace, records

pytestmark = pytest.mark.run

WORDS = {"<calc>": "seven nine", "<look>": "lamp"}


def full_model(folder, spare_rows=0):
    """Save a model whose embedding has a row for each token and ``spare_rows`` more."""
    make_model(folder)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    model.resize_token_embeddings(len(tokenizer) + spare_rows)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return full_model(tmp_path_factory.mktemp("tokens") / "model")


def fitted(folder, **overrides):
    """Return (model, tokenizer, embedding rows before, head rows before) with these options."""
    options = ModelOptions(model_name_or_path=str(folder), **overrides)
    tokenizer, model = load_tokenizer(options), load_model(options)
    before = [model.get_input_embeddings().weight.clone(), model.get_output_embeddings().weight.clone()]
    resize_embeddings(model, tokenizer, options)
    return model, tokenizer, before


@pytest.mark.parametrize("given_as", ["yaml", "json", "mapping"])
def test_described_token_starts_as_mean_of_its_description(model, tmp_path, given_as):
    path = tmp_path / f"tokens.{given_as}"
    path.write_text(yaml.safe_dump(WORDS) if given_as == "yaml" else json.dumps(WORDS))
    config = WORDS if given_as == "mapping" else str(path)
    result, tokenizer, before = fitted(model, new_special_tokens_config=config, init_special_tokens="desc_init")
    tables = (result.get_input_embeddings().weight, result.get_output_embeddings().weight)
    for token, words in WORDS.items():
        (new,) = tokenizer.encode(token, add_special_tokens=False)
        ids = tokenizer.encode(words, add_special_tokens=False)
        for table, rows in zip(tables, before, strict=True):
            torch.testing.assert_close(table[new], rows[ids].mean(0))
        assert tokenizer.added_tokens_decoder[new].special


def test_noise_is_added_on_request(model):
    options = {"new_special_tokens_config": WORDS}
    plain, tokenizer, _ = fitted(model, init_special_tokens="desc_init", **options)
    noisy, _, _ = fitted(model, init_special_tokens="desc_init_w_noise", **options)
    new = tokenizer.convert_tokens_to_ids("<calc>")
    noise = (noisy.get_input_embeddings().weight - plain.get_input_embeddings().weight)[new]
    assert 0.5 < noise.std() * 32**0.5 < 2


def test_embedding_with_spare_rows_is_trained(tmp_path):
    result, _, before = fitted(full_model(tmp_path, spare_rows=8), add_special_tokens=["<calc>"])
    assert torch.equal(result.get_input_embeddings().weight, before[0])
    assert result.has_new_tokens
    assert not hasattr(fitted(tmp_path, resize_vocab=True)[0], "has_new_tokens")


@pytest.mark.parametrize(
    ("config", "message"),
    [("nowhere.yaml", "nowhere.yaml"), (["<a>"], "a description"), ({"<a>": ""}, "a description"), ({"<a>": 3}, "3")],
    ids=str,
)
def test_file_without_token_descriptions_is_rejected(model, tmp_path, config, message):
    path = tmp_path / "tokens.json"
    path.write_text(json.dumps(config))
    options = config if isinstance(config, str) else str(path)
    with pytest.raises(UserError, match=message):
        load_tokenizer(ModelOptions(model_name_or_path=str(model), new_special_tokens_config=options))


def test_token_described_twice_is_rejected(model, tmp_path):
    path = tmp_path / "tokens.yaml"
    path.write_text("<a>: one\n<b>: two\n<a>: three\n")
    with pytest.raises(UserError, match=r'tokens.yaml: .* has the duplicate key "<a>", in line 1 and line 3'):
        load_tokenizer(ModelOptions(model_name_or_path=str(model), new_special_tokens_config=str(path)))


def test_value_that_yaml_cannot_convert_is_rejected(model, tmp_path):
    path = tmp_path / "tokens.yaml"
    path.write_text("<a>: 0x_\n")
    with pytest.raises(UserError, match=r'"0x_" in line 1 is not a valid number or date'):
        load_tokenizer(ModelOptions(model_name_or_path=str(model), new_special_tokens_config=str(path)))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"init_special_tokens": "desc_init"}, "no token has a description"),
        ({"add_special_tokens": "<a>", "new_special_tokens_config": "{<b>: b}"}, "both name new special tokens"),
    ],
    ids=str,
)
def test_contradictory_new_token_options_are_rejected(tmp_path, capsys, options, sentence):
    assert main(["explain", *as_arguments({**make_workspace(tmp_path), **options})]) == 2
    assert sentence in "".join(capsys.readouterr())


@pytest.fixture
def user(tmp_path, monkeypatch):
    """Return the options of a run whose responses contain the new tokens."""
    monkeypatch.setenv("BURNISH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "300")
    full_model(tmp_path / "model")
    (tmp_path / "tokens.yaml").write_text(yaml.safe_dump(WORDS))
    options = make_workspace(tmp_path, plot_loss=False, save_strategy="no", learning_rate=1e-2, resize_vocab=True)
    answers = [{**record, "output": f"<calc> {record['output']} tok60000"} for record in records(16)]
    (tmp_path / "data.json").write_text(json.dumps(answers))
    return {**options, "new_special_tokens_config": str(tmp_path / "tokens.yaml"), "add_tokens": "tok60000",
            "init_special_tokens": "desc_init", "lora_rank": 2, "max_steps": 4}  # fmt: skip


def test_new_rows_of_a_full_model_are_trained_and_saved(tmp_path, user):
    assert main(["train", *as_arguments(user)]) == 0
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert len(tokenizer) <= model.get_input_embeddings().weight.shape[0] == model.config.vocab_size
    started = fitted(user["model_name_or_path"], add_tokens=["tok60000"], new_special_tokens_config=WORDS,
                     init_special_tokens="desc_init")[0].get_input_embeddings().weight  # fmt: skip
    new = tokenizer.convert_tokens_to_ids("<calc>")
    assert (model.get_input_embeddings().weight - started)[new].abs().max() > 1e-3


@pytest.mark.parametrize("template", ["chatml", None])
def test_data_may_contain_added_tokens_but_not_template_tokens(user, template):
    user |= {"add_special_tokens": ["<calc>", "<|im_start|>"], "template": template}
    options = {name: RawValue(value) for name, value in user.items() if "special_tokens_" not in name}
    run = prepare(plan({name: item for name, item in options.items() if name != "init_special_tokens"}))
    calc, start = run.tokenizer.convert_tokens_to_ids(["<calc>", "<|im_start|>"])
    assert run.rows[0]["input_ids"].count(calc) == 1
    question = Message("user", "What do <|im_start|> and <calc> mean?")
    (row,) = run.template.encode([Example((question, Message("assistant", "Something")))], DataStats())
    assert row["input_ids"].count(start) == 2  # before the prompt and before the response
    assert row["input_ids"].count(calc) == 1


def test_new_rows_with_lora_are_trained_saved_merged_and_loaded_by_peft(tmp_path, user, capsys):
    from peft import PeftModel

    user |= {"finetuning_type": "lora"}
    assert main(["explain", *as_arguments(user)]) == 0
    output = " ".join("".join(capsys.readouterr()).split())
    assert main(["train", *as_arguments(user)]) == 0
    stored = weights_in(tmp_path / "out")
    whole = {name: weight for name, weight in stored.items() if "lora_" not in name}
    assert {name.split(".")[-2] for name in whole} == {"embed_tokens", "lm_head"}
    assert f"{sum(weight.numel() for weight in stored.values()):,}" in output

    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    base.resize_token_embeddings(len(tokenizer), pad_to_multiple_of=64)
    theirs = PeftModel.from_pretrained(base, tmp_path / "out").merge_and_unload()
    merge = {"model_name_or_path": user["model_name_or_path"], "adapter_name_or_path": tmp_path / "out",
             "export_dir": tmp_path / "merged"}  # fmt: skip
    assert main(["export", *as_arguments(merge)]) == 0
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    tokens = torch.tensor([tokenizer.encode("red <calc> tok60000 lamp")])
    torch.testing.assert_close(ours(tokens).logits, theirs(tokens).logits, rtol=1e-4, atol=1e-5)

    again = {**user, "adapter_name_or_path": tmp_path / "out", "output_dir": tmp_path / "again"}
    assert main(["train", *as_arguments(again)]) == 0
    assert weights_in(tmp_path / "again").keys() == stored.keys()
