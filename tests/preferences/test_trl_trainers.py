"""TRL's preference trainers: references, evaluation, resume, micro-batching, records, and rejected arguments."""

import json
import math
import os
import re
import shutil
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel
from script_runs import PLAIN, as_dataset, labelled_examples, losses, make, message_list, pairs, weights
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, HfArgumentParser

import burnish
from burnish import UserError
from burnish.trainer.trl.preferences import base
from burnish.trainer.trl.sft import setup
from small_run import make_model
from two_processes import in_two_processes

pytestmark = pytest.mark.run

TRAINERS = ["DPOTrainer", "KTOTrainer", "RewardTrainer", "ORPOTrainer", "CPOTrainer"]
LORA = {"target_modules": ["q_proj", "v_proj"], "r": 4, "task_type": "CAUSAL_LM"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scripts")
    make_model(folder / "model")
    make_model(folder / "other", seed=1)
    make_model(folder / "plain", end="<|endoftext|>")
    return folder


def read(path):
    return AutoModelForCausalLM.from_pretrained(path)


# --- training ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("kind", ["DPOTrainer", "KTOTrainer", "RewardTrainer"])
def test_prepared_datasets_keep_the_records(kind, is_streamed, folder, tmp_path):
    """TRL's LogCompletionsCallback reads the prompts of ``trainer.eval_dataset``."""
    records = Dataset.from_list(labelled_examples(6) if kind == "KTOTrainer" else pairs(6))
    rows = records.to_iterable_dataset() if is_streamed else records
    trainer = make(kind, folder / "model", tmp_path, rows, {"eval_dataset": rows}, max_steps=1)
    for prepared in (trainer.train_dataset, trainer.eval_dataset):
        assert [row["prompt"] for row in prepared] == records["prompt"][:]
    assert trainer.evaluate(trainer.eval_dataset)["eval_loss"] > 0


def test_prepared_unpaired_datasets_have_the_prompt_of_each_response(folder, tmp_path):
    long = {**pairs(1)[0], "prompt": message_list("user", "word " * 200)}
    trainer = make("KTOTrainer", folder / "model", tmp_path, [*pairs(2), long, *pairs(4)[2:]], max_length=64)
    prompts = [record["prompt"] for record in pairs(4)]
    assert trainer.train_dataset["prompt"][:] == prompts * 2


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", TRAINERS)
def test_summary_has_the_metrics_of_the_steps_since_the_last_log(kind, folder, tmp_path):
    rows = labelled_examples(6) if kind == "KTOTrainer" else pairs(6)
    trainer = make(kind, folder / "model", tmp_path, rows, max_steps=3, logging_steps=2, per_device_train_batch_size=2)
    trainer.train()
    step, summary = trainer.state.log_history
    assert step.keys() - {"loss", "grad_norm", "learning_rate"} <= summary.keys()
    assert summary["num_tokens"] > step["num_tokens"]


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("kind", "more"), [*((kind, {}) for kind in TRAINERS), ("KTOTrainer", {"kl_pairing": "group"})], ids=str
)
def test_step_does_not_depend_on_micro_batches(kind, more, folder, tmp_path):
    """Eight rows at once, and as 8x1, 4x2 and 3+3+2."""
    rows = labelled_examples(8) if kind == "KTOTrainer" else pairs(8)
    result = []
    for size, count in ((1, 8), (2, 4), (3, 3)):
        trainer = make(
            kind, folder / "model", tmp_path, rows,
            {"ref_model": read(folder / "other")} if kind == "DPOTrainer" else {},
            per_device_train_batch_size=size, gradient_accumulation_steps=count, max_steps=1, optim="sgd",
            max_grad_norm=0, learning_rate=0.1, seed=3, **more,
        )  # fmt: skip
        before = torch.cat([w.flatten() for w in weights(trainer).values()])
        loss = losses(trainer)
        result.append((loss, torch.cat([w.flatten() for w in weights(trainer).values()]) - before))
    (loss, update), *others = result
    assert update.norm() > 0
    for other, moved in others:
        assert other == pytest.approx(loss, rel=1e-5)
        assert (moved - update).norm() < 1e-4 * update.norm()


