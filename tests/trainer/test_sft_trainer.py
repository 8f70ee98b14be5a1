"""``SFTTrainer``: rows, trained tokens, logs, and rejected arguments.

The reference is a short loop over the same rows, with all logits and torch's own loss. ``scripts/parity_sft.py``
compares with TRL.
"""

import json
import logging
import re
import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import transformers
from datasets import Dataset, DatasetDict, IterableDataset, disable_progress_bars
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from transformers import AutoTokenizer, PrinterCallback, TrainerCallback

import burnish
from burnish import SFTConfig, SFTTrainer, TrainingArguments
from burnish.config.errors import UserError
from burnish.data.chat.plain import PlainTemplate
from burnish.trainer.trl.sft.collator import DataCollatorForLanguageModeling

pytestmark = pytest.mark.run

disable_progress_bars()
DEMO = Path(burnish.__file__).parent / "demo" / "model"


def tokenizer():
    return AutoTokenizer.from_pretrained(DEMO)


def llama(**config):
    torch.manual_seed(1)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
             "num_key_value_heads": 1, "vocab_size": 326, "pad_token_id": 0,
             "eos_token_id": 2, "bos_token_id": 2}  # fmt: skip
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**sizes, **config}))


def arguments(folder, **options):
    defaults = {"use_cpu": True, "bf16": False, "disable_tqdm": True, "per_device_train_batch_size": 2, "max_steps": 3,
                "learning_rate": 1e-2, "save_strategy": "no", "logging_steps": 1,
                "gradient_checkpointing": False}  # fmt: skip
    return SFTConfig(str(folder), **{**defaults, **options})


def make(folder, rows, model=None, trainer=None, kind=SFTTrainer, **options):
    rows = Dataset.from_list(rows) if isinstance(rows, list) else rows
    result = kind(
        llama() if model is None else model, arguments(folder, **options), train_dataset=rows,
        **{"processing_class": tokenizer(), **(trainer or {})},
    )  # fmt: skip
    result.remove_callback(PrinterCallback)
    return result


def logged(trainer, name):
    return [entry[name] for entry in trainer.state.log_history if "loss" in entry and name in entry]


def weights(trainer):
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


def text_of(labels):
    return tokenizer().decode([label for label in labels if label != -100])


def chat(*texts):
    return [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(texts)]


TEXTS = [{"text": "word " * length + "end"} for length in (1, 9, 3, 6, 2, 12)]
PAIRS = [{"prompt": f"Add {n}. ", "completion": "ten " * n} for n in range(1, 7)]
CHATS = [{"messages": chat(f"Say {n}", "a " * n, "More", "b " * n)} for n in range(1, 5)]


# --- rows -------------------------------------------------------------------------------------------------------------


def test_text_ends_with_one_eos_and_is_trained_entirely(tmp_path):
    eos = tokenizer().eos_token
    rows = make(tmp_path, [{"text": "one two"}, {"text": "three" + eos}]).train_dataset
    for row, text in zip(rows, ("one two", "three"), strict=True):
        assert row["input_ids"] == tokenizer()(text + eos)["input_ids"]
        assert row["labels"] == row["input_ids"]


def test_only_completion_and_eos_of_prompt_completion_are_trained(tmp_path):
    row = make(tmp_path, PAIRS).train_dataset[1]
    assert text_of(row["labels"]) == PAIRS[1]["completion"] + tokenizer().eos_token
    whole = make(tmp_path, PAIRS, completion_only_loss=False).train_dataset[1]
    assert whole["labels"] == whole["input_ids"] == row["input_ids"]


def test_conversation_has_ids_of_the_chat_template(tmp_path):
    row = make(tmp_path, CHATS).train_dataset[2]
    expected = tokenizer().apply_chat_template(CHATS[2]["messages"], return_dict=True)["input_ids"]
    assert row["input_ids"] == row["labels"] == expected


def test_assistant_tokens_are_located_with_and_without_template_masks(tmp_path):
    marked, plain = tokenizer(), tokenizer()
    for mark in ("{%- generation %}", "{%- endgeneration %}"):
        plain.chat_template = plain.chat_template.replace(mark, "")
    assert plain.chat_template != marked.chat_template
    for one in (marked, plain):
        rows = make(tmp_path, CHATS, trainer={"processing_class": one}, assistant_only_loss=True).train_dataset
        message = text_of(rows[1]["labels"]).replace("\n", "")
        assert message == "a a <|im_end|>b b <|im_end|>"


def test_conversational_completion_is_trained_where_both_masks_allow(tmp_path):
    pairs = [{"prompt": chat("Hi", "Ho", "Again"), "completion": [{"role": "assistant", "content": "Yes"}]}]
    both = make(tmp_path, pairs, assistant_only_loss=True).train_dataset[0]
    assert text_of(both["labels"]) == "Yes<|im_end|>"
    assert text_of(make(tmp_path, pairs).train_dataset[0]["labels"]) == "Yes<|im_end|>\n"


def test_sharegpt_from_and_value_become_template_roles(tmp_path):
    turns = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Ho"}]
    rows = make(tmp_path, [{"conversations": turns}]).train_dataset
    expected = tokenizer().apply_chat_template(chat("Hi", "Ho"), return_dict=True)["input_ids"]
    assert rows[0]["input_ids"] == expected


def test_further_keys_of_sharegpt_messages_reach_the_template(tmp_path):
    own = tokenizer()
    own.chat_template = "{{ messages[1].mood }} " + own.chat_template
    turns = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Ho", "mood": "calm"}]
    rows = make(tmp_path, [{"conversations": turns}], trainer={"processing_class": own}).train_dataset
    assert text_of(rows[0]["input_ids"]).startswith("calm")


def test_messages_are_read_beside_a_prompt_without_completion(tmp_path):
    rows = [make(tmp_path, [{"messages": chat("Hi", "Ho"), **more}]).train_dataset for more in ({}, {"prompt": "Hi"})]
    assert rows[0][0]["input_ids"] == rows[1][0]["input_ids"]
    with pytest.raises(ValueError, match="Expected the columns"):
        make(tmp_path, [{"prompt": "Hi"}])


def test_tools_and_template_arguments_of_a_row_reach_the_template(tmp_path):
    own = tokenizer()
    own.chat_template = "{{ tools[0].function.name if tools else 'none' }} {{ mood }} " + own.chat_template
    tools = [{"type": "function", "function": {"name": "lookup"}}]
    rows = [
        {"messages": chat("Hi", "Ho"), "tools": json.dumps(tools), "chat_template_kwargs": {"mood": "calm", "x": None}},
        {"messages": chat("Hi", "Ho"), "tools": None, "chat_template_kwargs": {"mood": "loud", "x": "1"}},
    ]
    made = make(tmp_path, rows, trainer={"processing_class": own}).train_dataset
    assert tokenizer().decode(made[0]["input_ids"]).startswith("lookup calm")
    assert tokenizer().decode(made[1]["input_ids"]).startswith("none loud")


