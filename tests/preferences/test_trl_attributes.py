"""Attributes of TRL's trainers that scripts use: reference model, collator, new datasets, router loss."""

import pytest
import torch
from datasets import IterableDataset
from script_runs import as_dataset, labelled_examples, losses, make, pairs, weights
from test_collators import collate_pairs
from tokenizers import Tokenizer, models
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedTokenizerFast,
    TrainerCallback,
)  # fmt: skip

from burnish import (
    CPOTrainer,
    DPOTrainer,
    GRPOTrainer,
    KTOTrainer,
    ORPOTrainer,
    RewardTrainer,
    RLOOTrainer,
    UserError,
)
from burnish.trainer.trl.base import argument
from small_run import make_model

pytestmark = pytest.mark.run


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("attributes")
    make_model(folder / "model")
    return folder


def read(path):
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


def mixture(folder, enables_router_loss=False):
    """Save a mixture of experts whose config enables the router loss or not; published configs do not."""
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    config = MixtralConfig(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, num_local_experts=4, router_aux_loss_coef=0.5, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    config.output_router_logits = enables_router_loss
    MixtralForCausalLM(config).save_pretrained(folder / "mixture")
    tokenizer.save_pretrained(folder / "mixture")
    return folder / "mixture"


# --- router -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["DPOTrainer", "KTOTrainer"])
def test_mixture_of_experts_is_balanced_by_default(kind, folder, tmp_path):
    """The router loss is added with the weight of the model's config, and is not part of the logged loss."""
    model, result = mixture(folder), {}
    rows = {"per_device_train_batch_size": 12, "gradient_accumulation_steps": 1}
    for requested in (0.0, None):
        trainer = make(kind, model, tmp_path, max_steps=1, router_aux_loss_coef=requested, **rows)
        batch = trainer.data_collator([trainer.train_dataset[number] for number in range(12)])
        result[requested] = losses(trainer)[0]
        assert trainer.aux_loss_enabled == (requested is None)
    options = {name: batch[name] for name in ("input_ids", "attention_mask")}
    with torch.no_grad():
        aux = read(model)(**options, output_router_logits=True).aux_loss.item()
    assert trainer.state.log_history[0]["aux_loss"] == pytest.approx(aux, rel=1e-5)
    assert result[None] - result[0.0] == pytest.approx(0.5 * aux, rel=1e-5)


@pytest.mark.parametrize(("kind", "is_balanced"), [("DPOTrainer", False), ("ORPOTrainer", True)])
def test_router_loss_in_model_config_is_followed_as_in_trl(kind, is_balanced, folder, tmp_path):
    """A weight of 0 overrides the config; ORPO and CPO only use the config."""
    trainer = make(kind, mixture(folder, enables_router_loss=True), tmp_path, max_steps=1, **(
        {} if is_balanced else {"router_aux_loss_coef": 0.0}
    ))  # fmt: skip
    losses(trainer)
    assert ("aux_loss" in trainer.state.log_history[0]) == trainer.aux_loss_enabled == is_balanced


def test_orpo_balances_experts_only_if_model_config_requests_it(folder, tmp_path):
    trainer = make("ORPOTrainer", mixture(folder), tmp_path, max_steps=1)
    losses(trainer)
    assert "aux_loss" not in trainer.state.log_history[0]


def test_router_weight_for_model_without_router_is_rejected(folder, tmp_path):
    with pytest.raises(ValueError, match="not a Mixture-of-Experts model"):
        make("DPOTrainer", folder / "model", tmp_path, router_aux_loss_coef=0.1)


def test_loaded_model_is_not_quantized(folder, tmp_path):
    four = {"quantization_config": BitsAndBytesConfig(load_in_4bit=True)}
    with pytest.raises(UserError, match="already instantiated"):
        make("DPOTrainer", read(folder / "model"), tmp_path, trainer_args=four)


# --- reference --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["DPOTrainer", "KTOTrainer", "RewardTrainer", "ORPOTrainer"])
def test_unwrapped_model_is_the_model_also_during_training(kind, folder, tmp_path):
    """TRL's callbacks generate with it."""
    found = []

    class Unwrap(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            wrapped = trainer.model_wrapped
            found.append((trainer.accelerator.unwrap_model(wrapped), wrapped.device, wrapped.config))

    trainer = make(kind, folder / "model", tmp_path, trainer_args={"callbacks": [Unwrap()]}, max_steps=1)
    assert trainer.accelerator.unwrap_model(trainer.model_wrapped) is trainer.model
    trainer.train()
    assert found == [(trainer.model, trainer.model.device, trainer.model.config)]


def test_ref_model_has_initial_weights(folder, tmp_path):
    trainer = make("DPOTrainer", folder / "model", tmp_path)
    start = weights(trainer)
    losses(trainer)
    its = dict(trainer.ref_model.named_parameters())
    assert trainer.ref_model is trainer.ref_model
    ids = torch.tensor([trainer.train_dataset[0]["prompt_ids"]])
    with torch.no_grad():
        output = [model(input_ids=ids).logits for model in (trainer.ref_model, read(folder / "model"), trainer.model)]
    assert torch.allclose(output[0], output[1], atol=1e-6)
    assert not torch.allclose(output[1], output[2], atol=1e-6)
    assert all(torch.equal(its[name], value) for name, value in start.items())
    assert not all(torch.equal(its[name], value) for name, value in weights(trainer).items())
    assert not any(parameter.requires_grad for parameter in its.values())


def test_synced_ref_model_is_visible_to_scripts(folder, tmp_path):
    trainer = make("DPOTrainer", folder / "model", tmp_path, sync_ref_model=True, ref_model_sync_steps=1)
    before = {name: value.clone() for name, value in trainer.ref_model.named_parameters()}
    losses(trainer)
    assert all(not torch.equal(before[name], value) for name, value in trainer.ref_model.named_parameters())


def in_stream(rows):
    return IterableDataset.from_generator(lambda: iter(rows))


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ["DPOTrainer", "KTOTrainer"])
def test_new_dataset_is_compared_with_the_existing_reference(kind, folder, tmp_path):
    rows = labelled_examples(4) if kind == "KTOTrainer" else pairs(4)
    trainer = make(kind, folder / "model", tmp_path, precompute_ref_log_probs=True)
    plain = make(kind, folder / "model", tmp_path)
    assert trainer.evaluate(as_dataset(rows))["eval_loss"] == plain.evaluate(as_dataset(rows))["eval_loss"]
    assert torch.tensor(trainer.predict(as_dataset(rows)).predictions).abs().max() == 0  # with its own reference
    with pytest.raises(ValueError, match="not supported with IterableDataset"):
        trainer.evaluate(in_stream(rows))
    trainer.train()
    for evaluate in (trainer.evaluate, trainer.predict):
        with pytest.raises(UserError, match="Cannot compute reference log-probabilities for a dataset passed to"):
            evaluate(as_dataset(rows))


def test_base_of_adapter_stays_the_reference_after_training(folder, tmp_path):
    from peft import LoraConfig

    options = {"peft_config": LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights="gaussian")}
    trainers = [
        make(
            "DPOTrainer",
            folder / "model",
            tmp_path,
            trainer_args=dict(options),
            precompute_ref_log_probs=is_enabled,
            seed=4,
        )
        for is_enabled in (True, False)
    ]
    for trainer in trainers:
        trainer.train()
    beforehand, in_passing = (trainer.evaluate(as_dataset(pairs(4)))["eval_loss"] for trainer in trainers)
    assert beforehand == pytest.approx(in_passing, rel=1e-6)
    assert beforehand != pytest.approx(0.6931472, rel=1e-6)