RUNS = {
    "dpo": ("DPOTrainer", {}),
    "dpo with a reference that follows": ("DPOTrainer", {"sync_ref_model": True, "ref_model_sync_steps": 2}),
    "dpo, lora": ("DPOTrainer", {"lora": True}),
    "aot": ("DPOTrainer", {"loss_type": "aot"}),
    "kto": ("KTOTrainer", {}),
    "kto, other answers of the step": ("KTOTrainer", {"kl_pairing": "group", "train_sampling_strategy": "random"}),
    "reward, lora": ("RewardTrainer", {"lora": True}),
    "cpo": ("CPOTrainer", {}),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", RUNS)
def test_stopped_run_resumes_to_the_same_weights(name, folder, tmp_path):
    kind, arguments = RUNS[name]
    arguments = {**arguments, "max_steps": 5, "save_strategy": "steps", "save_steps": 3}
    is_adapted = arguments.pop("lora", False)

    def trainer():
        lora = LORA | ({"task_type": "SEQ_CLS"} if kind == "RewardTrainer" else {})
        return make(kind, folder / "model", tmp_path,
                    trainer_args={"peft_config": LoraConfig(**lora)} if is_adapted else {}, **arguments)  # fmt: skip

    whole = trainer()
    expected = losses(whole)
    shutil.rmtree(tmp_path / "checkpoint-5")
    resumed = trainer()
    resumed.train(resume_from_checkpoint=True)
    assert [log["loss"] for log in resumed.state.log_history if "loss" in log] == expected
    for key, weight in weights(whole).items():
        assert torch.equal(weight, weights(resumed)[key]), key


def train_and_write(kind, model, output, precompute):
    """Train and evaluate on seven rows, an unequal number per process; rank 0 writes the results."""
    rows = labelled_examples(7) if kind == "KTOTrainer" else pairs(7)
    more = {} if precompute is None else {"precompute_ref_log_probs": precompute is True}
    more |= {"kl_pairing": "group"} if precompute == "group" else {}
    count = int(os.environ.get("WORLD_SIZE", "1"))
    trainer = make(
        kind, model, output, rows, {"eval_dataset": as_dataset(rows)}, per_device_train_batch_size=4 // count,
        max_steps=2, per_device_eval_batch_size=2, **more,
    )  # fmt: skip
    trainer.train()
    result = trainer.evaluate()
    if trainer.is_world_process_zero():
        result = {name: value for name, value in result.items() if "_per_second" not in name and "runtime" not in name}
        logged = [log["loss"] for log in trainer.state.log_history if "loss" in log]
        Path(output, "found.json").write_text(json.dumps({**result, "losses": logged}))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "precompute"),
    [
        ("DPOTrainer", False),
        ("DPOTrainer", True),
        ("KTOTrainer", False),
        ("KTOTrainer", "group"),
        ("RewardTrainer", None),
    ],
)
def test_two_processes_train_like_one(kind, precompute, folder, tmp_path):
    for name, run in (("one", lambda *args: train_and_write(*args)),
                      ("two", lambda *args: in_two_processes(train_and_write, *args))):  # fmt: skip
        (tmp_path / name).mkdir()
        run(kind, str(folder / "model"), str(tmp_path / name), precompute)
    one, two = (json.loads((tmp_path / name / "found.json").read_text()) for name in ("one", "two"))
    assert one.pop("losses") == pytest.approx(two.pop("losses"), rel=1e-5)
    assert one == pytest.approx(two, rel=1e-4, abs=1e-6)


def test_step_mismatched_response_precedes_in_epoch_order(folder, tmp_path):
    trainer = make(
        "KTOTrainer", folder / "model", tmp_path, labelled_examples(8), kl_pairing="group",
        train_sampling_strategy="random", per_device_train_batch_size=2, gradient_accumulation_steps=2,
    )  # fmt: skip
    sampler = trainer._get_train_sampler(trainer.train_dataset)
    order, answers = sampler.of_epoch(0), trainer.train_dataset["completion_ids"]
    dataset = trainer.get_train_dataloader().dataset
    for begin in (0, 4):
        step = order[begin : begin + 4]
        keys = dataset.keys_of_step(step)
        for place, number in enumerate(step):
            backs = [step[(place - back) % 4] for back in range(1, 4)]
            other = next(one for one in backs if answers[one] != answers[number])
            assert keys[number] == (number, other)
            assert dataset[keys[number]]["KL_completion_ids"] == answers[other]
    with pytest.raises(ValueError, match="does not support a custom sampler"):
        dataset[0]


def test_streamed_kto_examples_have_no_step_pairing(folder, tmp_path):
    streamed = as_dataset(labelled_examples()).to_iterable_dataset()
    with pytest.raises(ValueError, match="not supported with IterableDataset"):
        make("KTOTrainer", folder / "model", tmp_path, streamed, kl_pairing="group").train()


def test_pairs_of_kto_are_counted_once_in_messages(folder, tmp_path, caplog):
    """Both responses of a pair are examples of one record."""
    rows = [{"prompt": "Hi <image>", "chosen": "yes", "rejected": "no"} for _ in range(8)]
    make("KTOTrainer", folder / "model", tmp_path, rows)
    assert "8 of 8 records of the train dataset were kept" in caplog.text
    assert "(records 1, 2, 3, 4, 5 and 3 more)" in caplog.text
    for row in rows[2:5]:
        row["rejected"] = ""
    with pytest.raises(ValueError, match='"rejected" is empty') as caught:
        make("KTOTrainer", folder / "model", tmp_path, rows)
    assert "Same problem in records 4, 5." in str(caught.value)
    assert '{"prompt": "Hi <image>", "chosen": "yes", "rejected": ""}' in str(caught.value)


# --- the reference ----------------------------------------------------------------------------------------------------


def test_given_model_is_its_own_reference(folder, tmp_path):
    """Even if its weights were changed after loading."""
    model = read(folder / "model")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    assert losses(make("DPOTrainer", model, tmp_path))[0] == pytest.approx(math.log(2), abs=1e-6)


@pytest.mark.parametrize("options", [{}, {"init_lora_weights": "pissa"}])
def test_reference_of_new_adapter_is_the_base_model(options, folder, tmp_path):
    adapter = LoraConfig(**LORA, **options)
    trainer = make("DPOTrainer", folder / "model", tmp_path, trainer_args={"peft_config": adapter})
    first, *_, last = losses(trainer)
    assert first == pytest.approx(math.log(2), abs=1e-5)
    assert last != first
    assert {name.split(".")[-2] for name, p in trainer.model.named_parameters() if p.requires_grad} == {"default"}


