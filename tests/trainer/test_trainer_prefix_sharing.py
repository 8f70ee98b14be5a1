"""Padded batches of a script: only tokens that the loss depends on are computed, with equal results."""

import json

import pytest
import torch
from transformers import DataCollatorForSeq2Seq, LlamaForCausalLM

from burnish import SFTConfig, SFTTrainer, Trainer, TrainingArguments
from burnish.loop.types import IGNORE_INDEX
from burnish.trainer.data.prefix_sharing import has_plain_loss, probe_prefix_sharing, shared_prefixes_of
from small_run import make_model
from tiny_shapes import tiny

pytestmark = pytest.mark.run

SYSTEM = list(range(10, 60))


def rows(num=12):
    """Return rows of 55 to 75 tokens whose first 50 tokens are equal."""
    generator = torch.Generator().manual_seed(3)
    result = []
    for _ in range(num):
        own = torch.randint(3, 300, (int(torch.randint(5, 25, (), generator=generator)),), generator=generator).tolist()
        result.append({"input_ids": SYSTEM + own, "labels": [IGNORE_INDEX] * (len(SYSTEM) + 2) + own[2:]})
    return [{**row, "attention_mask": [1] * len(row["input_ids"])} for row in result]


def trained(folder, kind, model, **options):
    """Return the trained model, its log, and the number of tokens in calls of its embedding."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(make_model(folder / "model"))
    arguments = {
        "output_dir": str(folder / "out"), "per_device_train_batch_size": 4, "max_steps": 4, "report_to": "none",
        "logging_steps": 1, "use_cpu": True, "save_strategy": "no", "seed": 5, "learning_rate": 1e-3, **options,
    }  # fmt: skip
    if kind is Trainer:
        collator = DataCollatorForSeq2Seq(tokenizer)
        trainer = Trainer(model, TrainingArguments(**arguments), collator, rows(), rows()[:6])
    else:
        from datasets import Dataset

        sets = [Dataset.from_list(some).remove_columns("attention_mask") for some in (rows(), rows()[:6])]
        trainer = SFTTrainer(model, SFTConfig(**{"gradient_checkpointing": False, "bf16": False, **arguments}),
                             train_dataset=sets[0], eval_dataset=sets[1], processing_class=tokenizer)  # fmt: skip
    requests = []
    embedding = trainer.model.get_input_embeddings()
    embedding.register_forward_hook(lambda module, ids, output: requests.append(ids[0].numel()))
    trainer.train()
    return trainer, requests


def llama(folder):
    return LlamaForCausalLM.from_pretrained(make_model(folder / "model"))


def adapted(folder):
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(2)
    return get_peft_model(llama(folder), LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", [Trainer, SFTTrainer])
@pytest.mark.parametrize("make", [llama, adapted])
def test_padded_script_trains_to_same_weights_with_a_third_of_the_tokens(tmp_path, kind, make):
    options = {"eval_strategy": "steps", "eval_steps": 2, "gradient_accumulation_steps": 2, "num_train_epochs": 2}
    needed, requested = trained(tmp_path, kind, make(tmp_path), **options)
    padded, asked_of_padded = trained(tmp_path, kind, make(tmp_path), needed_tokens_only=False, **options)
    assert max(requested[-2:]) < 0.5 * max(asked_of_padded[-2:])
    for (name, ours), theirs in zip(needed.model.state_dict().items(), padded.model.state_dict().values(), strict=True):
        assert (ours - theirs).abs().max() < 1e-6, name
    for ours, theirs in zip(needed.state.log_history, padded.state.log_history, strict=True):
        for name in ours.keys() & {"loss", "eval_loss", "grad_norm", "mean_token_accuracy", "num_tokens"}:
            assert ours[name] == pytest.approx(theirs[name], abs=2e-5), name


def test_last_layer_of_a_script_is_computed_where_the_loss_reads_it(tmp_path):
    counts = {}
    for skips in (True, False):
        model, counted = llama(tmp_path), []
        model.model.layers[-1].mlp.down_proj.register_forward_hook(
            lambda module, inputs, output, counted=counted: counted.append(inputs[0].shape[:-1].numel())
        )
        trained(tmp_path, SFTTrainer, model, needed_tokens_only=skips, max_steps=1)
        counts[skips] = counted[-1]
    assert 0 < counts[True] < 0.3 * counts[False]


def test_bfloat16_loss_curve_is_unchanged(tmp_path):
    needed, _ = trained(tmp_path, Trainer, llama(tmp_path), bf16=True)
    padded, _ = trained(tmp_path, Trainer, llama(tmp_path), bf16=True, needed_tokens_only=False)
    losses = [[entry["loss"] for entry in trainer.state.log_history if "loss" in entry] for trainer in (needed, padded)]
    assert losses[0] == pytest.approx(losses[1], abs=5e-3)


def test_outputs_requested_by_a_script_are_those_of_the_padded_batch(tmp_path):
    trainer, _ = trained(tmp_path, Trainer, llama(tmp_path), max_steps=1)
    batch = next(iter(trainer.get_train_dataloader()))
    assert batch.keys() == {"input_ids", "attention_mask", "labels"}
    loss, outputs = trainer.compute_loss(trainer.model, dict(batch), return_outputs=True)
    assert outputs.logits.shape[:2] == batch["input_ids"].shape
    assert loss.item() == pytest.approx(trainer.compute_loss(trainer.model, dict(batch)).item(), abs=1e-6)


def test_penalty_of_adalora_is_part_of_the_loss(tmp_path):
    from peft import AdaLoraConfig, get_peft_model

    results = []
    for skips in (None, False):
        torch.manual_seed(2)
        config = AdaLoraConfig(init_r=4, target_r=2, total_step=9, target_modules=["q_proj"], task_type="CAUSAL_LM")
        model = get_peft_model(llama(tmp_path), config)
        trainer, _ = trained(tmp_path, Trainer, model, max_steps=1, needed_tokens_only=skips)
        batch = next(iter(trainer.get_train_dataloader()))
        results.append((trainer.state.log_history[0]["loss"], trainer.state.log_history[0]["grad_norm"]))
        assert trainer.compute_loss(model, dict(batch)).item() == pytest.approx(model(**batch).loss.item(), rel=1e-6)
    assert results[0] == pytest.approx(results[1], rel=1e-5)
    config.orth_reg_weight = 1e-9  # peft 0.19 accepts positive weights only
    assert results[0][0] > 1.1 * trained(tmp_path, Trainer, model, max_steps=1)[0].state.log_history[0]["loss"]


def test_saved_model_has_no_trace_of_prefix_sharing(tmp_path):
    trainer, _ = trained(tmp_path, Trainer, llama(tmp_path), max_steps=1)
    trainer.save_model()
    assert "burnish" not in json.dumps(json.loads((tmp_path / "out" / "config.json").read_text()))
    assert LlamaForCausalLM.from_pretrained(tmp_path / "out").config._attn_implementation == "sdpa"


def test_model_with_custom_loss_is_unchanged(tmp_path):
    model = CustomLoss.from_pretrained(make_model(tmp_path / "model"))
    trainer, requested = trained(tmp_path, Trainer, model, max_steps=2, remove_unused_columns=False)
    assert trainer.model.config._attn_implementation == "sdpa"
    assert all(count % 4 == 0 for count in requested)  # four rows of equal length


def test_model_of_another_trial_is_checked_again(tmp_path):
    trainer, _ = trained(tmp_path, Trainer, llama(tmp_path), max_steps=1)
    for _ in range(3):  # a model may have the same address as a deleted one
        trainer.model = None
        trainer.model = llama(tmp_path)
        trainer.compute_loss(trainer.model, next(iter(trainer.get_train_dataloader())))
        assert trainer.model.config._attn_implementation == "burnish"


# --- batches that stay padded -----------------------------------------------------------------------------------------


def padded_batch():
    ids = torch.tensor([[5, 6, 7, 8], [5, 6, 0, 0]])
    return {"input_ids": ids, "attention_mask": ids.ne(0).long(), "labels": ids.masked_fill(ids == 0, IGNORE_INDEX)}


def test_right_padded_batch_is_flattened():
    flat = shared_prefixes_of(padded_batch())
    assert flat is not None
    assert flat["input_ids"].tolist() == [[5, 6, 7, 5, 6]]
    assert flat["labels"].tolist() == [[IGNORE_INDEX, 6, 7, 8, 6]]


@pytest.mark.parametrize(
    "change",
    [
        {"attention_mask": torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1]])},
        {"attention_mask": torch.tensor([[1, 1, 0, 1], [1, 1, 0, 0]])},
        {"attention_mask": torch.tensor([[1, 1, 2, 2], [1, 1, 0, 0]])},
        {"labels": torch.full((2, 4), 5)},
        {"position_ids": torch.zeros(2, 4, dtype=torch.long)},
        {"labels": None},
    ],
    ids=["left padding", "gap", "packed", "trained padding", "positions", "no labels"],
)
def test_other_batch_is_unchanged(change):
    batch = {**padded_batch(), **change}
    assert shared_prefixes_of({name: value for name, value in batch.items() if value is not None}) is None


# --- models that get the padded batch ---------------------------------------------------------------------------------


def test_dropout_requested_attention_and_router_loss_need_the_padded_batch():
    eager = tiny("llama")
    eager.set_attn_implementation("eager")
    for model in (tiny("llama", attention_dropout=0.1), eager, tiny("mixtral")):
        assert not probe_prefix_sharing(model, is_wanted=True).shares_prefixes
        assert model.config._attn_implementation in {"sdpa", "eager"} or model.config.attention_dropout
    assert probe_prefix_sharing(tiny("mixtral", output_router_logits=False), is_wanted=True).shares_prefixes


class CustomLoss(LlamaForCausalLM):
    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.loss = output.loss * 2
        return output


class WithPenalty(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def get_base_model(self):
        return self.model

    def forward(self, **inputs):
        outputs = self.model(**inputs)
        outputs.loss = outputs.loss + 1
        return outputs


def test_loss_of_a_wrapper_is_computed_by_the_wrapper():
    assert not has_plain_loss(WithPenalty(tiny("llama")))


def test_custom_loss_is_computed_by_the_model():
    plain, hooked, own = tiny("llama"), tiny("llama"), CustomLoss(tiny("llama").config)
    hooked.register_forward_hook(lambda module, options, output: None)
    assert has_plain_loss(plain)
    assert not has_plain_loss(hooked)
    assert not has_plain_loss(own)
    plain.loss_function = lambda *args, **kwargs: torch.zeros(())
    assert not has_plain_loss(plain)
