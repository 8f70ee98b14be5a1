"""llama.cpp loads exported files, tokenizes equally, and generates the same tokens as burnish.

``make test-llama`` builds llama-cpp-python in a separate environment, ``.venv-llama``, and runs this file.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import burnish
from burnish import cli
from burnish.inference.batch import generate_all
from burnish.inference.scheduler import Scheduler
from burnish.inference.slots import SlotLimits
from burnish.inference.types import GenerationRequest, Sampling

ROOT = Path(__file__).parents[2]
LLAMA = Path(os.environ.get("BURNISH_LLAMA_PYTHON", ROOT / ".venv-llama" / "bin" / "python"))
DEMO = Path(burnish.__file__).parent / "demo"
KINDS = ("llama", "mistral", "qwen2", "qwen3")
SHAPE = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 3, "num_attention_heads": 4, "head_dim": 64,
         "num_key_value_heads": 2, "max_position_embeddings": 512, "eos_token_id": 2, "pad_token_id": 0,
         "bos_token_id": None, "tie_word_embeddings": True, "sliding_window": None}  # fmt: skip
MAX_NEW_TOKENS, PROMPTS = 16, 50
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not LLAMA.exists(), reason="needs the environment of make test-llama"),
]


def generate_with_llama_cpp(file: Path, **options) -> dict:
    completed = subprocess.run(
        [LLAMA, ROOT / "tests" / "helpers" / "llama_cpp_answers.py"],
        input=json.dumps({"file": str(file), "new": MAX_NEW_TOKENS, **options}),
        text=True, capture_output=True, check=False, env={"PATH": os.environ["PATH"]},
    )  # fmt: skip
    assert completed.returncode == 0, completed.stderr[-3000:]
    return json.loads(completed.stdout)


@pytest.fixture(scope="module", params=KINDS)
def trained_model(request, tmp_path_factory) -> Path:
    """A small model, trained briefly because the highest logits of random weights are nearly equal."""
    folder = tmp_path_factory.mktemp(request.param)
    tokenizer = AutoTokenizer.from_pretrained(DEMO / "model")
    torch.manual_seed(0)
    config = AutoConfig.for_model(request.param, vocab_size=len(tokenizer), **SHAPE)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "new")
    tokenizer.save_pretrained(folder / "new")
    assert not cli.main(
        ["train", "--do_train", "--model_name_or_path", str(folder / "new"), "--dataset_dir", str(DEMO / "data"),
         "--dataset", "demo_train", "--finetuning_type", "full", "--learning_rate", "3e-3", "--max_steps", "150",
         "--per_device_train_batch_size", "16", "--bf16", "false", "--save_strategy", "no", "--report_to", "none",
         "--output_dir", str(folder / "trained"), "--seed", "0"]
    )  # fmt: skip
    return folder / "trained"


def export_gguf(model: Path, kind: str) -> Path:
    folder = model.parent / kind
    assert not cli.main(
        ["export", str(model), f"export_dir={folder}", "export_format=gguf", f"export_gguf_type={kind}"]
    )
    return next(folder.glob("*.gguf"))


def questions(tokenizer) -> list[str]:
    lines = (DEMO / "data" / "heldout.jsonl").read_text(encoding="utf-8").splitlines()[:: 200 // PROMPTS][:PROMPTS]
    texts = [f"{row['instruction']}\n{row['input']}".strip() for row in map(json.loads, lines)]
    return [
        tokenizer.apply_chat_template([{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True)
        for text in texts
    ]


def generate_greedily(folder: Path, prompts: list[list[int]]) -> list[list[int]]:
    """Return the responses of burnish in float32."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    requests = [
        GenerationRequest(ids, MAX_NEW_TOKENS, sampling=Sampling(temperature=0.0), stop_ids=frozenset())
        for ids in prompts
    ]
    loop = Scheduler(model, SlotLimits(4, 256))
    return [response.ids for response in generate_all(loop, requests)]


def differ_at_ties_only(folder: Path, prompts, expected, result, bound: float) -> bool:
    """Tell whether responses differ only after a position whose two highest logits are within ``bound``."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for prompt, ours, theirs in zip(prompts, expected, result, strict=True):
        position = next((at for at, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), None)
        if position is not None:
            with torch.no_grad():
                first, second = model(torch.tensor([[*prompt, *ours[:position]]])).logits[0, -1].topk(2).values.tolist()
            if first - second > bound:
                return False
    return True


def test_llama_cpp_generates_the_same_tokens(trained_model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(trained_model)
    texts = questions(tokenizer)
    prompts = [tokenizer(text)["input_ids"] for text in texts]
    expected = generate_greedily(trained_model, prompts)
    rows = [[*prompt, *response] for prompt, response in zip(prompts, expected, strict=True)]
    for kind, min_share in {"f32": 0.995, "f16": 0.995, "q8_0": 0.95, "q4_0": 0.7}.items():
        result = generate_with_llama_cpp(export_gguf(trained_model, kind), texts=texts, prompts=prompts, rows=rows)
        assert result["ids"] == prompts
        if kind in ("f32", "f16"):  # after a tie that rounding decides, responses may differ
            same = sum(a == b for a, b in zip(expected, result["greedy"], strict=True))
            assert same >= PROMPTS - 2
            assert differ_at_ties_only(
                trained_model, prompts, expected, result["greedy"], 1e-3 if kind == "f32" else 2e-2
            )
        same = [
            a == b
            for prompt, row, ids in zip(prompts, rows, result["likeliest"], strict=True)
            for a, b in zip(row[len(prompt) :], ids[len(prompt) - 1 : -1], strict=True)
        ]
        assert sum(same) / len(same) >= min_share, (kind, sum(same) / len(same))


def test_k_quants_are_written_by_llama_cpp(trained_model: Path, monkeypatch) -> None:
    """The packages of the separate environment are added to the end of ``sys.path``."""
    packages = str(next((LLAMA.parents[1] / "lib").glob("python*/site-packages")))
    monkeypatch.setattr(sys, "path", [*sys.path, packages])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([os.environ.get("PYTHONPATH", ""), packages]))
    file = export_gguf(trained_model, "q4_k_m")
    assert file.stat().st_size < 0.5 * next(trained_model.glob("*.safetensors")).stat().st_size
    ids = AutoTokenizer.from_pretrained(trained_model)("What is the opposite of hot?")["input_ids"]
    assert generate_with_llama_cpp(file, texts=[], prompts=[ids], rows=[])["greedy"]


def test_demo_model_loads_in_llama_cpp(tmp_path: Path) -> None:
    (tmp_path / "model").symlink_to(DEMO / "model")
    file = export_gguf(tmp_path / "model", "f16")
    assert (file.parent / "Modelfile").read_text().startswith(f"FROM ./{file.name}\n")
    texts = [*questions(AutoTokenizer.from_pretrained(DEMO / "model")), "Any text, 東京 12345!!\n\n  (it's) Ġ"]
    tokenizer = AutoTokenizer.from_pretrained(DEMO / "model")
    assert generate_with_llama_cpp(file, texts=texts, prompts=[], rows=[])["ids"] == [
        tokenizer(text)["input_ids"] for text in texts
    ]