def test_tools_that_are_not_json_are_rejected_with_their_record(tmp_path):
    with pytest.raises(UserError, match=r"record 1: The tools are not valid JSON"):
        make(tmp_path, [{"messages": chat("Hi", "Ho"), "tools": "[{"}])


def test_template_arguments_of_a_row_affect_assistant_masks(tmp_path):
    own = tokenizer()
    own.chat_template = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% if loud %}!{% endif %}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    rows = [{"messages": chat("Hi", "Ho"), "chat_template_kwargs": {"loud": is_loud}} for is_loud in (True, False)]
    made = make(tmp_path, rows, trainer={"processing_class": own}, assistant_only_loss=True).train_dataset
    assert [text_of(row["labels"]) for row in made] == ["Ho!<|im_end|>", "Ho<|im_end|>"]


def test_row_without_trained_tokens_is_dropped_and_counted(tmp_path, library_log):
    pairs = [{"prompt": "long " * 40, "completion": "x"}, *PAIRS]
    rows = make(tmp_path, pairs, max_length=12).train_dataset
    assert len(rows) == len(PAIRS)
    assert all(len(row["input_ids"]) <= 12 for row in rows)
    assert "1 of 7 records of the train dataset were dropped: no trainable tokens (record 1)" in library_log.text


def test_truncation_mode_keep_end_keeps_the_end(tmp_path):
    with pytest.warns(FutureWarning, match="keep_end"):
        rows = make(tmp_path, TEXTS, max_length=4, truncation_mode="keep_end").train_dataset
    assert all(row["input_ids"][-1] == tokenizer().eos_token_id and len(row["input_ids"]) <= 4 for row in rows)


@pytest.mark.parametrize(
    ("more", "options", "expected"),
    [
        ({}, {}, [5, 6, 7]),
        ({"labels": [-100, 6, -100]}, {}, [-100, 6, -100]),
        ({"assistant_masks": [0, 1, 1]}, {}, [-100, 6, 7]),
        ({"completion_mask": [0, 0, 1]}, {}, [5, 6, 7]),
        ({"completion_mask": [0, 0, 1]}, {"completion_only_loss": True}, [-100, -100, 7]),
        ({"completion_mask": [0, 1, 1], "assistant_masks": [1, 1, 0]}, {"completion_only_loss": True}, [-100, 6, -100]),
    ],
)
def test_input_ids_are_kept_and_masks_become_labels(tmp_path, more, options, expected):
    rows = make(tmp_path, [{"input_ids": [5, 6, 7], **more}], **options).train_dataset
    assert rows[0]["input_ids"] == [5, 6, 7]
    assert rows[0]["labels"] == expected


def test_formatting_func_determines_text_for_any_columns(tmp_path):
    formatted = {"formatting_func": lambda row: f"{row['prompt']}->{row['completion']}"}
    row = make(tmp_path, PAIRS, trainer=formatted, completion_only_loss=False).train_dataset[0]
    assert tokenizer().decode(row["input_ids"]) == "Add 1. ->ten " + tokenizer().eos_token


def test_batched_formatting_func_is_accepted_with_a_warning(tmp_path, caplog):
    def older(batch):
        return [f"{batch['prompt'][i]}->{batch['completion'][i]}" for i in range(len(batch["prompt"]))]

    options = {"completion_only_loss": False}
    with caplog.at_level(logging.WARNING, logger="transformers"):
        logging.getLogger("transformers").addHandler(caplog.handler)
        ours = make(tmp_path, PAIRS, trainer={"formatting_func": older}, **options).train_dataset
        logging.getLogger("transformers").removeHandler(caplog.handler)
    theirs = make(
        tmp_path, PAIRS, trainer={"formatting_func": lambda row: f"{row['prompt']}->{row['completion']}"}, **options
    ).train_dataset
    assert ours["input_ids"] == theirs["input_ids"]
    assert "takes a batch and returns a list of texts is deprecated" in caplog.text
    with pytest.raises(UserError, match=r"must return the text of the example as a string\. Received: dict"):
        make(tmp_path, PAIRS, trainer={"formatting_func": dict}, **options)
    in_list = {"formatting_func": lambda row: [f"{row['prompt']}->{row['completion']}"]}
    with pytest.raises(UserError, match=r"must return the text of the example as a string\. Received: list"):
        make(tmp_path, PAIRS, trainer=in_list, **options)


@pytest.mark.parametrize("strategy", ["bfd", "bfd_split", "wrapped"])
def test_packs_contain_all_expected_tokens(tmp_path, strategy):
    rows = make(tmp_path, TEXTS, packing=True, packing_strategy=strategy, max_length=16).train_dataset
    plain = make(tmp_path, TEXTS, max_length=16 if strategy == "bfd" else None).train_dataset
    assert sorted(i for row in rows for i in row["input_ids"]) == sorted(i for row in plain for i in row["input_ids"])
    assert all(len(row["input_ids"]) <= 16 for row in rows)
    assert len(rows) < len(plain) or strategy == "bfd_split"
    assert ("seq_lengths" in rows.column_names) == (strategy != "wrapped")


# --- training ---------------------------------------------------------------------------------------------------------