# --- collator ---------------------------------------------------------------------------------------------------------


def test_collator_returns_padded_trl_batch(folder, tmp_path):
    trainer = make("DPOTrainer", folder / "model", tmp_path)
    rows = [trainer.train_dataset[number] for number in range(3)]
    batch, pad = trainer.data_collator(rows), trainer.processing_class.pad_token_id
    ids = [row["prompt_ids"] + row[f"{side}_ids"] for side in ("chosen", "rejected") for row in rows]
    most = max(map(len, ids))
    assert batch["input_ids"].tolist() == [[*one, *[pad] * (most - len(one))] for one in ids]
    assert batch["attention_mask"].sum(-1).tolist() == [len(one) for one in ids]
    assert batch["completion_mask"].sum(-1).tolist() == [
        len(row[f"{side}_ids"]) for side in ("chosen", "rejected") for row in rows
    ]


def test_kto_collator_includes_mismatched_responses(folder, tmp_path):
    trainer = make("KTOTrainer", folder / "model", tmp_path)
    row = trainer.train_dataset[0]
    made = trainer.data_collator([row])
    assert made["input_ids"].tolist() == [row["prompt_ids"] + row["completion_ids"]]
    assert made["KL_input_ids"].tolist() == [row["prompt_ids"] + row["KL_completion_ids"]]
    assert made["label"].tolist() == [row["label"]]


