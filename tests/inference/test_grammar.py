"""Constrained generation: a model with random weights produces valid output."""

import json
from typing import Any

import pytest
from generation_runs import generate_responses

from burnish.config.errors import UserError
from burnish.inference.loading import load_for_inference
from burnish.inference.replies.replies import read_whole
from burnish.inference.scheduler import Scheduler
from burnish.inference.slots import SlotLimits
from burnish.inference.types import GenerationRequest, Sampling
from burnish.run.plan.plan import RunOptions
from small_run import make_model

pytest.importorskip("llguidance")

from burnish.inference.replies.grammar import Grammars

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "age": {"type": "integer", "minimum": 0, "maximum": 99},
                   "kind": {"enum": ["cat", "dog"]}},
    "required": ["name", "age", "kind"], "additionalProperties": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory):
    folder = make_model(tmp_path_factory.mktemp("model"))
    return load_for_inference(RunOptions(model_name_or_path=str(folder)))


@pytest.fixture(scope="module")
def grammars(loaded) -> Grammars:
    return Grammars(loaded.tokenizer, loaded.stop_ids, loaded.model.config.vocab_size)


def generate_texts(loaded, grammar_of, number: int = 4, max_new_tokens: int = 120) -> list[str]:
    """Return texts that the model generates at random under a grammar, one per seed."""
    loop = Scheduler(loaded.model, SlotLimits(number, 200))
    stops = frozenset(loaded.stop_ids)
    requests = [
        GenerationRequest(
            [5, 6], max_new_tokens, sampling=Sampling(temperature=1.5, seed=seed), stop_ids=stops, grammar=grammar_of()
        )
        for seed in range(number)
    ]
    return [
        read_whole(response.ids, loaded.form, loaded.tokenizer).content
        for response in generate_responses(loop, requests)
    ]


def test_response_matches_its_schema(loaded, grammars: Grammars) -> None:
    for text in generate_texts(loaded, lambda: grammars.json_schema(SCHEMA)):
        value = json.loads(text)
        assert set(value) == {"name", "age", "kind"}
        assert value["kind"] in ("cat", "dog")
        assert 0 <= value["age"] <= 99


def test_json_has_no_whitespace_except_after_colons_and_commas(loaded, grammars: Grammars) -> None:
    for text in generate_texts(loaded, lambda: grammars.json_schema(SCHEMA)):
        assert text == json.dumps(json.loads(text), ensure_ascii=False)


def test_required_tool_call_is_generated(loaded, grammars: Grammars) -> None:
    from burnish.data.chat.tools.tool_formats import TOOL_FORMATS

    offered = {"f": {"type": "object", "properties": {"n": {"type": "boolean"}}, "required": ["n"],
                     "additionalProperties": False}}  # fmt: skip
    for tool_format in ("qwen", "llama3", "minimax1"):
        for text in generate_texts(loaded, lambda f=tool_format: grammars.calls(f, offered, only_one=True)):
            (call,) = TOOL_FORMATS[tool_format].reader.read(text, offered)
            assert call.name == "f"
            assert isinstance(call.arguments["n"], bool)


def test_optional_tool_call_or_json_is_generated(loaded, grammars: Grammars) -> None:
    offered = {"f": {"type": "object", "properties": {"n": {"type": "boolean"}}, "required": ["n"]}}
    schema = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"], "additionalProperties": False}
    call = '<tool_call>\n{"name": "f", "arguments": {"n": true}}\n</tool_call>'
    for text, is_valid in ((call, True), ('{"a": 1}', True), ('{"a": 2}', False), ("Yes", False)):
        grammar = grammars.calls_or_json("qwen", offered, schema)
        ids = [*loaded.tokenizer(text, add_special_tokens=False)["input_ids"], loaded.stop_ids[0]]
        assert _is_accepted(grammar._matcher, ids) is is_valid
    with pytest.raises(UserError, match="tools cannot be combined with a JSON response with tool format"):
        grammars.calls_or_json("lfm2", offered, schema)
    with pytest.raises(UserError, match="not"):
        grammars.calls_or_json("qwen", offered, {"not": {"type": "string"}})


def test_grammar_starts_after_the_thought(loaded, grammars: Grammars) -> None:
    grammar = grammars.json_schema(SCHEMA, waits_for="</think>")
    from torch import zeros

    logits = zeros(loaded.model.config.vocab_size)
    for token in loaded.tokenizer("Hm.</think>", add_special_tokens=False)["input_ids"]:
        grammar.mask(logits)
        assert logits.isfinite().sum() == len(logits) - len(loaded.stop_ids)
        grammar.take(token)
    grammar.mask(logits)
    assert not logits.isfinite().all()


def test_unsupported_schema_is_rejected_with_library_message(grammars: Grammars) -> None:
    with pytest.raises(UserError, match="not"):
        grammars.json_schema({"not": {"type": "string"}})
    with pytest.raises(UserError, match="cannot be required"):
        grammars.calls("lfm2", {"f": {}})