def test_reference_of_continued_adapter_is_the_initial_adapter(folder, tmp_path):
    made = make("DPOTrainer", folder / "model", tmp_path, trainer_args={"peft_config": LoraConfig(**LORA)})
    made.train()
    made.save_model(str(tmp_path / "adapter"))
    again = PeftModel.from_pretrained(read(folder / "model"), tmp_path / "adapter", is_trainable=True)
    options = {"processing_class": AutoTokenizer.from_pretrained(folder / "model")}
    assert losses(make("DPOTrainer", again, tmp_path, trainer_args=options))[0] == pytest.approx(math.log(2), abs=1e-6)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (3, TypeError, "`ref_model` must be a transformers model, or the name or folder of one. Received: 3, of type"),
        ([1], TypeError, "`ref_model` must be a transformers model"),
        ("nowhere/at/all", UserError, 'ref_model "nowhere/at/all" is not a folder'),
        ("org/none", UserError, 'ref_model "org/none" is not a local folder, is not in the Hub\'s cache'),
    ],
)
@pytest.mark.parametrize("kind", ["DPOTrainer", "KTOTrainer"])
def test_reference_of_another_type_is_rejected(kind, given, error, message, folder, tmp_path):
    with pytest.raises(error, match=message):
        make(kind, folder / "model", tmp_path, trainer_args={"ref_model": given})


@pytest.mark.parametrize("kind", ["DPOTrainer", "KTOTrainer"])
@pytest.mark.parametrize("is_loaded", [False, True])
def test_reference_with_another_vocabulary_is_rejected_before_it_is_loaded(
    kind, is_loaded, folder, tmp_path, monkeypatch
):
    model = read(folder / "model") if is_loaded else folder / "model"
    larger = make_model(tmp_path / "larger", vocab_size=384)
    monkeypatch.setattr(setup, "load_named_model", None)
    monkeypatch.setattr(base, "load_named_model", None)
    with pytest.raises(UserError, match=r"reference model \(384\) and the policy \(320\) differ"):
        make(kind, model, tmp_path, trainer_args={"ref_model": str(larger)})


def test_reference_with_another_vocabulary_has_no_effect_on_a_loss_without_reference(folder, tmp_path):
    larger = make_model(tmp_path / "larger", vocab_size=384)
    assert make("DPOTrainer", folder / "model", tmp_path, trainer_args={"ref_model": str(larger)}, loss_type="sft")


def test_reference_can_be_a_model_or_name_but_not_the_policy(folder, tmp_path):
    named = losses(make("DPOTrainer", folder / "model", tmp_path, trainer_args={"ref_model": str(folder / "other")}))
    loaded = losses(make("DPOTrainer", folder / "model", tmp_path, trainer_args={"ref_model": read(folder / "other")}))
    assert named == loaded
    assert abs(named[0] - math.log(2)) > 1e-4
    model = read(folder / "model")
    with pytest.raises(ValueError, match="must be different objects"):
        make("DPOTrainer", model, tmp_path, trainer_args={"ref_model": model})


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", ["DPOTrainer", "KTOTrainer"])
@pytest.mark.parametrize(
    "options",
    [{}, {"peft_config": LoraConfig(**LORA)}, {"ref_model": "other"}],
    ids=["whole", "adapter", "second model"],
)
def test_precomputed_reference_gives_the_same_loss(kind, options, folder, tmp_path):
    options = {**options, **({"ref_model": str(folder / "other")} if "ref_model" in options else {})}
    rows, result = as_dataset(labelled_examples(6) if kind == "KTOTrainer" else pairs(6)), []
    for is_before in (False, True):
        trainer = make(kind, folder / "model", tmp_path, rows, {**options, "eval_dataset": rows}, max_steps=2,
                       precompute_ref_log_probs=is_before, precompute_ref_batch_size=4)  # fmt: skip
        result.append([*losses(trainer), trainer.evaluate()["eval_loss"]])
    assert result[1] == pytest.approx(result[0], rel=1e-5)
    if "peft_config" in options:
        assert trainer.evaluate(rows)["eval_loss"] == pytest.approx(result[0][-1], rel=1e-5)
        return
    with pytest.raises(UserError, match="Cannot compute reference log-probabilities"):
        trainer.evaluate(rows)


# --- evaluation and logs ----------------------------------------------------------------------------------------------

