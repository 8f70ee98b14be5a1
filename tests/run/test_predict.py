"""Predictions: equal in batches and alone, in dataset order, with named metrics."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from burnish.config.errors import UserError
from burnish.config.options import RawValue
from burnish.data.chat.choose import configure_tokenizer, load_template
from burnish.data.sets.sources import load_datasets
from burnish.data.stats import DataStats
from burnish.inference.batch import generate_all
from burnish.loop.types import Example, Message
from burnish.losses.base import check_stage
from burnish.models.generate import GenerationOptions, check_generation, generate, generation_config, generation_notes
from burnish.parallel.create import create_parallel
from burnish.run.build import build_loop
from burnish.run.partial_results import PartialResults
from burnish.run.plan.options import RunOptions
from burnish.run.plan.plan import plan
from burnish.run.predictions import answers as answers_module
from burnish.run.predictions.answers import answer_all, bare_model
from burnish.run.predictions.files import write_answers
from burnish.run.predictions.predict import _scores, predict_all
from burnish.run.predictions.questions import Question, questions_of
from burnish.run.prepare import prepare
from burnish.run.response_metrics import METRICS, check_metrics, compute_metrics, metric_notes
from small_run import make_workspace
from template_cases import byte_tokenizer, template_options

pytestmark = pytest.mark.run


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("BURNISH_CACHE", str(tmp_path / "cache"))


def run_of(tmp_path, **options):
    options = make_workspace(
        tmp_path, do_predict=True, template="qwen", max_new_tokens=6,
        **{"val_size": 6, "do_sample": False, "do_train": False, "predict_metrics": "exact_match",
           "per_device_eval_batch_size": 4, **options},
    )  # fmt: skip
    made = plan({name: RawValue(value, "the command line") for name, value in options.items()})
    prepared = prepare(made)
    (tmp_path / "out").mkdir()
    return made, prepared, build_loop(made, prepared, create_parallel(made.options), None)


def lines(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_records_are_answered_in_dataset_order(tmp_path):
    made, prepared, run = run_of(tmp_path, predict_with_generate=True)
    metrics = predict_all(run, prepared, made)
    rows = lines(tmp_path / "out" / "generated_predictions.jsonl")
    assert len(rows) == 6
    for row, encoded in zip(rows, prepared.eval_rows[""], strict=True):
        learned = [i for i, label in zip(encoded["input_ids"], encoded["labels"], strict=True) if label != -100]
        assert row["prompt"].endswith("<|im_start|>assistant\n")
        assert row["label"] == prepared.tokenizer.decode(learned, skip_special_tokens=True).strip()
    assert metrics["predict_exact_match"] == 0.0
    written = json.loads((tmp_path / "out" / "predict_results.json").read_text())
    assert {"predict_exact_match", "predict_runtime", "predict_samples_per_second"} <= written.keys()


def test_each_evaluation_set_has_its_own_file_whatever_its_name(tmp_path):
    info = {}
    for number, name in enumerate(("a/b", "a_b", "a%2Fb")):
        records = [{"instruction": "Repeat: red", "output": f"red {number}"}]
        (tmp_path / f"{number}.json").write_text(json.dumps(records))
        info[name] = {"file_name": f"{number}.json"}
    (tmp_path / "dataset_info.json").write_text(json.dumps(info))
    sets = {"dataset": None, "dataset_dir": str(tmp_path), "eval_dataset": ",".join(info), "val_size": 0}
    made, prepared, run = run_of(tmp_path, predict_with_generate=True, eval_on_each_dataset=True, **sets)
    predict_all(run, prepared, made)
    found = [f"generated_predictions_{name}.jsonl" for name in ("a%2Fb", "a_b", "a%252Fb")]
    assert [lines(tmp_path / "out" / file)[0]["label"] for file in found] == ["red 0", "red 1", "red 2"]


def test_several_responses_are_sampled_with_their_log_probabilities(tmp_path):
    drawn = {"predict_with_generate": True, "do_sample": True, "temperature": 1.0, "top_p": 1.0, "top_k": 0}
    made, prepared, run = run_of(tmp_path / "one", **drawn)
    predict_all(run, prepared, made)
    alone = lines(tmp_path / "one" / "out" / "generated_predictions.jsonl")
    made, prepared, run = run_of(tmp_path / "three", **drawn, samples=3)
    metrics = predict_all(run, prepared, made)
    rows = lines(tmp_path / "three" / "out" / "generated_predictions.jsonl")
    assert [row["predict"] for row in rows] == [row["predict"] for row in alone]
    assert all(len(row["samples"]) == 3 and row["samples"][0]["text"] == row["predict"] for row in rows)
    assert len({sample["text"] for row in rows for sample in row["samples"]}) > 12
    assert all(sample["logprob"] < 0 for row in rows for sample in row["samples"])
    assert metrics["predict_exact_match_standard_error"] == 0.0


def test_standard_error_of_several_responses_is_over_questions(tmp_path):
    options = RunOptions(predict_metrics=["exact_match"], samples=2)
    result = _scores(["a", "b", "x", "b"], ["a", "b"], options)  # "a" is right once in two, "b" twice
    assert result == {"exact_match": 0.75, "exact_match_standard_error": pytest.approx(0.25)}


@pytest.mark.parametrize("options", [{"do_sample": False}, {"num_beams": 2}, {"temperature": 0.0}])
def test_several_greedy_responses_are_rejected(options):
    (problem,) = check_generation(RunOptions(samples=4, **options))
    assert '"samples" 4' in problem.what


def test_prediction_without_generation_reports_loss(tmp_path):
    made, prepared, run = run_of(tmp_path)
    assert predict_all(run, prepared, made)["predict_loss"] > 0
    assert not (tmp_path / "out" / "generated_predictions.jsonl").exists()


@pytest.mark.parametrize("method", ["full", "lora"])
def test_prediction_only_run_loads_weights_in_compute_dtype(method, tmp_path):
    formats = {}
    for trains in (False, True):
        _, _, run = run_of(tmp_path / str(trains), bf16=True, finetuning_type=method, do_train=trains)
        formats[trains] = {weight.dtype for weight in run.model.parameters() if weight.requires_grad}
    assert formats == {False: {torch.bfloat16}, True: {torch.float32}}


def test_prediction_loss_matches_training_run_up_to_rounding(tmp_path):
    losses = []
    for trains in (False, True):
        made, prepared, run = run_of(tmp_path / str(trains), bf16=True, do_train=trains)
        losses.append(predict_all(run, prepared, made)["predict_loss"])
    assert losses[0] == pytest.approx(losses[1], rel=2**-8)


def test_batched_responses_match_single_prompts(tmp_path):
    _, prepared, run = run_of(tmp_path)
    model = run.parts["model"].held.model.eval()
    options = GenerationOptions(do_sample=False, max_new_tokens=8)
    config = generation_config(model, prepared.tokenizer, prepared.template.stop_token_ids(), options)
    prompts = [row["input_ids"][:length] for row, length in zip(prepared.eval_rows[""], (9, 17, 12), strict=False)]
    together = generate(model, prompts, config)
    assert together == [generate(model, [prompt], config)[0] for prompt in prompts]
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    ids = torch.tensor([prompts[0]])
    for token in together[0]:
        assert plain(ids).logits[0, -1].argmax() == token
        ids = torch.cat([ids, torch.tensor([[token]])], dim=1)


@pytest.mark.sample(3)
@pytest.mark.parametrize("size", [1, 2, 6])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_responses_do_not_depend_on_batch_size_or_cache(size, cache, tmp_path):
    # float32, because with 16 bits padding changes rounding, and two nearly equally likely tokens may swap.
    made, prepared, run = run_of(
        tmp_path, predict_with_generate=True, cache_implementation=cache, per_device_eval_batch_size=size
    )
    model, stops = bare_model(run), prepared.template.stop_token_ids()
    examples = load_datasets(made.options, made.options.seed, DataStats()).eval[""]
    questions = questions_of(examples, prepared.template, stops)
    config = generation_config(model, prepared.tokenizer, stops, made.options)
    together = answer_all(run, questions, config, made.options)
    plain = generation_config(model, prepared.tokenizer, stops, replace(made.options, cache_implementation="dynamic"))
    assert together == [generate(model, [question.prompt], plain)[0] for question in questions]
    assert any(together)


def test_prompts_are_tokenized_in_batches():
    template = load_template(template_options(template="qwen"), byte_tokenizer())
    batches, encode_arrays = [], template.encode_arrays

    def counted(examples, stats, truncate=True):
        batches.append(len(examples))
        return encode_arrays(examples, stats, truncate)

    template.encode_arrays = counted
    turns = (Message("user", "q"), Message("assistant", "a"))
    examples = [Example(messages=turns, source="a.json", number=number) for number in range(1, 2101)]
    assert len(questions_of(examples, template, template.stop_token_ids())) == 2100
    assert batches == [1000, 1000, 100]


def test_log_probabilities_of_tokens_are_not_kept(tmp_path, monkeypatch):
    made, prepared, run = run_of(tmp_path, predict_with_generate=True)
    options = replace(made.options, samples=2, do_sample=True, max_new_tokens=3)
    config = generation_config(bare_model(run), prepared.tokenizer, [], options)
    returned = []
    monkeypatch.setattr(answers_module, "generate_all", lambda *given: returned.extend(generate_all(*given)))
    likelihoods = {}
    answers = answer_all(run, [Question([5, 6], None)] * 2, config, options, likelihoods=likelihoods)
    assert all(answers)
    assert set(likelihoods) == {0, 1}
    assert [one.logprobs for one in returned] == [[], []]


def test_interrupted_prediction_continues_with_remaining_records(tmp_path, monkeypatch):
    made, prepared, run = run_of(tmp_path, predict_with_generate=True)
    made = replace(made, options=replace(made.options, do_sample=True, temperature=1.5))
    model, stops = bare_model(run), prepared.template.stop_token_ids()
    questions = questions_of(
        load_datasets(made.options, made.options.seed, DataStats()).eval[""], prepared.template, stops
    )
    config = generation_config(model, prepared.tokenizer, stops, made.options)
    whole, partial = answer_all(run, questions, config, made.options), tmp_path / "answers.partial.jsonl"
    num_requests = []

    def interrupted(scheduler, requests, *callbacks):
        num_requests.append(len(requests))
        if len(num_requests) > 1:
            return generate_all(scheduler, requests, *callbacks)
        generate_all(scheduler, requests[:2], *callbacks)
        raise KeyboardInterrupt

    monkeypatch.setattr(answers_module, "generate_all", interrupted)
    with pytest.raises(KeyboardInterrupt):
        answer_all(run, questions, config, made.options, partial)
    with partial.open("a") as file:
        file.write('{"index": 3, "id')  # truncated while it was written
    assert answer_all(run, questions, config, made.options, partial) == whole
    assert num_requests == [6, 4]
    assert len(lines(partial)) == 1 + 6  # kept until the responses are in another file


def test_responses_of_another_model_are_not_continued(tmp_path, monkeypatch):
    made, _, run = run_of(tmp_path, predict_with_generate=True)
    numbers, generate_all = [], answers_module.generate_all

    def counting(scheduler, requests, *more):
        numbers.append(len(requests))
        return generate_all(scheduler, requests, *more)

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(answers_module, "generate_all", counting)
    weights = load_file(tmp_path / "model" / "model.safetensors")
    for _ in range(2):
        with monkeypatch.context() as patched:
            patched.setattr("burnish.run.predictions.files.write_text_atomically", full)
            with pytest.raises(OSError, match="No space"):
                predict_all(run, prepare(made), made)
    save_file({name: tensor + 0.1 for name, tensor in weights.items()}, tmp_path / "model" / "model.safetensors")
    predict_all(run, prepare(made), made)
    assert numbers == [6, 0, 6]


def test_responses_are_kept_until_they_are_written(tmp_path, monkeypatch):
    made, prepared, run = run_of(tmp_path, predict_with_generate=True)
    partial, result = (tmp_path / "out" / f"generated_predictions{name}.jsonl" for name in (".partial", ""))
    result.write_text("of an earlier model\n")

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    for place in (
        "burnish.run.predictions.predict.compute_metrics",
        "burnish.run.predictions.files.write_text_atomically",
    ):
        with monkeypatch.context() as patched:
            patched.setattr(place, full)
            with pytest.raises(OSError, match="No space"):
                predict_all(run, prepared, made)
        assert len(lines(partial)) == 1 + 6
        assert result.read_text() == "of an earlier model\n"
    monkeypatch.setattr(answers_module, "generate_all", lambda scheduler, requests, *more: full() if requests else [])
    predict_all(run, prepared, made)
    assert len(lines(result)) == 6
    assert not partial.exists()


def interrupted(*args, **kwargs):
    raise KeyboardInterrupt


def test_restarted_prediction_does_not_lose_finished_responses(tmp_path, monkeypatch):
    partial = tmp_path / "answers.partial.jsonl"
    with PartialResults(partial, "key") as finished:
        finished.add(0, {"ids": [5, 6], "logprob": -0.5})
    before = partial.read_bytes()
    monkeypatch.setattr("burnish.report.results.os.replace", interrupted)
    with pytest.raises(KeyboardInterrupt), PartialResults(partial, "key"):
        pass
    assert partial.read_bytes() == before


def test_error_while_responses_are_written_keeps_the_earlier_file(tmp_path):
    path = tmp_path / "generated_predictions.jsonl"
    write_answers(path, ["a"], ["b"], ["c"])
    before = path.read_bytes()
    with pytest.raises(TypeError):
        write_answers(path, ["a", "a"], ["d", object()], ["c", "c"])
    assert path.read_bytes() == before


def test_responses_of_another_model_are_not_reused(tmp_path):
    made, prepared, run = run_of(tmp_path, predict_with_generate=True)
    questions = [Question([5, 6], [])]
    config = generation_config(bare_model(run), prepared.tokenizer, [319], made.options)
    partial = tmp_path / "answers.partial.jsonl"
    partial.write_text('{"of": "another"}\n{"index": 0, "ids": [9]}\n')
    assert answer_all(run, questions, config, made.options, partial) != [[9]]


@pytest.mark.parametrize("num_beams", [1, 2])
def test_static_cache_supports_keys_and_values_of_different_dtypes(tmp_path, num_beams):
    # Under autocast the weights stay float32: rotary positions raise keys to it, and values stay in 16 bits.
    made, prepared, run = run_of(
        tmp_path, predict_with_generate=True, cache_implementation="static", bf16=True, num_beams=num_beams
    )
    model, stops = bare_model(run), prepared.template.stop_token_ids()
    questions = questions_of(
        load_datasets(made.options, made.options.seed, DataStats()).eval[""], prepared.template, stops
    )
    answers = {}
    for cache in ("static", "dynamic"):
        options = replace(made.options, cache_implementation=cache)
        config = generation_config(model, prepared.tokenizer, stops, options)
        answers[cache] = answer_all(run, questions, config, options)
    assert any(answers["static"])
    # Not all: two tokens may be nearly equally likely, and keys are rounded to 16 bits in one of the runs.
    same = [a == b for a, b in zip(answers["static"], answers["dynamic"], strict=True)]
    assert sum(same) >= len(same) / 2


def test_response_ends_before_stop_token(tmp_path):
    _, prepared, run = run_of(tmp_path)
    model, prompt = run.parts["model"].held.model.eval(), prepared.eval_rows[""][0]["input_ids"][:9]
    options = GenerationOptions(do_sample=False, max_new_tokens=8)
    (whole,) = generate(model, [prompt], generation_config(model, prepared.tokenizer, [319], options))
    stop = whole[3]
    (cut,) = generate(model, [prompt], generation_config(model, prepared.tokenizer, [stop], options))
    assert cut == whole[: whole.index(stop)]


def test_response_stays_within_context_length(tmp_path, capsys):
    made, prepared, run = run_of(tmp_path, predict_with_generate=True)
    run.parts["model"].held.model.config.max_position_embeddings = 10  # shorter than every prompt
    metrics = predict_all(run, prepared, made)
    assert {row["predict"] for row in lines(tmp_path / "out" / "generated_predictions.jsonl")} == {""}
    assert "predict_exact_match" not in metrics
    assert "6 of 6 prompts leave no room for a response" in capsys.readouterr().out


@pytest.mark.parametrize("overrides", [{"max_new_tokens": 0, "max_length": 36}, {"max_new_tokens": 30}])
def test_response_length_depends_on_its_prompt_only(tmp_path, overrides):
    _, prepared, run = run_of(tmp_path)
    model = run.parts["model"].held.model.eval()
    options = GenerationOptions(do_sample=False, **overrides)
    config = generation_config(model, prepared.tokenizer, [319], options)
    prompts = [row["input_ids"][:length] for row, length in zip(prepared.eval_rows[""], (9, 17, 36), strict=False)]
    prompts[2] = (prompts[1] * 4)[:36]
    together = generate(model, prompts, config, context=40)
    assert together == [generate(model, [prompt], config, context=40)[0] for prompt in prompts]
    most = [27, 19, 0] if "max_length" in overrides else [30, 23, 4]
    assert [len(answer) for answer in together] == most


def test_options_reach_generation(tmp_path):
    _, prepared, run = run_of(tmp_path)
    model, tokenizer = run.parts["model"].held.model, prepared.tokenizer
    options = GenerationOptions(
        temperature=0.5, top_p=0.9, top_k=7, max_new_tokens=0, max_length=99, repetition_penalty=1.2
    )
    config = generation_config(model, tokenizer, [2, 5], options)
    assert (config.temperature, config.top_p, config.top_k, config.do_sample) == (0.5, 0.9, 7, True)
    assert (config.max_new_tokens, config.max_length, config.repetition_penalty) == (None, 99, 1.2)
    assert config.eos_token_id == [2, 5]
    assert model.generation_config.eos_token_id != [2, 5]  # the model's config is unchanged


def test_last_response_of_a_conversation_is_generated(tmp_path):
    _, prepared, _ = run_of(tmp_path)
    turns = [("user", "red"), ("assistant", "green"), ("user", "blue"), ("assistant", "stone")]
    example = Example(messages=tuple(Message(*turn) for turn in turns))
    (question,) = questions_of([example], prepared.template, prepared.template.stop_token_ids())
    assert prepared.tokenizer.decode(question.label) == "stone"
    assert prepared.tokenizer.decode(question.prompt).endswith("blue<|im_end|>\n<|im_start|>assistant\n")
    assert prepared.template.encode([example], DataStats())[0]["input_ids"][: len(question.prompt)] == question.prompt


def test_reference_does_not_depend_on_cutoff_len():
    """Neither for longer prompts nor for responses that would be truncated in training."""
    tokenizer, prompts = byte_tokenizer(), []
    for cutoff_len in (2000, 200):
        template = load_template(template_options(template="qwen3", cutoff_len=cutoff_len), tokenizer)
        configure_tokenizer(template, tokenizer)
        for prompt, response in (("word " * 60, "c"), ("q", "word " * 60)):
            example = Example(messages=(Message("user", prompt), Message("assistant", response)))
            (question,) = questions_of([example], template, template.stop_token_ids())
            assert tokenizer.decode(question.label) == f"<think>\n\n</think>\n\n{response}"
            prompts.append(question.prompt)
    assert prompts[:2] == prompts[2:]


@pytest.mark.parametrize("train_on_prompt", [False, True])
def test_prompt_completion_record_is_prompted_without_template(tmp_path, train_on_prompt):
    _, prepared, _ = run_of(tmp_path, train_on_prompt=train_on_prompt)
    examples = [Example(prompt="red green", completion=" blue"), Example(text="no question")]
    (question,) = questions_of(examples, prepared.template, prepared.template.stop_token_ids())
    assert prepared.tokenizer.decode(question.prompt) == "red green"
    assert prepared.tokenizer.decode(question.label) == " blue"


# --- metrics ----------------------------------------------------------------------------------------------------------


def test_exact_match_is_a_fraction_and_ignores_surrounding_whitespace():
    assert METRICS["exact_match"](["a ", "b", "c"], ["a", "b\n", "d"]) == {"exact_match": pytest.approx(2 / 3)}


def test_custom_metric_is_selected_by_name(monkeypatch):
    monkeypatch.setattr(METRICS, "_members", dict(METRICS._members))

    @METRICS.register("length")
    def length(predictions, labels):
        return {"length": sum(map(len, predictions)) / len(predictions)}

    options = SimpleNamespace(predict_metrics=["exact_match", "length"])
    assert compute_metrics(["ab", "abcd"], ["ab", "x"], options) == {"exact_match": 0.5, "length": 3.0}


def test_bleu_matches_library_on_characters():
    bleu_score = pytest.importorskip("nltk.translate.bleu_score")
    pairs = [("red green blue", "red green stone"), ("", "x"), ("四个石头", "四个河流")]
    smooth = bleu_score.SmoothingFunction().method3
    expected = [bleu_score.sentence_bleu([list(b)], list(a), smoothing_function=smooth) if a else 0.0 for a, b in pairs]
    assert METRICS["bleu-4"](*zip(*pairs, strict=True)) == {"bleu-4": pytest.approx(100 * sum(expected) / 3)}


def test_rouge_counts_unigrams_bigrams_and_longest_sequences():
    pytest.importorskip("jieba")
    pytest.importorskip("rouge_chinese")
    result = METRICS["rouge"](["red green blue", ""], ["red green stone", "x"])
    # Two of three words, one of two bigrams, and a longest sequence of two are shared; the second response is empty.
    assert result == pytest.approx({"rouge-1": 100 / 3, "rouge-2": 25, "rouge-l": 100 / 3}, abs=0.1)


def test_missing_metric_library_is_reported_before_the_run(monkeypatch):
    monkeypatch.setattr("burnish.run.response_metrics.find_spec", lambda name: None)
    options = SimpleNamespace(predict_with_generate=True, do_predict=True, predict_metrics=["exact_match", "bleu-4"])
    (problem,) = check_metrics(options)
    assert "nltk" in problem.what
    assert "burnish[metrics]" in problem.remedy
    assert "exact_match" in problem.remedy
    assert not check_metrics(SimpleNamespace(**{**vars(options), "do_predict": False}))


def test_default_metrics_are_computed_as_far_as_their_libraries_are_installed(monkeypatch):
    monkeypatch.setattr("burnish.run.response_metrics.find_spec", lambda name: None)
    options = RunOptions(predict_with_generate=True, do_predict=True)
    assert not check_metrics(options)
    assert next(metric_notes(options)).startswith(
        "Metrics that require libraries that are not installed (nltk, jieba, rouge_chinese): bleu-4, rouge."
    )
    assert compute_metrics(["a", "b"], ["a", "c"], options) == {"exact_match": 0.5}


def test_unknown_metric_is_rejected_with_nearest_name(tmp_path):
    with pytest.raises(UserError, match='"exact_match"'):
        run_of(tmp_path, predict_with_generate=True, predict_metrics="exact_mach")


def test_generation_without_prompts_or_do_predict_is_reported():
    options = SimpleNamespace(predict_with_generate=True, stage="pt", do_predict=False, max_length=1024, samples=1)
    assert "stage: pt" in next(check_stage(options)).what
    assert "do_predict" in next(generation_notes(options))


def test_max_length_is_not_interpreted_as_cutoff_len():
    options = {"model_name_or_path": "m", "dataset": "d", "output_dir": "out", "max_length": 99}
    made = plan({name: RawValue(value, "run.yaml") for name, value in options.items()})
    assert (made.options.max_length, made.options.cutoff_len) == (99, 2048)
    assert "cutoff_len" in " ".join(made.notes)


def test_presence_penalty_is_not_interpreted_as_repetition_penalty(tmp_path):
    options = {**make_workspace(tmp_path), "presence_penalty": 0.5}
    with pytest.raises(UserError, match='"presence_penalty"'):
        plan({name: RawValue(value, "the command line") for name, value in options.items()})


@pytest.mark.parametrize(("name", "value"), [("infer_backend", "vllm"), ("infer_url", "http://127.0.0.1:8000")])
def test_dataset_prediction_with_another_engine_is_rejected(name, value, tmp_path):
    with pytest.raises(UserError, match=f'"{name}" is not supported for predictions on a dataset'):
        run_of(tmp_path, predict_with_generate=True, **{name: value})


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("num_empty", "records"),
    [
        (1, [{"instruction": "Say hi", "output": "hi"}, {"instruction": "Say yes", "output": " "}]),
        (2, [{"instruction": "Say hi", "output": ""}, {"instruction": "Say yes", "output": ""}]),
        (1, [{"messages": [{"role": "user", "content": say}, {"role": "assistant", "content": text}]}
             for say, text in (("Say hi", ""), ("Say yes", "yes"))]),
        (1, [{"prompt": "Say hi", "completion": ""}, {"prompt": "Say yes", "completion": "yes"}]),
    ],
    ids=["some", "all", "messages", "completion"],
)  # fmt: skip
@pytest.mark.parametrize("records_of", ["", "any"], ids=["do_predict", "predict"])
def test_prompt_whose_response_is_empty_is_answered_and_not_scored(num_empty, records, records_of, tmp_path, capsys):
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    options = {"predict_with_generate": True, "dataset": None, "val_size": 0, "eval_dataset": str(file)}
    made, prepared, run = run_of(tmp_path, **options)
    metrics = predict_all(run, prepared, replace(made, records_of=records_of))
    rows = lines(tmp_path / "out" / "generated_predictions.jsonl")
    assert ["Say hi" in row["prompt"] for row in rows] == [True, False]
    assert [row["label"] for row in rows].count("") == num_empty
    assert f"{num_empty} of 2 records ha" in capsys.readouterr().out
    assert ("predict_exact_match" in metrics) == (num_empty < 2)


@pytest.mark.parametrize("longest", [60, 300], ids=["prompt beyond cutoff_len", "prompt beyond the context"])
def test_prompt_longer_than_cutoff_len_is_neither_shortened_nor_dropped_nor_reported_as_such(longest, tmp_path, capsys):
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps({"instruction": "ab " * longest, "output": "hi"}) + "\n")
    options = {"predict_with_generate": True, "dataset": None, "val_size": 0, "eval_dataset": str(file)}
    made, prepared, run = run_of(tmp_path, **options, cutoff_len=16)
    assert prepared.stats.sentences() == []
    predict_all(run, prepared, made)
    (row,) = lines(tmp_path / "out" / "generated_predictions.jsonl")
    assert "ab " * longest in row["prompt"]
    assert row["label"] == "hi"


def test_infer_dtype_is_reported_without_effect_on_a_run():
    here = "run.yaml, line 3"
    values = {"model_name_or_path": "m", "dataset": "d", "output_dir": "o", "infer_dtype": "float32"}
    made = plan({name: RawValue(value, here) for name, value in values.items()})
    assert any(note.startswith('"infer_dtype" has no effect on training, evaluation and') for note in made.notes)