def plain_training(rows, model, steps, loss_of, batch_size=2, learning_rate=1e-2):
    """Train in plain torch: single rows, all logits, torch's own optimizer."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.0)
    result = []
    for step in range(steps):
        group = [rows[index] for index in range(step * batch_size, (step + 1) * batch_size)]
        count = sum(label != -100 for row in group for label in row["labels"][1:])
        total = sum(loss_of(model, torch.tensor([row["input_ids"]]), torch.tensor(row["labels"])) for row in group)
        (total / count).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group_of_weights in optimizer.param_groups:
            group_of_weights["lr"] = learning_rate * (1 - step / steps)
        optimizer.step()
        optimizer.zero_grad()
        result.append((total / count).item())
    return result


def nll(model, ids, labels):
    return F.cross_entropy(model(ids).logits[0, :-1].float(), labels[1:], reduction="sum")


def dft(model, ids, labels):
    logps = torch.log_softmax(model(ids).logits[0, :-1].float(), -1)
    learned = labels[1:] != -100
    of_target = logps[learned].gather(-1, labels[1:][learned, None])
    return -(of_target.exp().detach() * of_target).sum()


def smoothed(model, ids, labels):
    return F.cross_entropy(model(ids).logits[0, :-1].float(), labels[1:], reduction="sum", label_smoothing=0.2)


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("loss_of", "options"),
    [
        (nll, {}),
        (nll, {"gradient_checkpointing": True}),
        (nll, {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"selective": True}}),
        (nll, {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 1}),
        (nll, {"padding_free": True, "max_length": None}),
        (nll, {"pad_to_multiple_of": 16}),
        (dft, {"loss_type": "dft"}),
        (smoothed, {"label_smoothing_factor": 0.2}),
    ],
)
def test_training_matches_plain_arithmetic_on_rows(tmp_path, loss_of, options):
    trainer = make(tmp_path, PAIRS, train_sampling_strategy="sequential", **options)
    model = llama()
    expected = plain_training(list(trainer.train_dataset), model, 3, loss_of)
    trainer.train()
    # sums in another order, amplified by Adam where gradients are near 0
    assert logged(trainer, "loss") == pytest.approx(expected, rel=1e-5)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(weights(trainer)[name], parameter.detach(), rtol=1e-3, atol=2e-5)


def test_packs_have_the_integer_type_of_their_rows(tmp_path):
    plain, packed = (make(tmp_path, TEXTS, packing=packing, max_length=16).train_dataset for packing in (False, True))
    assert packed.features["labels"] == plain.features["labels"]
    assert packed.features["seq_lengths"] == packed.features["input_ids"] == plain.features["input_ids"]


def test_packed_rows_do_not_attend_to_each_other(tmp_path):
    """Packed or not, one step on all rows has the same gradient."""
    options = {"per_device_train_batch_size": 8, "max_steps": 1, "max_length": 40}
    packed, plain = make(tmp_path, TEXTS, packing=True, **options), make(tmp_path, TEXTS, **options)
    packed.train(), plain.train()
    assert logged(packed, "grad_norm") == pytest.approx(logged(plain, "grad_norm"), rel=1e-5)
    assert logged(packed, "loss") == pytest.approx(logged(plain, "loss"), rel=1e-6)
    assert logged(packed, "num_tokens") == logged(plain, "num_tokens")


@pytest.mark.parametrize("packing", [False, True])
def test_packed_evaluation_rows_do_not_attend_to_each_other(tmp_path, packing):
    rows = [{"prompt": f"After {n} comes ", "completion": str(n + 1)} for n in range(12)]
    evaluation, losses = {"eval_dataset": Dataset.from_list(rows)}, []
    torch.manual_seed(0)
    model = llama(initializer_range=1.0)
    for eval_packing in (False, True):
        trainer = make(tmp_path, rows, model, evaluation, max_length=64, packing=packing, eval_packing=eval_packing)
        losses.append(trainer.evaluate()["eval_loss"])
        assert (len(trainer.eval_dataset) < len(rows)) is eval_packing
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_model_that_cannot_separate_packed_rows_gets_padding(tmp_path):
    torch.manual_seed(1)
    bloom = transformers.BloomForCausalLM(
        transformers.BloomConfig(vocab_size=326, hidden_size=16, n_layer=1, n_head=2, pad_token_id=0, eos_token_id=2)
    )
    trainer = make(tmp_path, TEXTS, model=bloom, packing=True, max_length=40)
    batch = trainer.data_collator(list(trainer.train_dataset))
    assert len(batch["input_ids"]) == len(TEXTS)
    trainer.train()


def test_head_receives_no_positions_in_training(tmp_path):
    trainer, recorded = make(tmp_path, TEXTS), []
    head = trainer.model.lm_head
    plain = type(head).forward
    head.forward = lambda hidden: (recorded.append(hidden.shape[1]), plain(head, hidden))[1]
    trainer.train()
    assert recorded[-3:] == [0, 0, 0]


def test_accuracy_and_entropy_match_full_logits(tmp_path):
    trainer = make(tmp_path, PAIRS, max_steps=1, train_sampling_strategy="sequential")
    model, right, entropy, count = llama(), 0, 0.0, 0
    for row in list(trainer.train_dataset)[:2]:
        labels = torch.tensor(row["labels"][1:])
        logps = torch.log_softmax(model(torch.tensor([row["input_ids"]])).logits[0, :-1], -1)[labels != -100]
        right += (logps.argmax(-1) == labels[labels != -100]).sum().item()
        entropy -= (logps.exp() * logps).sum().item()
        count += len(logps)
    trainer.train()
    assert logged(trainer, "mean_token_accuracy") == pytest.approx([right / count])
    assert logged(trainer, "entropy") == pytest.approx([entropy / count], rel=1e-5)
    assert logged(trainer, "num_tokens") == [sum(len(row["input_ids"]) for row in list(trainer.train_dataset)[:2])]


def test_run_ending_before_first_log_reports_metrics_in_summary(tmp_path):
    every, last = (make(tmp_path, TEXTS, max_steps=1, logging_steps=steps) for steps in (1, 10))
    every.train()
    summary = last.train().metrics
    (at_step, _), (at_end,) = every.state.log_history, last.state.log_history
    for name in ("mean_token_accuracy", "entropy", "num_tokens"):
        assert at_end[name] == at_step[name]
    assert summary["train_loss"] == at_end["train_loss"] == at_step["loss"]


@pytest.mark.parametrize("options", [{}, {"padding_free": True, "max_length": None}], ids=["padded", "padding-free"])
def test_samples_per_second_counts_the_rows_of_a_batch(tmp_path, options):
    summary = make(tmp_path, TEXTS * 2, max_steps=2, **options).train().metrics
    assert summary["train_samples_per_second"] == pytest.approx(2 * summary["train_steps_per_second"])


def test_samples_per_second_counts_the_examples_of_packs(tmp_path):
    options = {"packing": True, "max_length": 64, "eval_packing": True}
    trainer = make(tmp_path, TEXTS, max_steps=1, trainer={"eval_dataset": Dataset.from_list(TEXTS)}, **options)
    per_step = sum(map(len, trainer.train_dataset["seq_lengths"][:2]))
    assert per_step > 2
    summary, evaluated = trainer.train().metrics, trainer.evaluate()
    assert summary["train_samples_per_second"] == pytest.approx(per_step * summary["train_steps_per_second"])
    seconds = evaluated["eval_runtime"]  # rounded to 0.1 ms
    assert evaluated["eval_samples_per_second"] == pytest.approx(len(TEXTS) / seconds, rel=0.001 + 6e-5 / seconds)


@pytest.mark.parametrize("options", [{"packing": True}, {"eval_packing": True}], ids=["packing", "eval-packing"])
def test_collator_of_the_script_is_refused_for_packs(tmp_path, options):
    evals = {"eval_dataset": Dataset.from_list(TEXTS), "data_collator": lambda rows: rows}
    with pytest.raises(ValueError, match="A custom data collator is not supported"):
        make(tmp_path, TEXTS, trainer=evals, max_length=64, **options)


def test_token_count_continues_after_resume(tmp_path):
    options = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "logging_steps": 3}
    whole = make(tmp_path, TEXTS * 2, **options)
    whole.train()
    resumed = make(tmp_path, TEXTS * 2, **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert logged(resumed, "num_tokens") == logged(whole, "num_tokens")
    assert all(torch.equal(weights(whole)[name], value) for name, value in weights(resumed).items())


def test_evaluation_between_logs_reports_the_tokens_up_to_its_step(tmp_path):
    options = {"eval_strategy": "steps", "eval_steps": 2, "max_steps": 4}
    rare, every = (
        make(tmp_path, TEXTS * 2, trainer={"eval_dataset": Dataset.from_list(TEXTS)}, logging_steps=steps, **options)
        for steps in (3, 1)
    )
    rare.train(), every.train()
    at_step = logged(every, "num_tokens")
    evaluated = [log["eval_num_tokens"] for log in rare.state.log_history if "eval_num_tokens" in log]
    assert evaluated == [at_step[1], at_step[3]]


def test_evaluation_names_metrics_by_dataset(tmp_path):
    evals = DatasetDict({"a": Dataset.from_list(TEXTS), "b": Dataset.from_list(TEXTS[:2])})
    trainer = make(tmp_path, TEXTS, trainer={"eval_dataset": evals}, eval_strategy="steps", eval_steps=3)
    trainer.train()
    metrics = trainer.evaluate()
    for name in ("loss", "entropy", "mean_token_accuracy", "num_tokens"):
        assert f"eval_a_{name}" in metrics
        assert f"eval_b_{name}" in metrics
    raw = trainer.evaluate(Dataset.from_list(TEXTS))
    assert raw["eval_loss"] == pytest.approx(metrics["eval_a_loss"])
    assert raw["eval_entropy"] == pytest.approx(metrics["eval_a_entropy"])
    assert trainer.predict(Dataset.from_list(TEXTS)).metrics["test_loss"] == pytest.approx(raw["eval_loss"])


def test_datasets_passed_to_evaluate_are_prepared_once(tmp_path):
    trainer = make(tmp_path, TEXTS, packing=True, max_length=24)
    rows = Dataset.from_list(TEXTS)
    raw, prepared = trainer.evaluate({"a": rows}), trainer.evaluate(trainer._prepare(rows, "b", True))
    assert raw["eval_a_loss"] == pytest.approx(prepared["eval_loss"])
    plain = make(tmp_path, TEXTS, max_length=24, trainer={"eval_dataset": rows})
    assert plain.evaluate()["eval_loss"] == pytest.approx(raw["eval_a_loss"])


def test_compute_metrics_gets_logits_of_one_forward_pass(tmp_path):
    calls = []
    metrics = lambda prediction: {"shape": prediction.predictions.shape[-1]}  # noqa: E731
    trainer = make(
        tmp_path, TEXTS, trainer={"eval_dataset": Dataset.from_list(TEXTS), "compute_metrics": metrics},
        per_device_eval_batch_size=6,
    )  # fmt: skip
    trainer.model.register_forward_hook(lambda *args: calls.append(1))
    assert trainer.evaluate()["eval_shape"] == 326
    assert len(calls) == 1


def test_loss_function_without_tensor_result_is_rejected(tmp_path):
    no_loss = {"compute_loss_func": lambda outputs, labels, num_items_in_batch=None: outputs.loss}
    with pytest.raises(UserError, match="Received: NoneType"):
        make(tmp_path, TEXTS, trainer=no_loss).train()


def test_custom_loss_function_gets_outputs_labels_and_num_items(tmp_path):
    def loss(outputs, labels, num_items_in_batch=None):
        shifted = F.pad(labels, (0, 1), value=-100)[:, 1:]
        logits = outputs.logits.float()
        return F.cross_entropy(logits.flatten(0, 1), shifted.flatten(), reduction="sum") / num_items_in_batch

    own, defaults = make(tmp_path, TEXTS, trainer={"compute_loss_func": loss}), make(tmp_path, TEXTS)
    own.train(), defaults.train()
    assert logged(own, "loss") == pytest.approx(logged(defaults, "loss"), rel=1e-5)
    assert logged(own, "entropy") == pytest.approx(logged(defaults, "entropy"), rel=1e-5)


def test_compute_loss_override_receives_collator_output(tmp_path):
    recorded = set()

    class CustomTrainer(SFTTrainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            recorded.update(inputs)
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    make(tmp_path, TEXTS, kind=CustomTrainer).train()
    assert recorded == {"input_ids", "attention_mask", "labels"}


def test_model_card_is_saved_with_the_model(tmp_path):
    make(tmp_path, TEXTS, max_steps=1).train()
    assert not (tmp_path / "README.md").exists()
    make(tmp_path, TEXTS, max_steps=1, save_strategy="steps", save_steps=1, learning_rate=0.25).train()
    assert "learning_rate: 0.25" in (tmp_path / "README.md").read_text(encoding="utf-8")


def test_model_card_describes_training_dataset_and_loading(tmp_path, monkeypatch):
    llama().save_pretrained(tmp_path / "beginning")
    tokenizer().save_pretrained(tmp_path / "beginning")
    monkeypatch.chdir(tmp_path)
    trainer = make(
        "made", CHATS, model="beginning", save_strategy="steps", save_steps=3, eval_strategy="steps", eval_steps=1,
        trainer={"peft_config": LoraConfig(r=2, lora_alpha=4), "eval_dataset": Dataset.from_list(CHATS[:2])},
    )  # fmt: skip
    trainer.train()
    trainer.save_model()
    card = Path("made/README.md").read_text(encoding="utf-8")
    assert "More information needed" not in card
    assert str(tmp_path) not in card
    for message in (
        "A LoRA adapter for `beginning`, created by supervised fine-tuning on", "112 of 12,512 parameters were trained",
        "lora_alpha: 4", "- Training set: 4 rows of messages.", "- Evaluation set: 2 rows of messages.",
        "| train_loss | ", "| Training Loss | Epoch | Step | Validation Loss |",
    ):  # fmt: skip
        assert message in card, message
    code = card.split("```python\n")[1].split("```")[0]
    result = {}
    monkeypatch.chdir("made")  # the base model's path was relative to another folder
    exec(compile(code.split("\nmessages")[0], "card", "exec"), result)
    assert type(result["model"]).__name__.startswith("PeftModel")


def test_streamed_dataset_trains(tmp_path):
    trainer = make(tmp_path, Dataset.from_list(PAIRS).to_iterable_dataset())
    trainer.train()
    assert len(logged(trainer, "loss")) == 3


def test_mixture_of_experts_uses_requested_balancing_weight(tmp_path):
    def mixture():
        torch.manual_seed(1)
        return transformers.Qwen3MoeForCausalLM(
            transformers.Qwen3MoeConfig(
                vocab_size=326, hidden_size=16, intermediate_size=24, moe_intermediate_size=8, num_hidden_layers=1,
                num_attention_heads=2, num_key_value_heads=1, head_dim=8, num_experts=4, num_experts_per_tok=2,
                eos_token_id=2, bos_token_id=2,
            )
        )  # fmt: skip

    options = {"max_steps": 1, "router_aux_loss_coef": 0.5}
    balanced, plain = (
        make(tmp_path, TEXTS, model=mixture(), **{**options, **more}) for more in ({}, {"router_aux_loss_coef": 0.0})
    )
    balanced.train(), plain.train()
    aux = logged(balanced, "aux_loss")[0]
    assert logged(balanced, "loss")[0] - logged(plain, "loss")[0] == pytest.approx(0.5 * aux, rel=1e-4)
    assert not logged(plain, "aux_loss")


# --- adapters, tokens, models by name ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config",
    [
        LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"),
        PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"),
    ],
    ids=["lora", "prompt"],
)
def test_only_adapter_of_adapted_model_is_trained_and_saved(tmp_path, config):
    trainer = make(tmp_path, TEXTS, trainer={"peft_config": config}, gradient_checkpointing=True)
    before = weights(trainer)
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    moved = {name for name, value in weights(trainer).items() if not torch.equal(value, before[name])}
    assert moved
    assert all("lora" in name or "prompt" in name for name in moved)
    assert (tmp_path / "saved" / "adapter_model.safetensors").exists()


def test_model_is_loaded_by_name_in_float32_with_its_tokenizer(tmp_path):
    trainer = SFTTrainer(str(DEMO), arguments(tmp_path), train_dataset=Dataset.from_list(TEXTS))
    assert next(trainer.model.parameters()).dtype == torch.float32
    assert len(trainer.processing_class) == len(tokenizer())
    half = SFTTrainer(
        str(DEMO), arguments(tmp_path, model_init_kwargs={"dtype": "bfloat16"}), train_dataset=Dataset.from_list(TEXTS)
    )
    assert next(half.model.parameters()).dtype == torch.bfloat16


def test_eos_and_pad_tokens_of_tokenizer_and_model_agree(tmp_path):
    own = tokenizer()
    own.pad_token = None
    with pytest.warns(FutureWarning, match="pad_token"):
        trainer = make(
            tmp_path, TEXTS, trainer={"processing_class": own}, eos_token="<|im_start|>", pad_token="<|im_end|>"
        )
    start, end = own.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
    assert (own.eos_token_id, own.pad_token_id) == (start, end)
    assert (trainer.model.config.eos_token_id, trainer.model.config.pad_token_id) == (start, end)
    assert trainer.model.generation_config.eos_token_id == [start, 2]
    assert trainer.train_dataset[0]["input_ids"][-1] == start


def test_chat_template_is_taken_from_a_file_or_another_tokenizer(tmp_path):
    file = tmp_path / "own.jinja"
    file.write_text("{% for m in messages %}{{ m.role }}: {{ m.content }};{% endfor %}")
    row = make(tmp_path, CHATS, chat_template_path=str(file)).train_dataset[0]
    assert tokenizer().decode(row["input_ids"]).startswith("user: Say 1;")

    source = tokenizer()
    source.add_tokens(["<extra>"], special_tokens=True)
    source.chat_template = "{% for m in messages %}<extra>{{ m.content }}{% endfor %}"
    source.save_pretrained(tmp_path / "source")
    trainer = make(tmp_path, CHATS, chat_template_path=str(tmp_path / "source"))
    size = trainer.model.get_input_embeddings().weight.shape[0]
    assert size % 64 == 0
    assert len(trainer.processing_class) == size
    assert trainer.train_dataset[0]["input_ids"][0] == trainer.processing_class.convert_tokens_to_ids("<extra>")
    trainer.train()


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"text": "a"}, {"text": None}], 'train dataset, record 2: "text" must be a string. Received: null'),
        ([*PAIRS, {"prompt": "Add", "completion": None}], 'record 7: "completion" must be a string. Received: null'),
        ([*CHATS, {"messages": None}], 'record 5: "messages" must be a list of messages. Received: null'),
    ],
)
def test_row_of_different_type_is_shown(tmp_path, rows, message):
    with pytest.raises(ValueError, match=message):
        make(tmp_path, rows)


@pytest.mark.parametrize("packing", [False, True])
def test_dataset_without_trained_tokens_after_truncation_is_rejected(tmp_path, packing):
    long = [{"prompt": "word " * 50, "completion": "end"}] * 3
    with pytest.raises(
        ValueError, match=r"No examples of the train dataset are left to train on\. Increase `max_length`"
    ):
        make(tmp_path, long, max_length=20, packing=packing)
    assert len(make(tmp_path, [*long, *PAIRS], max_length=20, packing=packing).train_dataset)


def test_rows_of_one_token_are_rejected(tmp_path):
    with pytest.raises(ValueError, match=r"No example of the train dataset has a token to predict.*max_length=1\."):
        make(tmp_path, [{"text": "word word"}] * 3, max_length=1)


def test_missing_or_incompatible_chat_template_is_reported(tmp_path):
    with pytest.raises(ValueError, match=r"`chat_template_path`: the file /.*nowhere\.jinja does not exist"):
        make(tmp_path, CHATS, chat_template_path=str(tmp_path / "nowhere.jinja"))
    for name, text in {"cut": "{% for m in messages ", "other": "{{ messages[0].author.name }}"}.items():
        (tmp_path / f"{name}.jinja").write_text(text)
        with pytest.raises(ValueError, match=r"record 1: The example cannot be tokenized: .*chat template.*Say 1"):
            make(tmp_path, CHATS, chat_template_path=str(tmp_path / f"{name}.jinja"))


def test_adapter_cannot_be_loaded_as_model(tmp_path):
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "the/base"}')
    with pytest.raises(ValueError, match=r"is an adapter, not a model. Load its base model \(the/base\)"):
        SFTTrainer(str(tmp_path), arguments(tmp_path), train_dataset=Dataset.from_list(TEXTS))


# --- accepted and rejected arguments ----------------------------------------------------------------------------------


def test_deprecated_constructor_names_work_with_one_warning(tmp_path):
    old = {"tokenizer": tokenizer(), "max_seq_length": 5, "dataset_text_field": "words", "packing": False}
    rows = Dataset.from_list([{"words": "one two three four five six"}])
    with pytest.warns(FutureWarning, match="max_seq_length") as caught:
        trainer = SFTTrainer(llama(), arguments(tmp_path), train_dataset=rows, **old)
    assert len([w for w in caught if "Deprecated arguments of SFTTrainer" in str(w.message)]) == 1
    assert len(trainer.train_dataset[0]["input_ids"]) == 5
    with pytest.raises(ValueError, match="`max_length` must be at least 1 token"), pytest.warns(FutureWarning):
        SFTTrainer(llama(), arguments(tmp_path), train_dataset=rows, max_seq_length=0)
    with pytest.raises(TypeError, match="unexpected keyword argument 'no_such_thing'"):
        SFTTrainer(llama(), arguments(tmp_path), train_dataset=rows, no_such_thing=1)


def test_deprecated_config_values_and_names_work_with_a_warning():
    with pytest.warns(FutureWarning, match="max_length"):
        assert SFTConfig(use_cpu=True, max_seq_length=7).max_length == 7
    with pytest.warns(FutureWarning, match="nll"):
        assert SFTConfig(use_cpu=True, loss_type="chunked_nll").loss_type == "nll"
    with pytest.warns(FutureWarning, match="bfd_split"):
        assert SFTConfig(use_cpu=True, packing_strategy="bfd-requeue").packing_strategy == "bfd_split"


def test_default_config_gives_no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config = SFTConfig(use_cpu=True)
    assert config.gradient_checkpointing is True
    assert config.activation_checkpointing is True
    assert SFTConfig(use_cpu=True, activation_checkpointing=False).gradient_checkpointing is False


def test_config_has_every_trl_field_with_its_default(golden_folder):
    spec = json.loads((golden_folder / "peer_arguments.json").read_text())
    fields = SFTConfig.__dataclass_fields__
    for entry in spec["SFTConfig adds or changes"]:
        assert fields[entry["name"]].default == entry["default"], entry["name"]


def test_config_is_parsed_from_a_command_line():
    parser = transformers.HfArgumentParser(SFTConfig)
    line = ["--use_cpu", "--packing", "--max_length", "64", "--dataset_kwargs", '{"skip_prepare_dataset": true}']
    (config,) = parser.parse_args_into_dataclasses(line)
    assert (config.packing, config.max_length, config.learning_rate) == (True, 64, 2e-5)
    assert config.dataset_kwargs == {"skip_prepare_dataset": True}
    assert SFTConfig(**config.to_dict()).to_dict() == config.to_dict()


def test_plain_training_arguments_are_accepted(tmp_path):
    args = TrainingArguments(str(tmp_path), use_cpu=True, learning_rate=0.5, save_strategy="no")
    trainer = SFTTrainer(llama(), args, train_dataset=Dataset.from_list(TEXTS), processing_class=tokenizer())
    assert isinstance(trainer.args, SFTConfig)
    assert (trainer.args.learning_rate, trainer.args.max_length) == (0.5, 1024)
    assert trainer.args.gradient_checkpointing is False
    theirs = transformers.TrainingArguments(str(tmp_path), use_cpu=True, learning_rate=0.25)
    theirs.own_value = 3
    trainer = SFTTrainer(llama(), theirs, train_dataset=Dataset.from_list(TEXTS), processing_class=tokenizer())
    assert (trainer.args.learning_rate, trainer.args.own_value) == (0.25, 3)


@pytest.mark.parametrize(
    ("rows", "options", "trainer", "kind", "message"),
    [
        (None, {}, {}, ValueError, "`train_dataset` is required"),
        ({"text": ["a"]}, {}, {}, TypeError, "must be a `Dataset` or `IterableDataset`. Received: `dict`"),
        (TEXTS, {}, {"processing_class": 3}, TypeError, "`processing_class` must be either"),
        (TEXTS, {"eos_token": "<no>"}, {}, ValueError, "The specified `eos_token` \\('<no>'\\) is not found"),
        (TEXTS, {"padding_free": True}, {}, ValueError, "`max_length` is not enforced"),
        (TEXTS, {"packing": True, "max_length": None}, {}, ValueError, "Packing requires `max_length`"),
        (
            TEXTS,
            {"packing": True, "packing_strategy": "best"},
            {},
            ValueError,
            "`packing_strategy` must be one of .* Received: 'best'",
        ),
        (TEXTS, {"packing": True}, {"data_collator": len}, ValueError, "custom data collator is not supported"),
        (TEXTS, {"assistant_only_loss": True}, {}, ValueError, "the dataset is not conversational"),
        (TEXTS, {"loss_type": "mse"}, {}, ValueError, "`loss_type` must be nll or dft"),
        (TEXTS, {"loss_type": "dft"}, {"compute_loss_func": len}, ValueError, "together with `loss_type='dft'`"),
        (TEXTS, {"truncation_mode": "middle"}, {}, ValueError, "`truncation_mode` must be .* Received: 'middle'"),
        (TEXTS, {"router_aux_loss_coef": 0.1}, {}, ValueError, "not a Mixture-of-Experts model"),
        (TEXTS, {}, {"peft_config": {"r": 4}}, TypeError, "must be a `peft.PeftConfig` instance"),
        (TEXTS, {"gradient_checkpointing_kwargs": {"selective": True}}, {}, ValueError, "requires `gradient_checkp"),
        (PAIRS, {}, {"formatting_func": str}, ValueError, "`formatting_func` and `completion_only_loss=True` cannot"),
        ([{"messages": chat("Hi")}], {"assistant_only_loss": True}, {}, RuntimeError, "requires assistant tokens"),
        ([{"images": [], "text": "a"}], {}, {}, ValueError, "appears to be vision-related"),
    ],
)
def test_contradictory_sft_arguments_are_rejected(tmp_path, rows, options, trainer, kind, message):
    with pytest.raises(kind, match=message):
        make(tmp_path, rows, trainer=trainer, **options)


def test_repeated_adapter_is_rejected(tmp_path):
    config = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    with pytest.raises(ValueError, match="merge and unload the existing adapter"):
        make(tmp_path, TEXTS, model=get_peft_model(llama(), config), trainer={"peft_config": config})


def test_adapter_of_the_head_is_trained_like_with_full_logits(tmp_path):
    config = LoraConfig(r=2, target_modules=["q_proj", "lm_head"], task_type="CAUSAL_LM", init_lora_weights=False)
    options = {"max_steps": 1, "per_device_train_batch_size": 2, "gradient_checkpointing": False, "max_grad_norm": 1e9}
    trainer = make(tmp_path, TEXTS[:2], trainer={"peft_config": config}, **options)
    (batch,) = trainer.get_train_dataloader()
    model = trainer.model.eval()
    model(**{name: batch[name] for name in ("input_ids", "attention_mask", "labels")}).loss.backward()
    gradients = [p.grad.norm() for name, p in model.named_parameters() if p.grad is not None]
    assert sum("lm_head" in name and p.grad is not None for name, p in model.named_parameters()) == 2
    model.zero_grad()
    trainer.train()
    assert logged(trainer, "grad_norm")[0] == pytest.approx(torch.stack(gradients).norm().item(), rel=1e-5)


@pytest.mark.parametrize(
    ("rows", "remedy"),
    [
        (TEXTS, "Use `Dataset.from_list(rows)`."),
        (DatasetDict(train=Dataset.from_list(TEXTS)), 'Pass one of its splits, such as `dataset["train"]`.'),
        (tuple(TEXTS), "Use `Dataset.from_list` or `IterableDataset.from_generator`."),
    ],
    ids=["list", "splits", "other"],
)
def test_other_datasets_are_rejected_with_the_conversion(tmp_path, rows, remedy):
    with pytest.raises(TypeError, match=re.escape(remedy)):
        SFTTrainer(llama(), SFTConfig(str(tmp_path)), train_dataset=rows, processing_class=tokenizer())


def test_unprepared_dataset_requires_masks_as_labels(tmp_path):
    skip = {"dataset_kwargs": {"skip_prepare_dataset": True}}
    with pytest.raises(ValueError, match="mask columns but no 'labels'"):
        make(tmp_path, [{"input_ids": [3, 4], "completion_mask": [0, 1]}], **skip)
    ready = make(tmp_path, [{"input_ids": [3, 4, 5], "labels": [-100, 4, 5]}], **skip)
    ready.train()
    assert len(logged(ready, "loss")) == 3


def test_folder_without_model_is_rejected_by_name(tmp_path):
    (tmp_path / "model").mkdir()
    with pytest.raises(UserError, match=f'model "{tmp_path}/modle" is not a folder. Did you mean'):
        make(tmp_path, TEXTS, model=f"{tmp_path}/modle")


def test_dataset_with_transform_is_rejected(tmp_path):
    rows = Dataset.from_list(TEXTS).with_transform(lambda batch: batch)
    with pytest.raises(ValueError, match=r"with_transform.*skip_prepare_dataset.*token ids"):
        make(tmp_path, rows)


def test_stream_is_not_reread_on_resume(tmp_path):
    """``datasets`` passes batches of 100 rows to a batched function, and resumes at multiples of them."""
    read = []

    def texts(shards):
        for shard in shards:
            for number in range(50):
                read.append(shard)
                yield {"text": f"{shard} and {number}"}

    def trained(resume=None):
        stream = IterableDataset.from_generator(texts, gen_kwargs={"shards": list(range(20))})
        options = {"max_steps": 9, "save_strategy": "steps", "save_steps": 8, "per_device_train_batch_size": 50}
        trainer = make(tmp_path, stream, gradient_accumulation_steps=2, **options)
        read.clear()
        trainer.train(resume_from_checkpoint=resume)
        return weights(trainer)

    whole = trained()
    assert len(read) == 900
    resumed = trained(str(tmp_path / "checkpoint-8"))
    assert all(torch.equal(whole[key], resumed[key]) for key in whole)
    assert 100 <= len(read) <= 100 + 4 * 100


@pytest.mark.parametrize("strategy", ["bfd", "wrapped"])
def test_packed_stream_resumes_bitwise_equal(tmp_path, strategy):
    def trained(resume=None):
        stream = IterableDataset.from_generator(lambda: iter(TEXTS * 8))
        options = {"packing": True, "packing_strategy": strategy, "max_length": 16, "max_steps": 5}
        trainer = make(tmp_path, stream, save_strategy="steps", save_steps=2, **options)
        trainer.train(resume_from_checkpoint=resume)
        return weights(trainer)

    whole, resumed = trained(), trained(str(tmp_path / "checkpoint-2"))
    assert all(torch.equal(whole[key], resumed[key]) for key in whole)


def test_first_step_has_one_forward_pass_per_micro_batch(tmp_path):
    recorded = []

    class StepMarker(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            recorded.append("step")

    trainer = make(tmp_path, TEXTS, max_steps=2, trainer={"callbacks": [StepMarker]})
    trainer.model.model.register_forward_hook(lambda *_: recorded.append("forward"))
    trainer.train()
    first = recorded.index("step")
    assert "forward" in recorded[:first]  # forward passes of checks before training
    assert recorded[first:] == ["step", "forward"] * 2


def test_4_bit_base_trains_on_cpu(tmp_path):
    pytest.importorskip("bitsandbytes")
    llama(hidden_size=64, intermediate_size=128).save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    four = transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.bfloat16)
    options = {"peft_config": LoraConfig(r=2), "quantization_config": four, "eval_dataset": Dataset.from_list(TEXTS)}
    trainer = make(tmp_path, TEXTS, model=str(tmp_path / "model"), trainer=options)
    base = trainer.model.base_model.model.model.layers[0].self_attn.q_proj.base_layer
    before = base.weight.detach().clone()
    trainer.evaluate()
    trainer.train()
    assert torch.equal(base.weight, before)  # bitsandbytes changes its layout at a product outside of training
    assert len(logged(trainer, "loss")) == 3
    assert any(p.abs().sum() > 0 for name, p in weights(trainer).items() if "lora_B" in name)


# --- invalid and suspicious rows and values ---------------------------------------------------------------------------

CHATML = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
HI, YO = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}


def lenient():
    result = tokenizer()
    result.chat_template = CHATML
    return {"processing_class": result}


@pytest.fixture
def trainer_warnings():
    """Return the list of warnings of burnish's trainers, with repetitions."""
    logger, messages = transformers.logging.get_logger("transformers.trainer"), []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logger.addHandler(handler)
    yield messages
    logger.removeHandler(handler)