LOGGED = {
    "DPOTrainer": {"rewards/chosen", "rewards/rejected", "rewards/accuracies", "rewards/margins", "logps/chosen",
                   "logps/rejected", "logits/chosen", "logits/rejected", "entropy", "mean_token_accuracy"},
    "KTOTrainer": {"rewards/chosen", "rewards/rejected", "rewards/margins", "logps/chosen", "logps/rejected",
                   "logits/chosen", "logits/rejected", "entropy", "kl"},
    "RewardTrainer": {"accuracy", "margin", "min_reward", "mean_reward", "max_reward"},
    "ORPOTrainer": {"rewards/margins", "nll_loss", "log_odds_ratio", "log_odds_chosen"},
    "CPOTrainer": {"rewards/margins", "nll_loss"},
}  # fmt: skip


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", TRAINERS)
def test_evaluation_has_trl_names_and_does_not_depend_on_batches(kind, folder, tmp_path):
    rows, result = as_dataset(labelled_examples(7) if kind == "KTOTrainer" else pairs(7)), []
    for size in (1, 3):
        trainer = make(
            kind, folder / "model", tmp_path, trainer_args={"eval_dataset": rows}, per_device_eval_batch_size=size,
            eval_strategy="steps", eval_steps=3, logging_steps=3,
        )  # fmt: skip
        trainer.train()
        logged = next(log for log in trainer.state.log_history if "loss" in log)
        evaluated = next(log for log in trainer.state.log_history if "eval_loss" in log)
        assert LOGGED[kind] | {"num_tokens", "grad_norm"} <= logged.keys()
        assert {f"eval_{name}" for name in (*LOGGED[kind], "num_tokens")} <= evaluated.keys()
        result.append({name: value for name, value in evaluated.items() if "_per_second" not in name})
    del result[0]["eval_runtime"], result[1]["eval_runtime"]
    assert result[0] == pytest.approx(result[1], rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("kind", ["DPOTrainer", "KTOTrainer", "RewardTrainer"])
def test_custom_metrics_receive_rewards(kind, folder, tmp_path):
    rows = as_dataset(labelled_examples(5) if kind == "KTOTrainer" else pairs(5))

    def metrics(prediction):
        rewards, labels = prediction
        assert rewards.shape == ((5,) if kind == "KTOTrainer" else (5, 2))
        assert labels.tolist() == ([False, True] * 3)[:5] if kind == "KTOTrainer" else [0] * 5
        return {"mean": float(rewards.mean())}

    trainer = make(kind, folder / "model", tmp_path, trainer_args={"eval_dataset": {"a": rows, "b": rows},
                                                            "compute_metrics": metrics})  # fmt: skip
    trainer.train()
    result = trainer.evaluate()
    assert result["eval_a_mean"] == result["eval_b_mean"] != 0
    assert trainer.predict(rows).predictions.shape[0] == 5


# --- reward models ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["model", "plain"])
def test_reward_model_loads_in_transformers_with_trained_scores(name, folder, tmp_path):
    """In a batch and alone, also if the tokenizer pads with its end token."""
    trainer = make(
        "RewardTrainer", folder / name, tmp_path, pairs(3), trainer_args={"eval_dataset": as_dataset(pairs(3))}
    )
    trainer.train()
    scores = trainer.predict(as_dataset(pairs(3))).predictions
    trainer.save_model(str(tmp_path / "reward"))
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "reward")
    assert model.config.num_labels == 1
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "reward")
    for side, name in enumerate(("chosen_ids", "rejected_ids")):
        batch = tokenizer.pad({"input_ids": trainer.train_dataset[name]}, return_tensors="pt")
        assert model(**batch).logits.flatten().tolist() == pytest.approx(scores[:, side].tolist(), abs=1e-5)
        alone = model(torch.tensor([trainer.train_dataset[0][name]])).logits.item()
        assert alone == pytest.approx(scores[0, side], abs=1e-5)


@pytest.mark.parametrize(
    ("chosen", "rejected"), [("chosen_input_ids", "rejected_input_ids"), ("input_ids_chosen", "input_ids_rejected")]
)
def test_deprecated_token_id_columns_are_trained_with_one_warning(folder, tmp_path, chosen, rejected):
    ids = [{chosen: [5, 6, 7 + n], rejected: [5, 6, 20 + n]} for n in range(8)]
    with pytest.warns(FutureWarning, match=f"rename `{chosen}` to `chosen_ids`"):
        trainer = make("RewardTrainer", folder / "plain", tmp_path, ids, max_steps=1)
    assert {"chosen_ids", "rejected_ids"} <= {*trainer.train_dataset.column_names}
    assert losses(trainer)


def test_masked_tokens_of_deprecated_columns_are_not_trained(folder, tmp_path):
    """As scripts for early versions of TRL wrote them, with padding."""
    row = {"input_ids_chosen": [0, 5, 6, 7, 0], "attention_mask_chosen": [0, 1, 1, 1, 0],
           "input_ids_rejected": [5, 6, 20, 0, 0], "attention_mask_rejected": [1, 1, 1, 0, 0]}  # fmt: skip
    with pytest.warns(FutureWarning, match="rename"):
        trainer = make("RewardTrainer", folder / "plain", tmp_path, [row] * 4, max_steps=1)
    first = trainer.train_dataset[0]
    assert (first["chosen_ids"], first["rejected_ids"]) == ([5, 6, 7], [5, 6, 20])


def test_classifier_with_several_labels_is_not_a_reward_model(folder, tmp_path):
    model = AutoModelForSequenceClassification.from_pretrained(folder / "model", num_labels=3)
    options = {"processing_class": AutoTokenizer.from_pretrained(folder / "model")}
    with pytest.raises(UserError, match=r"`num_labels=1`\. Received: LlamaForSequenceClassification with 3 labels"):
        make("RewardTrainer", model, tmp_path, trainer_args=options)


# --- records ----------------------------------------------------------------------------------------------------------


def decoded(trainer, name, place=0):
    return AutoTokenizer.from_pretrained(trainer.model.config._name_or_path).decode(trainer.train_dataset[place][name])


def test_pair_formats_are_equivalent(folder, tmp_path):
    question, yes, no = message_list("user", "Well?"), message_list("assistant", "yes"), message_list("assistant", "no")
    ways = [
        {"prompt": question, "chosen": yes, "rejected": no},
        {"chosen": question + yes, "rejected": question + no},
        {"prompt": question, "chosen": question + yes, "rejected": question + no},
        {"prompt": "Well?", "chosen": question + yes, "rejected": question + no},
        {"prompt": question, "chosen": yes[0], "rejected": no[0]},
        {"prompt": question, "chosen": "yes", "rejected": "no"},
        {"chosen": [{"from": "human", "value": "Well?"}, {"from": "gpt", "value": "yes"}],
         "rejected": [{"from": "human", "value": "Well?"}, {"from": "gpt", "value": "no"}]},
    ]  # fmt: skip
    rows = [make("DPOTrainer", folder / "model", tmp_path, [record]).train_dataset[0] for record in ways]
    ids = [{name: row[name] for name in row if name.endswith("_ids")} for row in rows]
    assert len(ids[0]) == 3
    assert all(one == ids[0] for one in ids)