def test_replaced_collator_is_used_for_training(folder, tmp_path):
    from_the_start = make("DPOTrainer", folder / "model", tmp_path, trainer_args={"data_collator": swapped})
    later = make("DPOTrainer", folder / "model", tmp_path)
    later.data_collator = swapped
    assert losses(later) == losses(from_the_start)


def swapped(rows):
    return collate_pairs(
        [{**row, "chosen_ids": row["rejected_ids"], "rejected_ids": row["chosen_ids"]} for row in rows]
    )


# --- single examples and changed attributes ---------------------------------------------------------------------------


def test_single_kto_example_is_compared_with_itself(folder, tmp_path):
    trainer = make("KTOTrainer", folder / "model", tmp_path, labelled_examples(1))
    assert trainer.train_dataset[0]["KL_completion_ids"] == trainer.train_dataset[0]["completion_ids"]
    assert losses(trainer)


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", ["DPOTrainer", "KTOTrainer", "ORPOTrainer", "CPOTrainer"])
def test_beta_set_by_a_script_applies_from_the_next_step(kind, folder, tmp_path):
    changed, constant = (
        make(kind, folder / "model", tmp_path, beta=0.5),
        make(kind, folder / "model", tmp_path, beta=0.2),
    )
    changed.beta = 0.2
    assert changed.beta == 0.2
    assert losses(changed) == losses(constant)


def test_attribute_that_cannot_change_is_refused(folder, tmp_path):
    trainer = make("DPOTrainer", folder / "model", tmp_path)
    with pytest.raises(UserError, match="`label_smoothing` of a trainer cannot be changed"):
        trainer.label_smoothing = 0.1


@pytest.mark.parametrize(
    "kind", [CPOTrainer, DPOTrainer, GRPOTrainer, KTOTrainer, ORPOTrainer, RLOOTrainer, RewardTrainer]
)
def test_attributes_of_trainers_are_arguments_of_their_config(kind):
    args = kind.config_class(use_cpu=True, bf16=False)
    for name in dir(kind):
        attribute = vars(next(base for base in kind.__mro__ if name in vars(base)))[name]
        if isinstance(attribute, argument):
            attribute.read(args)


def test_reward_trainer_names_how_a_script_adds_a_padding_token(folder, tmp_path):
    vocabulary = Tokenizer(models.WordLevel({"</s>": 0, "a": 1}, unk_token="</s>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=vocabulary, eos_token="</s>", pad_token="</s>")
    with pytest.raises(UserError, match=r"one token early[^$]*resize_token_embeddings\(len\(tokenizer\)\)"):
        make("RewardTrainer", folder / "model", tmp_path, trainer_args={"processing_class": tokenizer})