def once(trainer_warnings, text):
    return sum(text in message for message in trainer_warnings) == 1


@pytest.mark.parametrize(
    ("chat", "message"),
    [
        ([HI, HI], "3 of 3 records of the train dataset were kept: no assistant message"),
        (
            [{"role": "narrator", "content": "x"}, HI, YO],
            'the role "narrator" may not be supported by the chat template',
        ),
        ([HI, YO, {"role": "system", "content": "x"}, HI, YO], "a system message is not the first"),
        ([{"role": "user", "content": "<image> What?"}, YO], "<image> is tokenized as plain text"),
    ],
    ids=["no answer", "role", "system", "image"],
)
def test_suspicious_rows_are_reported_once(tmp_path, trainer_warnings, chat, message):
    make(tmp_path, [{"messages": chat}] * 3, trainer=lenient())
    assert once(trainer_warnings, message)
    assert once(trainer_warnings, "(records 1, 2, 3)")


def test_placeholder_in_plain_text_is_reported_but_chats_are_not(tmp_path, trainer_warnings):
    make(tmp_path, [{"text": "look <video> at"}] * 3)
    assert once(trainer_warnings, "<video> is tokenized as plain text")
    before = len(trainer_warnings)
    make(tmp_path, CHATS)
    make(tmp_path, [{"prompt": [HI], "completion": [YO]}] * 2)
    assert len(trainer_warnings) == before