def test_tools_and_template_arguments_are_read_from_the_record(folder, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    tokenizer.chat_template = "{{ mood }} {% for t in tools or [] %}{{ t.name }} {% endfor %}" + tokenizer.chat_template
    rows = [{**pair, "tools": '[{"name": "red"}]', "chat_template_kwargs": {"mood": "blue"}} for pair in pairs(2)]
    trainer = make("DPOTrainer", folder / "model", tmp_path, rows, trainer_args={"processing_class": tokenizer})
    assert tokenizer.decode(trainer.train_dataset[0]["prompt_ids"]).startswith("blue red <|im_start|>user")


def test_pairs_are_split_into_labelled_examples(folder, tmp_path):
    trainer = make("KTOTrainer", folder / "model", tmp_path, pairs(3))
    assert trainer.train_dataset["label"] == [True] * 3 + [False] * 3
    assert len(losses(trainer)) == 3


@pytest.mark.parametrize("labels", [(1, 0), (1.0, 0.0), ("true", "false")])
def test_labels_may_be_numbers_or_text(folder, tmp_path, labels):
    rows = [{**row, "label": labels[number % 2]} for number, row in enumerate(labelled_examples(4))]
    assert make("KTOTrainer", folder / "model", tmp_path, rows).train_dataset["label"] == [True, False] * 2


def test_streamed_dataset_trains(folder, tmp_path):
    streamed = Dataset.from_list(pairs()).to_iterable_dataset()
    assert losses(make("DPOTrainer", folder / "model", tmp_path, streamed))[0] == pytest.approx(math.log(2), abs=1e-6)


def test_streamed_kto_examples_have_mismatched_responses_of_loaded_dataset(folder, tmp_path):
    loaded = as_dataset(labelled_examples(8))
    result = [
        make("KTOTrainer", folder / "model", tmp_path / str(at), rows, {"ref_model": str(folder / "other")})
        for at, rows in enumerate((loaded, loaded.to_iterable_dataset()))
    ]
    one, other = (losses(trainer) for trainer in result)
    assert one == other
    same = [{**row, "completion": [{"role": "assistant", "content": "red"}]} for row in labelled_examples(4)]
    streamed = as_dataset(same).to_iterable_dataset()
    assert losses(make("KTOTrainer", folder / "model", tmp_path / "same", streamed))  # no record has another response


def test_long_pair_keeps_one_prompt(folder, tmp_path):
    row = {"prompt": "red " * 8, "chosen": "green " * 30, "rejected": "blue"}
    for mode, whole in (("keep_start", True), ("keep_end", False)):
        trainer = make("DPOTrainer", folder / "model", tmp_path, [row], max_length=40, truncation_mode=mode)
        made = trainer.train_dataset[0]
        assert len(made["prompt_ids"]) + len(made["chosen_ids"]) == 40
        assert decoded(trainer, "prompt_ids").startswith("red red red red red red red") is whole


def bad(**changes):
    rows = pairs(4)
    rows[2] |= changes
    return rows


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (bad(rejected=pairs()[2]["chosen"]), "train dataset, record 3: chosen and rejected are identical"),
        (bad(rejected=message_list("assistant", " ")), 'record 3: "rejected" is empty'),
        (bad(chosen=message_list("user", "red")), 'record 3: "chosen" must end with a message from "assistant"'),
        (bad(chosen=message_list("assistant", "b" * 2000)), "record 3: expected a record of at most 1,000 characters"),
        (bad(chosen=None), 'record 3: "chosen" must be text, a message or a list of messages'),
    ],
)
def test_invalid_record_is_reported_by_number_or_dropped(rows, message, folder, tmp_path, monkeypatch):
    monkeypatch.setattr("burnish.data.length.LONGEST_RECORD", 1000)
    with pytest.raises(UserError, match="record 3") as caught:
        make("DPOTrainer", folder / "model", tmp_path, rows)
    assert message in str(caught.value)
    assert len(make("DPOTrainer", folder / "model", tmp_path, rows, on_bad_record="drop").train_dataset) == 3


@pytest.mark.parametrize("kind", ["ORPOTrainer", "CPOTrainer"])
def test_reference_of_a_loss_without_one_is_rejected(kind, folder, tmp_path):
    with pytest.raises(TypeError, match=f"{kind} uses no reference model. Remove `ref_model`"):
        make(kind, folder / "model", tmp_path, pairs(), {"ref_model": str(folder / "model")})


@pytest.mark.parametrize(
    ("kind", "rows", "message"),
    [
        ("DPOTrainer", labelled_examples(), "use KTOTrainer for single responses with a label"),
        ("KTOTrainer", [{"text": "red"}], "Expected the columns prompt, completion and label"),
        (
            "KTOTrainer",
            [{**row, "label": True} for row in labelled_examples()],
            "KTO requires desirable and undesirable ones",
        ),
        ("KTOTrainer", [{**row, "label": "perhaps"} for row in labelled_examples()], '"label" must be true or false'),
        ("RewardTrainer", [{**row, "margin": "far"} for row in pairs()], '"margin" must be a finite number'),
    ],
)
def test_dataset_of_another_type_is_rejected(kind, rows, message, folder, tmp_path):
    with pytest.raises(ValueError, match=message):
        make(kind, folder / "model", tmp_path, rows)


# --- arguments --------------------------------------------------------------------------------------------------------

