"""Labels compared with a plain token-by-token reference, for random conversations under every ``train_on_eos``,
``mask_history`` and ``train_on_prompt``, with flags and weights of messages.
"""

import random
from itertools import product

import pytest

from burnish.data.batches.batching import pack, sequences_of
from burnish.data.chat.choose import configure_tokenizer, load_template
from burnish.data.stats import DataStats
from burnish.loop.types import IGNORE_INDEX, Example, Message
from representative import representative
from small_run import CHAT_TEMPLATE
from template_cases import byte_tokenizer, template_options

TEMPLATES = ["qwen", "chatml", "llama2", "llama3", "default", "mistral", "alpaca", "gemma", "glm4", "gemma2", "solar"]
ENDS = ["turn", "all", "last", "none"]
RANGES = [{}, {"mask_history": True}, {"train_on_prompt": True}]
END_TOKENS = {"qwen": "<|im_end|>", "chatml": "<|im_end|>", "own": "<|im_end|>", "gemma": "<end_of_turn>"}
END_TOKENS |= {"llama3": "<|eot_id|>", "gemma2": "<end_of_turn>"}
CLOSED_BY_EOS = {"glm4", "gemma2", "solar"}


def conversations(seed, count, has_flags=True):
    draw = random.Random(seed)

    def message(role):
        messages = draw.choice(["hi", "a longer one\nof two lines", "", " 日本 ", "x"]) + draw.choice(["", "!"])
        if not has_flags:
            return Message(role, messages or "y")
        return Message(role, messages or "y", draw.choice([None, None, True, False]), draw.choice([1.0, 1.0, 0.5, 2.0]))

    return [
        Example(
            tuple(message(role) for _ in range(draw.randint(1, 4)) for role in ("user", "assistant")),
            draw.choice(["", "Be brief."]), source="d.json", number=number,
        )
        for number in range(count)
    ]  # fmt: skip


def load(name, **options):
    tokenizer = byte_tokenizer(eos="<|im_end|>" if name == "own" else "</s>")
    tokenizer.chat_template = CHAT_TEMPLATE
    template = load_template(template_options(template=None if name == "own" else name, **options), tokenizer)
    configure_tokenizer(template, tokenizer)
    return template, tokenizer


def reference(turns, name, tokenizer, which, mask_history=False, train_on_prompt=False):
    """Return (label, weight) of each token."""
    end, eos = map(tokenizer.convert_tokens_to_ids, (END_TOKENS.get(name, "</s>"), "</s>"))
    closing = name in CLOSED_BY_EOS
    result, before = [], None
    for number, (prompt, response) in enumerate(turns):
        is_last = number == len(turns) - 1
        trains_prompt, answers = prompt.message.train, response.message.train
        trains_prompt = train_on_prompt if trains_prompt is None else trains_prompt
        trains_response = (is_last or not mask_history) if answers is None else answers
        for at, token in enumerate(prompt.ids):
            is_opening = at < prompt.begin
            is_trained = train_on_prompt if is_opening else trains_prompt
            if token == end and which != "turn":
                is_trained = (is_trained if is_opening else True) if which == "all" else False
            result.append((token if is_trained else IGNORE_INDEX, 1.0 if is_opening else prompt.message.weight))
        if closing and which in ("turn", "all"):
            is_trained_end = not is_last if mask_history else number > 0
            if before is not None and before.train is not None:
                is_trained_end = before.train or which == "all"
            if is_trained_end:
                result[-len(prompt.ids)] = (eos, before.weight if before else 1.0)
        end_position = max((at for at, token in enumerate(response.ids) if token == end), default=len(response.ids))
        for at, token in enumerate(response.ids):
            is_trained = trains_response and not (
                at >= end_position and (which == "none" or (which == "last" and not is_last))
            )
            is_trained = is_trained or (which == "all" and at == end_position)
            is_trained = is_trained and at < len(response.ids) - response.trailing
            result.append((token if is_trained else IGNORE_INDEX, response.message.weight))
        before = response.message
    if closing:
        is_trained = which == "all" or (which != "none" and before.train is not False)
        result.append((eos if is_trained else IGNORE_INDEX, before.weight))
    return result


def check(name, seed, has_flags, **options):
    template, tokenizer = load(name, **options)
    examples = conversations(seed, 12, has_flags)
    turns = template.form.turns(examples, DataStats())
    for example, result, row in zip(examples, turns, template.encode(examples, DataStats()), strict=True):
        which = options["train_on_eos"]
        rules = {key: value for key, value in options.items() if key != "train_on_eos"}
        expected = reference(result, name, tokenizer, which, **rules)
        if all(label == IGNORE_INDEX for label, _ in expected):
            assert row is None, example
            continue
        weights = row.get("loss_weights") or [1.0] * len(row["labels"])
        assert row["labels"] == [label for label, _ in expected], (example, options)
        trained_weights = [
            weight for weight, label in zip(weights, row["labels"], strict=True) if label != IGNORE_INDEX
        ]
        assert trained_weights == [weight for label, weight in expected if label != IGNORE_INDEX], (example, options)


@pytest.mark.sample(10)
@pytest.mark.parametrize("name", representative([*TEMPLATES, "own"], {"qwen", "llama3", "own"}))
@pytest.mark.parametrize("has_flags", [False, True], ids=["plain", "flags"])
def test_trained_tokens_match_plain_reference(name, has_flags):
    for seed, (which, rule) in enumerate(product(ENDS, RANGES)):
        if not (name in CLOSED_BY_EOS and rule.get("train_on_prompt")):
            check(name, seed, has_flags, train_on_eos=which, **rule)


@pytest.mark.parametrize("rule", [{}, {"mask_history": True}, {"train_on_prompt": True}], ids=str)
@pytest.mark.parametrize("which", ENDS)
def test_packed_rows_train_the_same_tokens_as_single_rows(which, rule):
    template, _ = load("qwen", train_on_eos=which, **rule)
    rows = [row for row in template.encode(conversations(7, 40), DataStats()) if row is not None]
    capacity = max(len(row["input_ids"]) for row in rows) + 50

    def sorted_rows(selected_rows):
        ones = [1.0] * capacity
        return sorted(
            (r["input_ids"], r["labels"], list(r.get("loss_weights") or ones[: len(r["labels"])]))
            for r in selected_rows
        )

    packs = pack(rows, capacity)
    assert len(packs) < len(rows)
    assert sorted_rows(row for packed in packs for row in sequences_of(packed)) == sorted_rows(rows)


def test_message_starting_with_a_stop_word_does_not_end_there():
    template, tokenizer = load("chatml", train_on_eos="all")  # <|im_start|> also stops generation
    row = template.encode([Example((Message("user", "a"), Message("assistant", "b", train=False)))], DataStats())[0]
    assert [tokenizer.decode(label) for label in row["labels"] if label != IGNORE_INDEX] == ["<|im_end|>"] * 2