def test_message_without_content_is_rejected_except_tool_calls(tmp_path):
    for chat in ([HI, {"role": "assistant", "content": None}], [{"role": "user", "content": None}, YO]):
        with pytest.raises(ValueError, match=r'"messages\[.\]\.content" is null'):
            make(tmp_path, [{"messages": chat}] * 2, trainer=lenient())
    call = {"type": "function", "function": {"name": "look", "arguments": "{}"}}
    calls = {"role": "assistant", "content": None, "tool_calls": [call]}
    assert len(make(tmp_path, [{"messages": [HI, calls]}] * 2, trainer=lenient()).train_dataset) == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"learning_rate": 0.0}, "`learning_rate` is 0: weights will not change."),
        ({"num_train_epochs": 0, "max_steps": -1}, "`num_train_epochs` is 0: no training steps will run."),
        ({"max_grad_norm": -1.0}, "`max_grad_norm` is -1: gradients are not clipped. Use 0 to disable clipping."),
    ],
)
def test_suspicious_numbers_give_a_warning(tmp_path, options, message):
    with pytest.warns(UserWarning, match=re.escape(message)):
        arguments(tmp_path, **options)


def test_invalid_boolean_text_is_rejected_and_false_is_false(tmp_path):
    for name in ("packing", "bf16", "gradient_checkpointing", "completion_only_loss"):
        with pytest.raises(ValueError, match=f"`{name}` must be true or false. Received: 'maybe'."):
            arguments(tmp_path, **{name: "maybe"})
    assert arguments(tmp_path, packing="False").packing is False
    assert arguments(tmp_path, packing="true").packing is True