CHANGES = [
    ("DPOTrainer", {"beta": 0.5}), ("DPOTrainer", {"loss_type": "hinge"}), ("DPOTrainer", {"label_smoothing": 0.2}),
    ("DPOTrainer", {"loss_type": ["sigmoid", "sft"], "loss_weights": [0.5, 2.0]}), ("DPOTrainer", {"ld_alpha": 0.5}),
    ("DPOTrainer", {"f_divergence_type": "js_divergence"}), ("DPOTrainer", {"use_weighting": True}),
    ("DPOTrainer", {"loss_type": "discopop", "discopop_tau": 0.5}), ("DPOTrainer", {"max_length": 18}),
    ("KTOTrainer", {"beta": 0.5}), ("KTOTrainer", {"desirable_weight": 2.0}),
    ("KTOTrainer", {"undesirable_weight": 2.0}), ("KTOTrainer", {"loss_type": "apo_zero_unpaired"}),
    ("RewardTrainer", {"center_rewards_coefficient": 0.5}),
    ("ORPOTrainer", {"beta": 0.5}), ("CPOTrainer", {"beta": 0.5}), ("CPOTrainer", {"cpo_alpha": 0.0}),
    ("CPOTrainer", {"loss_type": "simpo", "simpo_gamma": 1.0}), ("CPOTrainer", {"loss_type": "alphapo", "alpha": 0.2}),
]  # fmt: skip


