"""Reward models as reward functions: a value head, a classifier, a server."""

import json
import math
import re
import shutil
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from urllib.parse import unquote

import pytest
import torch
from datasets import Dataset
from golden_steps import make_models
from safetensors.torch import load_file, save_file
from test_rollout_runs import train, user
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from burnish import GRPOConfig, GRPOTrainer
from burnish.config.errors import UserError
from burnish.config.options import RawValue
from burnish.data.chat.rendering import limit_rendering
from burnish.explain.explain import explain
from burnish.models.options import ModelOptions
from burnish.models.reward_files import WEIGHT, read_head
from burnish.rollouts.rewards.models import RewardModel, RewardServer, reward_model_of
from burnish.run import build
from burnish.run.build import train_run
from burnish.run.plan.plan import plan
from burnish.trainer.trl.sft import setup
from run_outputs import history

PROMPTS, ANSWERS = ["What is it?", "And now, what is it then?", "Hm"], [" A stone.", " No.", " It is what it is."]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return make_models(tmp_path_factory.mktemp("models"))


def copy_model(model, folder, template=None):
    """Copy a model and replace its chat template. Default: no template."""
    shutil.copytree(model, folder)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder


def scores_one_by_one(model, tokenizer, head):
    """Return the score of each text, computed one by one."""
    result = []
    for prompt, answer in zip(PROMPTS, ANSWERS, strict=True):
        ids = torch.tensor([tokenizer(prompt + answer, add_special_tokens=False)["input_ids"]])
        with torch.no_grad():
            result.append(float(head(model.base_model(ids)[0][0, -1])))
    return result


def test_stage_rm_folder_and_classifier_score_the_last_token(models):
    value_head = reward_model_of(str(models / "policy_vhead"))
    weights = load_file(models / "policy_vhead" / "value_head.safetensors")
    expected = scores_one_by_one(
        value_head.model, value_head.tokenizer, lambda h: h @ weights["v_head.summary.weight"][0]
    )
    assert value_head(PROMPTS, ANSWERS) == pytest.approx(expected, abs=1e-5)
    classifier = reward_model_of(str(models / "scorer"))
    expected = scores_one_by_one(classifier.model, classifier.tokenizer, classifier.model.score)
    assert classifier(PROMPTS, ANSWERS) == pytest.approx(expected, abs=1e-5)
    assert classifier.__name__ == "scorer"


def test_texts_and_conversations_are_scored_in_python(models, tmp_path):
    from burnish import RewardModel

    folder = copy_model(models / "policy_vhead", tmp_path / "m", "{% for m in messages %}{{ m.content }} {% endfor %}")
    model = RewardModel.from_pretrained(folder)
    texts = [f"{prompt} {answer} " for prompt, answer in zip(PROMPTS, ANSWERS, strict=True)]
    chats = [
        [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
        for prompt, answer in zip(PROMPTS, ANSWERS, strict=True)
    ]
    expected = model([""] * len(texts), texts)
    assert model.score(texts) == pytest.approx(expected)
    assert model.score([chats[0], *texts[1:]]) == pytest.approx(expected)
    assert model.score(chats) == pytest.approx(expected)
    assert model.score([]) == []


@pytest.mark.parametrize(
    ("conversations", "error", "message"),
    [
        ("a text", TypeError, "must be a list of texts or of lists of messages. Received: 'a text'"),
        ([{"role": "user", "content": "a"}], TypeError, "as entry 0"),
        (["a", 3], TypeError, "Received: 3 as entry 1"),
        (["a", []], UserError, "Entry 1 of `conversations` is empty"),
        (["", "a"], UserError, "Entry 0 of `conversations` is empty"),
    ],
)
def test_other_values_are_not_scored(models, conversations, error, message):
    with pytest.raises(error, match=re.escape(message)):
        reward_model_of(str(models / "policy_vhead")).score(conversations)


def test_adapter_of_stage_rm_is_a_reward_model_with_its_base(models, tmp_path):
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    base = str(models / "policy")
    adapter = get_peft_model(
        AutoModelForCausalLM.from_pretrained(base), LoraConfig(init_lora_weights=False, target_modules="all-linear")
    )
    adapter.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(base).save_pretrained(tmp_path)
    shutil.copy(models / "policy_vhead" / "value_head.safetensors", tmp_path)
    scores = reward_model_of(str(tmp_path))(PROMPTS, ANSWERS)
    assert scores == pytest.approx(reward_model_of(base, [str(tmp_path)])(PROMPTS, ANSWERS))
    assert scores != pytest.approx(reward_model_of(str(models / "policy_vhead"))(PROMPTS, ANSWERS), abs=1e-3)
    raw = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps({**raw, "base_model_name_or_path": None}))
    with pytest.raises(UserError, match="does not name its base model"):
        reward_model_of(str(tmp_path))