@pytest.mark.parametrize(("alpha", "effect"), [(-8, "is subtracted"), (0, "has no effect")])
def test_subtracting_or_idle_adapter_gives_a_warning(tmp_path, trainer_warnings, alpha, effect):
    make(tmp_path, TEXTS, trainer={"peft_config": LoraConfig(r=2, lora_alpha=alpha)})
    assert once(trainer_warnings, f"`lora_alpha` is {alpha}: the adapter {effect}.")


# --- the collator -----------------------------------------------------------------------------------------------------


def test_collator_pads_or_flattens():
    rows = [{"input_ids": [1, 2, 3], "labels": [-100, 2, 3]}, {"input_ids": [4, 5]}]
    padded = DataCollatorForLanguageModeling(pad_token_id=0, pad_to_multiple_of=4)(rows)
    assert padded["input_ids"].tolist() == [[1, 2, 3, 0], [4, 5, 0, 0]]
    assert padded["labels"].tolist() == [[-100, 2, 3, -100], [4, 5, -100, -100]]
    assert padded["attention_mask"].tolist() == [[1, 1, 1, 0], [1, 1, 0, 0]]
    assert set(padded) == {"input_ids", "labels", "attention_mask"}
    flat = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True, pad_to_multiple_of=3)(rows)
    assert flat["input_ids"].tolist() == [[1, 2, 3, 4, 5, 0]]
    assert flat["labels"].tolist() == [[-100, 2, 3, -100, 5, -100]]
    assert flat["position_ids"].tolist() == [[0, 1, 2, 0, 1, 0]]
    assert flat["cu_seq_lens_q"].tolist() == flat["cu_seq_lens_k"].tolist() == [0, 3, 5, 6]
    assert flat["seq_idx"].tolist() == [[0, 0, 0, 1, 1, 2]]
    assert (flat["max_length_q"], flat["max_length_k"]) == (3, 3)