@pytest.mark.sample(4)
@pytest.mark.parametrize(("kind", "change"), CHANGES, ids=str)
def test_each_argument_changes_the_loss(kind, change, folder, tmp_path):
    options = {"ref_model": str(folder / "model")} if kind in ("DPOTrainer", "KTOTrainer") else {}
    first, second = (
        losses(make(kind, folder / "other", tmp_path, trainer_args=options, max_steps=1, **more))
        for more in ({}, change)
    )
    assert first != second
    assert math.isfinite(second[0])


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        ("DPOConfig", {"loss_type": "kto_pair"}, "loss_type: kto_pair was removed; use a KTOTrainer"),
        ("DPOConfig", {"loss_type": "sigmiod"}, 'Did you mean "sigmoid"'),
        ("DPOConfig", {"loss_type": "hinge", "label_smoothing": 0.1}, '"label_smoothing" applies to sigmoid'),
        ("DPOConfig", {"loss_weights": [1.0, 2.0]}, "loss_weights must have one weight for each loss"),
        ("DPOConfig", {"rpo_alpha": 1.0}, 'loss_type=."sigmoid", "sft".'),
        ("DPOConfig", {"reference_free": True}, "Use CPOTrainer or ORPOTrainer to train without a reference"),
        ("DPOConfig", {"label_smoothing_factor": 0.1}, "Use `label_smoothing` for pairs"),
        (
            "KTOConfig",
            {"kl_pairing": "group", "precompute_ref_log_probs": True},
            'cannot be combined with "kl_pairing": group',
        ),
        ("KTOConfig", {"kl_pairing": "set"}, "must be one of"),
        ("KTOConfig", {"beta": 0}, "`beta` must be greater than 0"),
        ("CPOConfig", {"loss_type": "dpo"}, "must be one of"),
        ("CPOConfig", {"padding_value": 0}, r"Set tokenizer\.pad_token"),
        ("ORPOConfig", {"generate_during_eval": True}, "burnish predict"),
        ("CPOConfig", {"is_encoder_decoder": True}, "causal language model"),
        ("DPOConfig", {"generate_during_eval": True}, "burnish predict"),
    ],
)
def test_meaningless_arguments_are_rejected_by_name(config, options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        getattr(burnish, config)(str(tmp_path), use_cpu=True, **options)


@pytest.mark.parametrize("name", ["max_target_length", "use_num_logits_to_keep", "base_model_attribute_name"])
def test_arguments_of_earlier_configs_have_no_effect_and_give_a_warning(tmp_path, name):
    with pytest.warns(FutureWarning, match=f"`{name}` has no effect"):
        burnish.DPOConfig(tmp_path, **{name: 8})


@pytest.mark.parametrize(
    ("kind", "old", "field"),
    [
        ("DPOTrainer", {"beta": 0.4, "loss_type": "ipo", "label_pad_token_id": -100, "ref_adapter_name": None}, "beta"),
        ("KTOTrainer", {"max_length": 60, "max_prompt_length": 8}, "max_length"),
        ("RewardTrainer", {"max_length": 60}, "max_length"),
    ],
)
def test_constructor_arguments_of_earlier_versions_are_fields_of_the_config(kind, old, field, folder, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    given = {**old, "tokenizer": tokenizer}
    with pytest.warns(FutureWarning, match=f"Deprecated arguments of {kind}: ") as caught:
        trainer = make(kind, folder / "model", tmp_path, trainer_args=given, learning_rate=3e-4)
    (message,) = [str(one.message) for one in caught if "Deprecated arguments" in str(one.message)]
    assert f"`{field}` (use {kind.replace('Trainer', 'Config')}({field}=...))" in message
    assert "`tokenizer` (use processing_class=)" in message
    assert trainer.processing_class is tokenizer
    assert (getattr(trainer.args, field), trainer.args.learning_rate) == (old[field], 3e-4)
    if kind == "DPOTrainer":
        assert trainer.args.loss_type == ["ipo"]
        assert trainer.objective.options.pref_beta == 0.4


def test_arguments_of_transformers_take_old_constructor_arguments(folder, tmp_path):
    """As in scripts for TRL before 0.9, which had no DPOConfig."""
    args = burnish.TrainingArguments(tmp_path, use_cpu=True, max_steps=1, report_to="none", fp16=True)
    with pytest.warns(FutureWarning, match="Deprecated arguments of DPOTrainer") as caught:
        trainer = burnish.DPOTrainer(
            read(folder / "model"), None, args, beta=0.3, train_dataset=as_dataset(pairs()), max_length=64,
            processing_class=AutoTokenizer.from_pretrained(folder / "model"),
        )  # fmt: skip
    assert (trainer.args.beta, trainer.args.max_length, trainer.args.max_steps) == (0.3, 64, 1)
    assert not [str(one.message) for one in caught if "fp16" in str(one.message)]  # the arguments gave this warning


@pytest.mark.parametrize(
    ("old", "error", "message"),
    [
        ({"ref_adapter_name": "reference"}, ValueError, "`ref_adapter_name` was removed from DPOTrainer. The ref"),
        ({"beta": 0}, ValueError, "`beta` must be greater than 0"),
        ({"learning_rate": 0.1}, TypeError, r"Use DPOConfig\(learning_rate=...\)"),
    ],
)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_invalid_old_constructor_arguments_are_refused(old, error, message, folder, tmp_path):
    with pytest.raises(error, match=message):
        make("DPOTrainer", folder / "model", tmp_path, trainer_args=old)


def test_old_fields_that_a_script_sets_on_a_config_count(folder, tmp_path):
    args = burnish.KTOConfig(str(tmp_path), **PLAIN)
    args.max_prompt_length, args.generate_during_eval = 8, False
    rows = as_dataset(labelled_examples())
    with pytest.warns(FutureWarning, match=r"`max_prompt_length` \(no effect: prompt and completion are truncated"):
        burnish.KTOTrainer(str(folder / "model"), args=args, train_dataset=rows)
    args.ref_adapter_name = "reference"
    with pytest.raises(ValueError, match="`ref_adapter_name` was removed from KTOTrainer"):
        burnish.KTOTrainer(str(folder / "model"), args=args, train_dataset=rows)
    args = burnish.SFTConfig(str(tmp_path), **PLAIN)
    args.max_seq_length = 3
    texts = as_dataset([{"text": "one two three four five six"}])
    with pytest.warns(FutureWarning, match=r"`max_seq_length` \(use SFTConfig"):
        trainer = burnish.SFTTrainer(str(folder / "model"), args, train_dataset=texts)
    assert len(trainer.train_dataset[0]["input_ids"]) == 3


def test_script_reads_arguments_from_command_line(tmp_path):
    """As in TRL's scripts, with transformers' parser."""
    argv = ["--output_dir", str(tmp_path), "--learning_rate", "5.0e-7", "--loss_type", "sigmoid", "bco_pair",
             "--loss_weights", "0.8", "0.2", "--eval_strategy", "steps", "--eval_steps", "50", "--use_cpu", "--beta",
             "0.2", "--precompute_ref_log_probs", "false", "--sync_ref_model"]  # fmt: skip
    (args,) = HfArgumentParser(burnish.DPOConfig).parse_args_into_dataclasses(argv)
    assert args.loss_type == ["sigmoid", "bco_pair"]
    assert args.loss_weights == [0.8, 0.2]
    assert (args.beta, args.learning_rate, args.sync_ref_model, args.max_length) == (0.2, 5e-7, True, 1024)
    (args,) = HfArgumentParser(burnish.RewardConfig).parse_args_into_dataclasses([*argv[:4], "--use_cpu"])
    assert args.center_rewards_coefficient is None
    assert args.to_dict()["logging_steps"] == 10


@pytest.mark.parametrize("config", ["ORPOConfig", "CPOConfig"])
def test_trl_orpo_and_cpo_flags_are_parsed(config, tmp_path):
    argv = ["--output_dir", str(tmp_path), "--use_cpu", "--is_encoder_decoder", "false", "--generate_during_eval",
             "false", "--max_completion_length", "64"]  # fmt: skip
    argv += ["--padding_value", "5"] if config == "ORPOConfig" else []
    with pytest.warns(FutureWarning, match="`max_completion_length` has no effect"):
        (args,) = HfArgumentParser(getattr(burnish, config)).parse_args_into_dataclasses(argv)
    assert (args.is_encoder_decoder, args.generate_during_eval, args.max_completion_length) == (False, False, 64)
    (args,) = HfArgumentParser(getattr(burnish, config)).parse_dict({"output_dir": str(tmp_path), "use_cpu": True})
    assert args.max_completion_length is None


def test_padding_value_is_used_by_orpo(folder, tmp_path):
    trainer = make("ORPOTrainer", folder / "model", tmp_path, padding_value=7)
    batch = trainer.data_collator([trainer.train_dataset[0], trainer.train_dataset[3]])
    assert {*batch["chosen_input_ids"][batch["chosen_attention_mask"] == 0].tolist()} == {7}
    assert losses(trainer) == losses(make("ORPOTrainer", folder / "model", tmp_path))


def test_custom_loss_can_start_from_burnish_loss(folder, tmp_path):
    class Halved(burnish.DPOTrainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            return super().compute_loss(model, inputs) / 2

    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    arguments = burnish.DPOConfig(str(tmp_path), use_cpu=True, bf16=False, max_steps=1, report_to="none")
    options = {
        "processing_class": AutoTokenizer.from_pretrained(folder / "model"),
        "train_dataset": as_dataset(pairs()),
    }
    assert Halved(model, args=arguments, **options).train().training_loss == pytest.approx(math.log(2) / 2, abs=1e-6)


def scripts_of_documentation_page():
    page = (Path(burnish.__file__).parents[2] / "docs" / "preferences.md").read_text(encoding="utf-8")
    return re.findall(r"```python\n(.*?)```", page, re.DOTALL)


def test_script_of_documentation_page_scores_with_a_trained_model(folder, tmp_path, monkeypatch):
    script, _ = scripts_of_documentation_page()
    trainer = make("RewardTrainer", folder / "model", tmp_path / "run", as_dataset(pairs()), max_steps=1)
    trainer.train()
    trainer.save_model(str(tmp_path / "saves" / "rm"))
    monkeypatch.chdir(tmp_path)
    made: dict = {}
    exec(compile(script, "page", "exec"), made)
    (score,) = made["scores"]
    assert math.isfinite(score)


def test_script_of_documentation_page_trains(folder, tmp_path, monkeypatch):
    _, script = scripts_of_documentation_page()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "my-sft-model").symlink_to(folder / "model")
    made: dict = {}
    exec(compile(script.replace("max_steps=20", "max_steps=2, report_to='none', use_cpu=True"), "page", "exec"), made)
    assert made["trainer"].state.global_step == 2
    assert (tmp_path / "saves" / "even" / "model.safetensors").is_file()


@pytest.mark.parametrize("kind", ["DPOTrainer", "KTOTrainer", "RewardTrainer"])
def test_trl_style_script_runs(kind, folder, tmp_path):
    """Like TRL's dpo.py, kto.py and reward_modeling.py."""
    rows = as_dataset(labelled_examples() if kind == "KTOTrainer" else pairs()).train_test_split(test_size=4, seed=0)
    trainer = make(
        kind, folder / "model", tmp_path, rows["train"], {"eval_dataset": rows["test"]}, eval_strategy="steps",
        eval_steps=2, save_strategy="steps", save_steps=2, load_best_model_at_end=True,
    )  # fmt: skip
    trainer.train()
    metrics = trainer.evaluate()
    trainer.log_metrics("eval", metrics)
    trainer.save_metrics("eval", metrics)
    trainer.save_model(str(tmp_path))
    trainer.create_model_card(dataset_name="pairs-of-mine", tags=["mine"])
    assert (tmp_path / "eval_results.json").is_file()
    assert "pairs-of-mine" in (tmp_path / "README.md").read_text()
    assert trainer.state.best_metric == min(log["eval_loss"] for log in trainer.state.log_history if "eval_loss" in log)


def test_ref_model_can_be_synced_with_the_policy(folder, tmp_path):
    """The checkpoint contains the reference model with its updated weights."""
    other = read(folder / "other")
    arguments = {"sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 0.5}
    trainer = make("DPOTrainer", folder / "model", tmp_path, trainer_args={"ref_model": other}, **arguments)
    started = {name: parameter.clone() for name, parameter in other.named_parameters()}
    start = weights(trainer)
    trainer.train()
    fixed = losses(make("DPOTrainer", folder / "model", tmp_path, trainer_args={"ref_model": read(folder / "other")}))
    assert [log["loss"] for log in trainer.state.log_history if "loss" in log] != fixed
    moved = sum(not torch.equal(started[name], parameter) for name, parameter in trainer.ref_model.named_parameters())
    assert moved == len(started)
    assert start.keys() == started.keys()
    with pytest.raises(UserError, match="does not contain the trained weights"):
        make("DPOTrainer", folder / "model", tmp_path,
             trainer_args={"ref_model": other, "peft_config": LoraConfig(**LORA)}, **arguments)  # fmt: skip


@pytest.mark.sample(1)
@pytest.mark.parametrize("every", [1, 2])
def test_reference_moves_at_the_end_of_a_step_with_and_without_evaluations(folder, tmp_path, every):
    """A reference that equals the policy gives a loss of ln 2, in the next step and in an evaluation after the move."""
    follows = {"sync_ref_model": True, "ref_model_sync_steps": every, "ref_model_mixup_alpha": 1.0, "max_steps": 4,
               "learning_rate": 0.05, "optim": "sgd", "beta": 1.0}  # fmt: skip
    evaluations = {"eval_strategy": "steps", "eval_steps": 1}
    rows, given = pairs(4), {"eval_dataset": as_dataset(pairs(4))}
    plain, evaluated = (
        make("DPOTrainer", folder / "model", tmp_path / str(len(more)), rows, given, **follows, **more)
        for more in ({}, evaluations)
    )
    plain.train(), evaluated.train()
    assert losses(evaluated) == losses(plain)
    after_move = [loss for at, loss in enumerate(losses(plain)) if at % every == 0]
    assert after_move == pytest.approx([math.log(2)] * len(after_move), abs=1e-5)
    eval_losses = [log["eval_loss"] for log in evaluated.state.log_history if "eval_loss" in log]
    assert eval_losses[every - 1 :: every] == pytest.approx([math.log(2)] * (4 // every), abs=1e-5)


@pytest.mark.parametrize("trainer", ["SFTTrainer", "ORPOTrainer", "RewardTrainer"])
def test_encoder_decoder_model_is_rejected(trainer):
    from datasets import Dataset
    from transformers import T5Config, T5ForConditionalGeneration

    import burnish

    model = T5ForConditionalGeneration(T5Config(vocab_size=20, d_model=8, d_ff=8, d_kv=4, num_layers=1, num_heads=2))
    records = Dataset.from_list([{"text": "a", "prompt": "a", "chosen": "b", "rejected": "c"}])
    with pytest.raises(ValueError, match=r"a causal language model.*Received: T5For.*Use burnish.Seq2SeqTrainer"):
        getattr(burnish, trainer)(model, train_dataset=records)
