"""Options of preference training: effects, rejected combinations, and messages."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
from safetensors import safe_open
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from burnish.config.errors import UserError
from burnish.losses.kto import KtoObjective
from burnish.losses.pairs import PairObjective
from burnish.losses.reference import InitialWeights, ShardedInitialWeights
from burnish.parallel.create import create_parallel
from burnish.run.build import build_loop
from burnish.run.plan.plan import plan
from burnish.run.prepare import prepare
from pair_runs import losses, make_pair_workspace, pairs, run_options, train_on_pairs
from representative import representative_slow
from small_run import make_model

pytestmark = pytest.mark.run


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    return make_pair_workspace(tmp_path_factory.mktemp("preferences"))


@pytest.fixture(scope="module")
def known_losses():
    return {}


@pytest.fixture
def baseline(workspace, monkeypatch, known_losses):
    """Return a function: options -> losses. It trains once for each set of options."""

    def losses_of(options):
        key = json.dumps(options)
        if key not in known_losses:
            known_losses[key] = losses(workspace, monkeypatch, **options)
        return known_losses[key]

    return losses_of


OTHER = {"ref_model": "other"}
CHANGES = [
    ({"pref_beta": 0.5}, {}), ({"pref_ftx": 1.0}, {}), ({"pref_loss": "hinge"}, {}),
    ({"pref_loss_weights": [2.0]}, {}), ({"dpo_label_smoothing": 0.2}, OTHER), ({"pref_bco_weight": 1.0}, {}),
    ({"simpo_gamma": 1.0}, {"pref_loss": "simpo"}), ({"ld_alpha": 0.5}, OTHER),
    ({"discopop_tau": 0.5}, {"pref_loss": "discopop", **OTHER}), ({"f_divergence_type": "forward_kl"}, OTHER),
    ({"f_alpha_divergence_coef": 0.2}, {"f_divergence_type": "alpha_divergence", **OTHER}),
    ({"use_weighting": True}, {}), ({"cpo_alpha": 0.5}, {}), ({"alphapo_alpha": 0.2}, {"pref_loss": "simpo"}),
    ({"dpop_lambda": 5.0}, {"pref_loss": "dpop", **OTHER}), ({"ref_model": "other"}, {}),
    ({"sync_ref_model": True, "ref_model_sync_steps": 1}, {}),
    ({"ref_model_mixup_alpha": 0.9}, {"sync_ref_model": True, "ref_model_sync_steps": 1}),
    ({"ref_model_sync_steps": 1}, {"sync_ref_model": True}),
    ({"sync_ref_model": True}, {"ref_model": "other", "ref_model_sync_steps": 1}),
]  # fmt: skip


@pytest.mark.sample(4)
@pytest.mark.parametrize(("change", "beside"), CHANGES, ids=lambda value: next(iter(value), "alone"))
def test_each_pair_option_changes_the_loss(workspace, monkeypatch, baseline, change, beside):
    before = baseline(beside)
    after = losses(workspace, monkeypatch, **beside, **change)
    assert before != after
    assert all(value == value for value in after)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("stage", "change"),
    [
        ("kto", {"kto_chosen_weight": 2.0}), ("kto", {"kto_rejected_weight": 2.0}),
        ("kto", {"kto_loss": "apo_zero_unpaired"}), ("kto", {"pref_beta": 0.5}), ("kto", {"pref_ftx": 1.0}),
        ("rm", {"center_rewards_coefficient": 0.1}),
    ],
    ids=str,
)  # fmt: skip
def test_each_kto_and_reward_option_changes_the_loss(workspace, monkeypatch, baseline, stage, change):
    swapped = {"model_name_or_path": "other", "ref_model": "model"}
    beside = {"stage": stage, "max_steps": 4, **(swapped if stage == "kto" else {})}
    assert baseline(beside) != losses(workspace, monkeypatch, **beside, **change)


@pytest.mark.parametrize(("requested", "file", "name"), [
    (None, "value_head", "v_head.summary.weight"), ("score", "model", "score.weight"),
])  # fmt: skip
def test_reward_head_selects_saved_format_of_reward_model(workspace, monkeypatch, requested, file, name):
    losses(workspace, monkeypatch, stage="rm", reward_head=requested, output_dir=str(workspace / f"saved-{requested}"))
    with safe_open(workspace / f"saved-{requested}" / f"{file}.safetensors", "pt") as tensors:
        assert name in tensors.keys()  # noqa: SIM118


def test_reward_model_scores_dataset_and_reloads_in_burnish_and_transformers(workspace, monkeypatch):
    """The saved model is evaluated by burnish, and by transformers as a sequence classifier."""
    trained = workspace / "scorer"
    data = {
        "eval_dataset": str(workspace / "pairs.json"),
        "stage": "rm",
        "per_device_eval_batch_size": 3,
        "do_train": True,
    }
    losses(workspace, monkeypatch, **data, reward_head="score", do_predict=True, output_dir=str(trained))
    lines = [json.loads(line) for line in (trained / "generated_predictions.jsonl").read_text().splitlines()]
    assert [line["record"] for line in lines] == list(range(1, 13))
    classifier = AutoModelForSequenceClassification.from_pretrained(trained)
    assert classifier.config.pad_token_id != classifier.config.eos_token_id
    tokenizer = AutoTokenizer.from_pretrained(trained)
    for line, pair in zip(lines[:4], pairs(), strict=False):
        for part in ("chosen", "rejected"):
            message = (
                f"<|im_start|>user\n{pair['instruction']}<|im_end|>\n<|im_start|>assistant\n{pair[part]}<|im_end|>\n"
            )
            scored = classifier(**tokenizer(message, return_tensors="pt", add_special_tokens=False)).logits.item()
            assert scored == pytest.approx(line[part], abs=1e-4)
    again = {**data, "do_train": False, "do_predict": True, "model_name_or_path": "scorer"}
    train_on_pairs(workspace, monkeypatch, **again, output_dir=str(workspace / "again"))
    read = [json.loads(line) for line in (workspace / "again" / "generated_predictions.jsonl").read_text().splitlines()]
    assert [line["chosen"] for line in read] == pytest.approx([line["chosen"] for line in lines], abs=1e-4)


def test_model_without_reward_head_scores_nothing(workspace, monkeypatch):
    options = {"stage": "rm", "do_predict": True, "do_train": False, "eval_dataset": str(workspace / "pairs.json")}
    with pytest.raises(UserError, match="it is not a reward model"):
        train_on_pairs(workspace, monkeypatch, **options, output_dir=str(workspace / "none"))


def test_dropout_is_disabled_by_default(workspace, monkeypatch):
    without = losses(workspace, monkeypatch, model_name_or_path="dropping")
    assert without[0] == pytest.approx(0.693147, abs=1e-6)
    assert losses(workspace, monkeypatch, model_name_or_path="dropping", disable_dropout=False) != without


def test_reference_can_have_adapters_and_be_quantized(workspace, monkeypatch):
    """The reference is loaded like a model with these options."""
    from burnish.run import references

    requested, load_model, load_adapter = [], references.load_model, references.load_adapter
    make_adapter(workspace, monkeypatch)
    plain = losses(workspace, monkeypatch, ref_model="model")
    adapted = losses(workspace, monkeypatch, ref_model="model", ref_model_adapters=[str(workspace / "adapter")])
    assert plain != adapted

    def loaded(options, **arguments):
        requested.append((options.model_name_or_path, options.quantization_bit))
        raise UserError("seen")

    monkeypatch.setattr(references, "load_model", loaded)
    with pytest.raises(UserError, match="seen"):
        losses(workspace, monkeypatch, ref_model="other", ref_model_quantization_bit=4)
    assert requested == [(str(workspace / "other"), 4)]
    assert load_model is not loaded
    assert references.load_adapter is load_adapter


def make_adapter(workspace, monkeypatch):
    losses(workspace, monkeypatch, finetuning_type="lora", output_dir=str(workspace / "adapter"))


@pytest.mark.parametrize(
    "changes",
    representative_slow(
        [{}, {"finetuning_type": "lora"}, {"stage": "kto"}, {"ref_model": "other"}, {"pref_loss": "aot"}], 2
    ),
    ids=lambda options: "-".join(options) or "full",
)
def test_precomputed_reference_gives_the_same_loss(workspace, monkeypatch, changes):
    """No copy of the initial model is kept either."""
    from burnish.run import references

    more = {**changes, "eval_dataset": str(workspace / "pairs.json"), "eval_strategy": "steps", "eval_steps": 3}
    folder = workspace / "beforehand"
    result = []
    for is_before in (False, True):
        options = {**more, "precompute_ref_log_probs": is_before, "output_dir": str(folder)}
        if is_before:
            monkeypatch.setattr(references, "InitialWeights", None)
        one = losses(workspace, monkeypatch, **options)
        history = json.loads((folder / "trainer_state.json").read_text())["log_history"]
        result.append([*one, next(log["eval_loss"] for log in history if "eval_loss" in log)])
    assert result[1] == pytest.approx(result[0], rel=1e-5)


def plan_error(workspace, **changes):
    with pytest.raises(UserError) as caught:
        plan(run_options(workspace, **changes))
    return str(caught.value)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"pref_loss": "kto_pair"}, ["kto_pair was removed", "stage: kto", "bco_pair"]),
        ({"pref_loss": "sigmiod"}, ["sigmiod", "sigmoid"]),
        ({"pref_loss": "nll"}, ["nll", "stage: sft"]),
        ({"dpo_label_smoothing": 0.6}, ["dpo_label_smoothing", "0.5", "0.6"]),
        ({"dpo_label_smoothing": 0.1, "pref_loss": "hinge"}, ["applies to sigmoid, robust, exo_pair, ", "cpo only"]),
        ({"dpo_label_smoothing": 0.1, "pref_loss": []}, ["pref_loss is empty"]),
        ({"pref_loss": "exo_pair"}, ["exo_pair", "dpo_label_smoothing"]),
        ({"pref_beta": 0}, ["pref_beta", "greater than 0"]),
        ({"pref_ftx": -1}, ["pref_ftx"]),
        ({"pref_loss": "sigmoid, sft", "pref_loss_weights": [1.0]}, ["pref_loss_weights", "1 for 2"]),
        ({"f_divergence_type": "js_divergence", "pref_loss": "apo_zero"}, ["f_divergence_type", "sigmoid"]),
        ({"use_weighting": True, "pref_loss": "aot"}, ["use_weighting", "aot"]),
        ({"precompute_ref_log_probs": True, "sync_ref_model": True}, ["once", "updates the reference model"]),
        ({"precompute_ref_log_probs": True, "streaming": True}, ["before the first step", "streaming"]),
        ({"packing": True}, ["Pairs cannot be packed", "Remove packing"]),
        ({"train_on_prompt": True}, ["train_on_prompt", "stage: sft"]),
        ({"mask_history": True}, ["mask_history", "stage: sft"]),
        ({"stage": "sft", "pref_loss": "dft"}, ["use_dft_loss"]),
    ],
    ids=lambda value: "-".join(map(str, value.values()))[:30] if isinstance(value, dict) else "",
)
def test_contradictory_preference_options_are_rejected_before_reading(workspace, changes, expected):
    message = plan_error(workspace, **changes)
    for word in expected:
        assert word in message


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"simpo_gamma": 1.0}, '"simpo_gamma" has no effect: pref_loss is sigmoid.'),
        ({"pref_loss": "orpo", "ref_model": "other"}, 'pref_loss: orpo is reference-free; "ref_model" has no effect.'),
        ({"pref_loss": "simpo"}, "pref_beta 0.1 is too low for SimPO; the paper uses 2.0 to 2.5."),
        ({"kto_chosen_weight": 2.0}, '"kto_chosen_weight" has no effect: stage is dpo.'),
        ({"center_rewards_coefficient": 0.1, "stage": "kto"}, '"center_rewards_coefficient" has no effect: stage is'),
        ({"stage": "sft", "pref_beta": 0.2}, '"pref_beta" has no effect: stage is sft.'),
        ({"neftune_noise_alpha": 5.0}, '"neftune_noise_alpha" has no effect: stage is dpo.'),
        ({"use_dft_loss": True, "stage": "kto"}, '"use_dft_loss" has no effect: stage is kto.'),
        ({"ref_model_adapters": "other"}, '"ref_model_adapters" has no effect without "ref_model".'),
        ({"ref_model_quantization_bit": 4}, '"ref_model_quantization_bit" has no effect without "ref_model".'),
        ({"ref_model_mixup_alpha": 0.3}, '"ref_model_mixup_alpha" has no effect without "sync_ref_model".'),
        ({}, "learning_rate 0.001 is high for preference optimization"),
    ],
)
def test_options_without_effect_or_with_unlikely_values_are_reported(workspace, changes, sentence):
    assert any(note.startswith(sentence) for note in plan(run_options(workspace, **changes)).notes)


def kto_notes(chosen, rejected):
    """Return the notes on 8 desirable and 4 undesirable responses."""
    objective = object.__new__(KtoObjective)
    objective.options = SimpleNamespace(
        kto_chosen_weight=chosen, kto_rejected_weight=rejected, pref_ftx=0.0, kto_loss="kto"
    )
    return objective.inspect([{"tag": number < 8} for number in range(12)], 64)


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        ((0.0, 1.0), "kto_chosen_weight is 0: desirable responses have no KTO loss. KTO recommends a weighted ratio of "
         "1:1 to 1.33:1. Set kto_chosen_weight: 0.50 to 0.67."),
        ((1.0, 0.0), "Set kto_rejected_weight: 1.50 to 2.00."),
        ((1.0, 1.0), "Set kto_chosen_weight: 0.50 to 0.67, or kto_rejected_weight: 1.50 to 2.00."),
        ((0.5, 1.0), None),
    ],
)  # fmt: skip
def test_advice_on_kto_weights_is_usable(weights, expected):
    notes = kto_notes(*weights)
    assert len(notes) == (expected is not None)
    assert expected is None or expected in notes[0]


def test_kto_weights_of_0_are_rejected():
    with pytest.raises(UserError, match="kto_chosen_weight and kto_rejected_weight are 0: nothing would be learned"):
        kto_notes(0.0, 0.0)


def test_identical_responses_are_rejected_if_the_kl_term_compares_them(workspace, tmp_path):
    rows = [{"instruction": str(at), "output": "red", "kto_tag": at % 2 == 0} for at in range(8)]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    changes = {"stage": "kto", "dataset": str(tmp_path / "rows.json")}
    with pytest.raises(UserError, match="All 8 responses are identical"):
        prepare(plan(run_options(workspace, **changes)))
    prepare(plan(run_options(workspace, **changes, kto_loss="apo_zero_unpaired")))


@pytest.mark.parametrize("changes", [False, True])
def test_checkpoint_copies_weights_before_a_reference_changes_them(tmp_path, monkeypatch, changes):
    workspace = make_pair_workspace(tmp_path)
    monkeypatch.setattr(InitialWeights, "changes_weights", changes)
    planned = plan(run_options(workspace))
    loop = build_loop(planned, prepare(planned), create_parallel(planned.options), None)
    assert isinstance(loop.objective.reference, InitialWeights)
    assert loop.checkpoints._may_copy_later is not changes
    assert ShardedInitialWeights.changes_weights


def test_full_logits_give_the_same_loss_and_impossible_request_is_rejected(workspace, monkeypatch):
    expected = losses(workspace, monkeypatch)
    heads, configure = [], PairObjective.configure

    def recorded(self, capabilities, collate):
        configured = configure(self, capabilities, collate)
        heads.append(self.head)
        return configured

    monkeypatch.setattr(PairObjective, "configure", recorded)
    assert losses(workspace, monkeypatch, fused_loss=False) == pytest.approx(expected, rel=1e-5)
    assert heads == [None]
    monkeypatch.setattr(
        PairObjective, "configure", lambda self, found, collate: configure(self, replace(found, head=None), collate)
    )
    with pytest.raises(UserError, match="fused_loss"):
        losses(workspace, monkeypatch, fused_loss=True)


def test_packing_of_evaluations_is_rejected(workspace):
    with pytest.raises(UserError, match='"eval_packing" is for stage: sft'):
        plan(run_options(workspace, eval_packing=True))


@pytest.mark.parametrize("option", ["ref_model", "ref_model_adapters"])
def test_missing_reference_is_rejected_before_encoding(workspace, option):
    with pytest.raises(UserError, match=f'{option} "/no/such/model" is not a folder'):
        plan(run_options(workspace, **{option: "/no/such/model"}))


NEW = [f"<new {number}>" for number in range(64)]


@pytest.fixture(scope="module")
def larger(workspace):
    """Save a model whose vocabulary size is that of the policy after a token is added."""
    return make_model(workspace / "larger", vocab_size=384)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ref_model": "larger"}, "The vocabulary sizes of the reference model (384) and the policy (320) differ."),
        ({"ref_model": "other", "add_tokens": NEW, "additional_target": "embed_tokens,lm_head",
          "finetuning_type": "lora"},
         "The vocabulary sizes of the reference model (320) and the policy (384) differ."),
        ({"ref_model": "larger", "stage": "kto"}, "(384)"),
        ({"ref_model": "larger", "add_tokens": NEW}, None),
        ({"ref_model": "larger", "pref_loss": "orpo"}, None),
    ],
    ids=str,
)  # fmt: skip
def test_reference_with_another_vocabulary_is_reported_before_weights_are_read(workspace, larger, options, message):
    prepared_options = run_options(workspace, **options)
    if message is None:
        prepare(plan(prepared_options))
        return
    with pytest.raises(UserError) as error:
        prepare(plan(prepared_options))
    assert message in str(error.value)
    assert "Set ref_model to a model with the vocabulary of the policy." in str(error.value)