def test_collator_returns_pack_positions_on_request():
    rows = [{"input_ids": [1, 2, 3], "seq_lengths": [1, 2]}, {"input_ids": [4, 5], "seq_lengths": [2]}]
    batch = DataCollatorForLanguageModeling(pad_token_id=0, return_position_ids=True)(rows)
    assert batch["position_ids"].tolist() == [[0, 0, 1], [0, 1, 0]]


logging.getLogger("datasets").setLevel(logging.ERROR)


def test_dataset_with_other_columns_is_rejected_with_their_names(tmp_path):
    for row in ({"question": "a"}, {"prompt": "a", "answer": "b"}):
        with pytest.raises(ValueError, match=f"Received: {', '.join(row)}."):
            make(tmp_path, [row])


def test_dataset_without_remaining_rows_is_rejected(tmp_path):
    with pytest.raises(ValueError, match="No examples of the train dataset are left"):
        make(tmp_path, PAIRS, max_length=2)
    with pytest.raises(ValueError, match="dataset is empty"):
        make(tmp_path, Dataset.from_dict({"text": []}))


@pytest.mark.parametrize("mark", ["", "{% generation %}{% endgeneration %}"])
def test_endless_chat_template_is_stopped_and_memory_exhausting_one_rejected(tmp_path, monkeypatch, mark):
    body = mark + "{% for m in messages %}{{ m['role'] + m['content'] }}{% endfor %}"
    monkeypatch.setattr("burnish.data.chat.rendering._workers.limit_s", 0.5)
    own = tokenizer()
    own.chat_template = body + "{% for a in range(99999) %}" * 3 + "{% endfor %}" * 3
    with pytest.raises(UserError, match=r"took more than 0\.5 s"):
        make(tmp_path, [{"messages": chat("Hi", "Ho")}], trainer={"processing_class": own})
    own.chat_template = body + "{{ 'a' * 99999999999 }}"
    with pytest.raises(ValueError, match="exceeded its memory limit"):
        make(tmp_path, [{"messages": chat("Hi", "Ho")}], trainer={"processing_class": own})