def test_folder_without_head_is_not_a_reward_model(models):
    with pytest.raises(UserError, match="it is not a reward model"):
        reward_model_of(str(models / "policy"))


@pytest.mark.parametrize("name", ["policy_vhead", "scorer"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda weights, key: weights.pop(key), "the weights have no .*q_proj"),
        (lambda weights, key: weights.update({key: torch.zeros(3, 3)}), "q_proj.* is 3x3 in the weights"),
    ],
)
def test_weights_that_do_not_fit_a_reward_model_are_reported(models, tmp_path, name, change, message):
    """transformers would initialize a missing weight randomly, so every process would compute other scores."""
    file = copy_model(models / name, tmp_path / "model") / "model.safetensors"
    weights = load_file(file)
    change(weights, next(key for key in weights if "q_proj" in key))
    save_file(weights, file, {"format": "pt"})
    with pytest.raises(UserError, match=message):
        reward_model_of(str(file.parent))


def test_pickled_weights_of_a_reward_model_are_rejected(models, tmp_path):
    folder = copy_model(models / "policy_vhead", tmp_path / "model")
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(UserError, match="safetensors"):
        reward_model_of(str(folder))
    options = {**user(tmp_path), "reward_model": str(folder)}
    with pytest.raises(UserError, match="pickle"):
        explain(plan({key: RawValue(value, "test") for key, value in options.items()}))


@pytest.mark.parametrize("content", [[1], torch.ones(2), {WEIGHT: 5}])
def test_damaged_value_head_is_reported(tmp_path, content):
    torch.save(content, tmp_path / "value_head.bin")
    with pytest.raises(UserError, match=r"value_head\.bin: it has no v_head\.summary\.weight"):
        read_head([tmp_path])


@pytest.mark.parametrize("metadata", [{"reward_head": "own"}, {"reward_head": "own", "width": "x"}])
def test_value_head_without_its_width_is_reported(tmp_path, metadata):
    save_file({WEIGHT: torch.ones(1, 3)}, tmp_path / "value_head.safetensors", metadata)
    with pytest.raises(UserError, match="width"):
        read_head([tmp_path])


def test_score_head_is_not_read_outside_of_the_model(tmp_path):
    save_file({"score.weight": torch.ones(1, 3)}, tmp_path / "other.safetensors")
    (tmp_path / "model").mkdir()
    index = {"weight_map": {"score.weight": "../other.safetensors"}}
    (tmp_path / "model" / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match="outside of its folder"):
        read_head([tmp_path / "model"])


def hub_cache(folder, names):
    """Create a hub cache with copies of folders under the ids ``org/<name>``."""
    for name, source in names.items():
        kept = folder / f"models--org--{name}"
        shutil.copytree(source, kept / "snapshots" / "abc")
        (kept / "refs").mkdir()
        (kept / "refs" / "main").write_text("abc")
    return ModelOptions(cache_dir=str(folder))


def test_model_of_the_hub_is_scored_with_its_own_head(models, tmp_path):
    """transformers adds a random head to a model without one, and does not know value heads."""
    names = ("policy", "policy_vhead", "scorer")
    options = hub_cache(tmp_path, {name: models / name for name in names})
    for name in names[1:]:
        scores = reward_model_of(f"org/{name}", options=options)(PROMPTS, ANSWERS)
        assert scores == pytest.approx(reward_model_of(str(models / name))(PROMPTS, ANSWERS))
    with pytest.raises(UserError, match=r"org/policy has no .* it is not a reward model"):
        reward_model_of("org/policy", options=options)


def test_missing_weights_of_another_model_are_reported_with_its_own_option(models, tmp_path):
    for name in ("policy_vhead", "reference"):
        (copy_model(models / name, tmp_path / name) / "model.safetensors").unlink()
    options = {**user(tmp_path), "reward_model": str(tmp_path / "policy_vhead"), "beta": 0.1,
               "ref_model": str(tmp_path / "reference")}  # fmt: skip
    with pytest.raises(UserError) as error:
        explain(plan({name: RawValue(value, "test") for name, value in options.items()}))
    assert "Download them, or set ref_model to a model with weights." in str(error.value)
    assert "Download them, or set reward_model to a model with weights." in str(error.value)
    assert "train_from_scratch" not in str(error.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reward_model": "{models}/policy"}, "it is not a reward model"),
        ({"reward_model": "{models}/policy_vhead", "reward_model_adapters": ["org/none"]},
         'reward_model_adapters "org/none" is not a local folder'),
        ({"reward_model": "org/none"}, 'reward_model "org/none" is not a local folder'),
        ({"ref_model": "org/none", "beta": 0.1}, 'ref_model "org/none" is not a local folder'),
        ({"ref_model": "{models}/policy", "beta": 0.1}, "The vocabulary sizes of the reference model"),
        ({"ref_model": "{models}", "beta": 0.1}, "this folder has no config.json"),
    ],
)  # fmt: skip
def test_unusable_model_is_reported_by_explain(models, tmp_path, options, message):
    options = {
        name: value.format(models=models) if isinstance(value, str) else value for name, value in options.items()
    }
    with pytest.raises(UserError, match=message):
        explain(plan({name: RawValue(value, "test") for name, value in {**user(tmp_path), **options}.items()}))