@pytest.mark.parametrize(
    ("bounds", "is_valid"),
    [({"exclusiveMinimum": 0, "maximum": 0.25}, lambda x: 0 < x <= 0.25),
     ({"exclusiveMinimum": 0, "exclusiveMaximum": 1e-7}, lambda x: 0 < x < 1e-7),
     ({"exclusiveMinimum": 3, "maximum": 3.0000001}, lambda x: 3 < x <= 3.0000001),
     ({"minimum": -0.5, "exclusiveMaximum": 0}, lambda x: -0.5 <= x < 0),
     ({"exclusiveMinimum": 0, "exclusiveMaximum": 1}, lambda x: 0 < x < 1)],
)  # fmt: skip
def test_number_is_within_exclusive_bounds(grammars: Grammars, bounds, is_valid) -> None:
    """llguidance accepts 0 for an exclusive minimum of 0 if the maximum is below 1."""
    for schema in ({"type": "number", **bounds}, {"anyOf": [{"type": "number", **bounds}]}):
        for text in ("0", "3", "-0.0", "0.2", "3.00000005", "-0.2", "0.00000005", "0.5"):
            matcher = grammars.json_schema(schema)._matcher
            ids = grammars.tokenizer(text, add_special_tokens=False)["input_ids"]
            assert (matcher.validate_tokens(ids) == len(ids) and _is_accepted(matcher, ids)) <= is_valid(float(text)), (
                text
            )


def _is_accepted(matcher: Any, ids: list[int]) -> bool:
    matcher.consume_tokens(ids)
    return bool(matcher.is_accepting())


@pytest.mark.parametrize(
    "schema",
    [{"type": "integer", "minimum": 2**63}, {"exclusiveMinimum": 1e300}, {"type": "integer", "maximum": -(2**64)},
     {"type": "integer", "const": 10**20},
     {"items": {"enum": [1, -(10**400)]}}, {"properties": {"a": {"const": 1e22}}}],
    ids=str,
)  # fmt: skip
def test_number_beyond_64_bits_is_rejected(grammars: Grammars, schema) -> None:
    """llguidance would replace it by the nearest 64-bit integer."""
    with pytest.raises(UserError, match=r"does not fit into 64 bits"):
        grammars.json_schema(schema)
    with pytest.raises(UserError, match=r"does not fit into 64 bits"):
        grammars.calls("qwen", {"f": {"type": "object", "properties": {"x": schema}}})
    assert grammars.json_schema({"type": "integer", "minimum": 0, "maximum": 2**64 - 1})


EXPENSIVE_PATTERN = {"type": "string", "pattern": "^(.*a.{0,40}){40}$"}


@pytest.mark.parametrize("schema", [EXPENSIVE_PATTERN, {"const": "a</s>b"}, {"const": "a<|im_end|>b<unk>"}])
def test_response_with_failing_grammar_fails_or_matches(loaded, grammars: Grammars, schema) -> None:
    loop = Scheduler(loaded.model, SlotLimits(4, 500))
    stops = frozenset(loaded.stop_ids)
    bias = dict.fromkeys(loaded.tokenizer("a", add_special_tokens=False)["input_ids"], 9.0)
    requests = [
        GenerationRequest([5, 6], 300, sampling=Sampling(temperature=1.5, seed=seed, bias=bias), stop_ids=stops,
            grammar=grammars.json_schema(schema))
        for seed in range(4)
    ]  # fmt: skip
    result = generate_responses(loop, requests)
    assert schema is not EXPENSIVE_PATTERN or "failed" in [response.reason for response in result]
    for response in result:
        if response.reason == "stop":
            text = read_whole(response.ids, loaded.form, loaded.tokenizer, stop_ids=stops).content
            assert json.loads(text) == schema.get("const", json.loads(text))
        elif response.reason == "failed":
            assert response.error.code == "grammar_failed"


@pytest.mark.parametrize(
    "schema", [{"$ref": "#"}, {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}]
)
def test_circular_schema_is_rejected_before_generation(grammars: Grammars, schema) -> None:
    with pytest.raises(UserError, match="is not supported"):
        grammars.json_schema(schema)


def test_thought_before_grammar_cannot_end_the_response(loaded, grammars: Grammars) -> None:
    from torch import zeros

    grammar, logits = grammars.json_schema(SCHEMA, waits_for="</think>"), zeros(loaded.model.config.vocab_size)
    grammar.mask(logits)
    assert {i for i, value in enumerate(logits.tolist()) if value != 0} == set(loaded.stop_ids)


def test_unsupported_tokenizer_is_rejected() -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    model = Tokenizer(WordLevel({"<unk>": 0, "</s>": 1, "a": 2}, unk_token="<unk>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=model, unk_token="<unk>", eos_token="</s>")
    with pytest.raises(UserError, match="does not support this tokenizer"):
        Grammars(tokenizer, [1], 3)