@pytest.mark.parametrize(
    "row", [{"text": "b" * 41}, {"prompt": "a" * 30, "completion": "b" * 11}, {"messages": chat("a" * 32, "b")}]
)
def test_oversized_row_is_rejected_with_its_beginning(row, tmp_path, monkeypatch):
    monkeypatch.setattr("burnish.data.length.LONGEST_RECORD", 40)
    with pytest.raises(
        ValueError, match=r"record 1: expected a record of at most 40 characters\. .* Split it .*\n  Record: {"
    ) as reported:
        make(tmp_path, [row])
    assert "Received: 4" in str(reported.value)


def test_encoded_rows_are_read_from_cache_unless_something_changed(tmp_path, monkeypatch):
    first = make(tmp_path, CHATS, max_length=8).train_dataset

    def refuse(*args, **kwargs):
        raise AssertionError("encoded again")

    monkeypatch.setattr(PlainTemplate, "encode_arrays", refuse)
    assert make(tmp_path, CHATS, max_length=8).train_dataset[:] == first[:]
    for rows, options in ((CHATS, {"max_length": 9}), (CHATS[1:], {"max_length": 8})):
        with pytest.raises(AssertionError, match="encoded again"):
            make(tmp_path, rows, **options)


def test_rows_are_identified_without_hashing_a_copy_of_them(tmp_path, monkeypatch):
    sets = [Dataset.from_dict({"text": [text]}) for text in ("one two three", "one two")]
    monkeypatch.setattr("datasets.arrow_dataset.generate_fingerprint", None)  # it pickles the table
    prepared = [make(tmp_path, sets[at], max_length=n).train_dataset for at, n in ((0, 8), (0, 8), (1, 8), (0, 9))]
    first, again, *others = [dataset._fingerprint for dataset in prepared]
    assert first == again
    assert len({first, *others}) == 3


def test_padding_batch_counts_nothing(tmp_path):
    """A rank without rows computes a padding batch, because the other ranks wait for it."""
    trainer = make(tmp_path, [{"text": "One two three."}] * 2, max_steps=1)
    loop = trainer._make_loop(None)
    batch = next(iter(trainer.get_train_dataloader()))
    own, padding = loop.loss(batch), loop.loss(trainer._padding_batch(batch))
    assert own.sums["entropy"] > 0
    assert loop.objective.num_items(batch) > 0
    assert own.sums.keys() == padding.sums.keys()
    assert padding.total == loop.objective.num_items(trainer._padding_batch(batch)) == 0
    assert all(value == 0 for value in padding.sums.values())
    padding.total.backward()  # the loss has a graph, so that ranks can synchronize


def test_completion_only_loss_without_completions_is_reported(tmp_path):
    texts = [{"text": "one two three"}] * 4
    with pytest.warns(UserWarning, match="`completion_only_loss=True` has no effect: the dataset has no column"):
        make(tmp_path, texts, completion_only_loss=True)