def test_language_model_is_not_a_reward_model(models):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(models / "policy")
    with pytest.raises(UserError, match="must be a sequence classifier with one label"):
        RewardModel(model, None)


def test_reward_model_reads_a_tool_result_that_is_a_list_as_text(models):
    model = reward_model_of(str(models / "scorer"))
    model.tokenizer.chat_template = "{% for m in messages %}{{ m.role + ': ' + m.content }}{% endfor %}"
    completion = [{"role": "assistant", "content": ""}, {"role": "tool", "name": "rows", "content": [("a", 1)]}]
    as_text = [completion[0], {**completion[1], "content": "[('a', 1)]"}]
    prompt = [{"role": "user", "content": "Which rows?"}]
    assert model([prompt], [completion]) == model([prompt], [as_text])


def test_texts_and_conversations_are_scored_in_one_call(models):
    model = reward_model_of(str(models / "scorer"))
    model.tokenizer.chat_template = "{% for m in messages %}{{ m.role + ': ' + m.content }}{% endfor %}"
    prompts = ["What?", [{"role": "user", "content": "Which rows?"}], "Who?"]
    completions = [" That.", [{"role": "assistant", "content": "The first."}], " They."]
    each = [model([prompt], [answer])[0] for prompt, answer in zip(prompts, completions, strict=True)]
    assert model(prompts, completions) == pytest.approx(each, abs=1e-6)


def test_conversations_require_a_chat_template(models):
    model = reward_model_of(str(models / "scorer"))
    model.tokenizer.chat_template = None
    with pytest.raises(UserError, match="has no chat template"):
        model([[{"role": "user", "content": "a"}]], [[{"role": "assistant", "content": "b"}]])


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "The reward model policy_vhead has no chat template, but the prompts are conversations."),
        ("{{ raise_exception('no answers') }}", "cannot render a completion: .* no answers"),
    ],
)
@pytest.mark.parametrize("run", [explain, train_run])
def test_reward_model_that_cannot_read_conversations_is_reported_before_weights_are_read(
    models, tmp_path, monkeypatch, run, template, message
):
    reward = copy_model(models / "policy_vhead", tmp_path / "policy_vhead", template)
    monkeypatch.setattr(build, "load_model", None)
    options = {**user(tmp_path), "reward_model": str(reward)}
    with pytest.raises(UserError, match=message):
        run(plan({name: RawValue(value, "test") for name, value in options.items()}))


def test_reward_model_without_a_chat_template_scores_texts(models, tmp_path):
    reward = copy_model(models / "policy_vhead", tmp_path / "policy_vhead")
    made = user(tmp_path)
    records = [{"prompt": prompt, "answer": "a"} for prompt in PROMPTS * 4]
    (tmp_path / "texts.jsonl").write_text("\n".join(map(json.dumps, records)))
    options = {**made, "dataset": [str(tmp_path / "texts.jsonl")], "reward_model": str(reward), "max_steps": 1}
    assert "rewards/policy_vhead/mean" in history(train(options))[0]


def test_reward_model_with_the_name_of_a_function_is_logged_under_another(models, tmp_path):
    reward = copy_model(
        models / "policy_vhead", tmp_path / "exact", "{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    (tmp_path / "functions.py").write_text(
        "def exact(completions, **_):\n    return [float(len(c)) for c in completions]\n"
    )
    options = {**user(tmp_path), "reward_model": str(reward), "max_steps": 1,
               "reward_funcs": [f"{tmp_path}/functions.py:exact"]}  # fmt: skip
    logged = history(train(options))[0]
    assert {"rewards/exact/mean", "rewards/exact_2/mean"} <= logged.keys()


@pytest.mark.parametrize("kind", ["folder", "model", "function"])
def test_trainer_refuses_conversations_for_a_reward_model_without_chat_template(models, tmp_path, monkeypatch, kind):
    folder = copy_model(models / "scorer", tmp_path / "scorer")
    reward = str(folder)
    if kind == "model":
        reward = AutoModelForSequenceClassification.from_pretrained(folder)
    elif kind == "function":
        reward = reward_model_of(reward)
    chats = Dataset.from_list([{"prompt": [{"role": "user", "content": prompt}]} for prompt in PROMPTS])
    args = GRPOConfig(str(tmp_path / "out"), use_cpu=True, bf16=False, report_to="none")
    monkeypatch.setattr(setup, "load_named_model", None)
    with pytest.raises(UserError, match="The reward model scorer has no chat template") as error:
        GRPOTrainer(str(models / "policy"), reward, args, chats)
    assert "reward_processing_classes" in str(error.value)
    reader = AutoTokenizer.from_pretrained(folder)
    reader.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    with pytest.raises(TypeError):  # the check has passed if the model is loaded
        GRPOTrainer(str(models / "policy"), str(folder), args, chats, reward_processing_classes=reader)


SCORES = {"null": None, "word": "good", "nan": math.nan, "inf": math.inf, "nested": [1.0]}


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(time, "sleep", lambda _: None)
    seen = set()

    class Answers(BaseHTTPRequestHandler):
        def do_POST(self):
            texts = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["messages"]
            path = unquote(self.path.removeprefix("/"))
            if path in ("close", "close once") and path not in seen:
                seen.update({"close once"} & {path})
                return self.connection.close()
            answers = {"short": {"scores": [0.0]}, "list": [1.0], "text": "<html>"}
            scores = {name: [value] * len(texts) for name, value in SCORES.items()}
            answer = answers.get(path, {"scores": scores.get(path, [len(text) for text in texts])})
            body = answer.encode() if isinstance(answer, str) else json.dumps(answer).encode()
            self.send_response(500 if path == "fails" else 200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            return

    made = HTTPServer(("127.0.0.1", 0), Answers)
    threading.Thread(target=made.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{made.server_port}"
    made.shutdown()


def test_reward_server_scores_texts_and_count_is_checked(server):
    expected = [len(prompt) for prompt in PROMPTS]
    assert RewardServer(server)(PROMPTS) == RewardServer(f"{server}/close%20once")(PROMPTS) == expected
    with pytest.raises(UserError, match=r"one finite number for each of the 2 texts\. Received: 1\."):
        RewardServer(f"{server}/short")(["a", "xy"])
    with pytest.raises(UserError, match="starts with http"):
        RewardServer("file:///etc/passwd")(["ab"])


def test_reward_server_receives_the_text_that_the_policy_reads(monkeypatch, tmp_path):
    """A server tokenizes it without a template, as LLaMA-Factory's does."""
    received = []

    def post(server, body):
        received.extend(json.loads(body)["messages"])
        return {"scores": [float(len(text) % 7) for text in received]}

    monkeypatch.setattr(RewardServer, "_post", post)
    address = {"reward_model": "http://127.0.0.1:1/score", "reward_model_type": "api", "reward_funcs": None}
    run = train({**user(tmp_path), **address, "max_steps": 1})
    lines = [json.loads(line) for line in (run / "completions.jsonl").read_text().splitlines()]
    assert "<|im_start|>assistant" in received[0]
    assert all(any(text.startswith(line["prompt"]) for line in lines) for text in received)
    assert sum(text.endswith("<|im_end|>") for text in received) == sum(line["ended"] for line in lines)
    assert sorted(len(text) % 7 for text in received) == sorted(line["rewards"]["reward_model"] for line in lines)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        *((name, f"Received: {value!r} as score 1.") for name, value in SCORES.items()),
        ("list", "Received: [1.0]."),
        ("close", "failed 3 times: Remote end closed connection without response."),
        ("text", "failed 3 times: the response is not JSON (Expecting value: line 1 column 1 (char 0))."),
        ("fails", 'failed 3 times: HTTP Error 500: Internal Server Error ({"scores": [2]}).'),
    ],
)
def test_unusable_answer_of_a_reward_server_is_reported(server, path, message):
    with pytest.raises(UserError) as error:
        RewardServer(f"{server}/{path}")(["ab"])
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("template", "message"),
    [("{{ raise_exception('no answers') }}", "cannot render a completion: .* no answers"),
     ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "took more than 1 s")],
)  # fmt: skip
def test_chat_template_of_a_reward_model_is_rendered_with_limits(models, template, message):
    model = reward_model_of(str(models / "policy_vhead"))
    model.tokenizer.chat_template = template
    with limit_rendering(1.0), pytest.raises(UserError, match=message):
        model([[{"role": "user", "content": "q"}]], [[{"role": "assistant", "content": "a"}]])


@pytest.mark.slow
def test_reward_model_can_be_combined_with_functions(models, tmp_path):
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}"
    (models / "policy_vhead" / "chat_template.jinja").write_text(template)
    more = {"reward_model": str(models / "policy_vhead"), "reward_weights": [1.0, 0.5], "max_steps": 1}
    log = history(train({**user(tmp_path), **more}))[0]
    assert {"rewards/short/mean", "rewards/policy_vhead/mean"} <= log.keys()
    expected = log["rewards/short/mean"] + 0.5 * log["rewards/policy_vhead/mean"]
    assert log["reward"] == pytest.approx(expected, abs=1e-5)
