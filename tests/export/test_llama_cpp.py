"""llama.cpp loads exported files, tokenizes equally, and generates burnish's tokens.

``make test-llama`` builds llama-cpp-python into ``.venv-llama``, an environment of its own, and runs this file.
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
NEW, PROMPTS = 16, 50
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not LLAMA.exists(), reason="needs the environment of make test-llama"),
]


def generate_with_llama_cpp(file: Path, **options) -> dict:
    done = subprocess.run(
        [LLAMA, ROOT / "tests" / "helpers" / "llama_cpp_answers.py"],
        input=json.dumps({"file": str(file), "new": NEW, **options}),
        text=True, capture_output=True, check=False, env={"PATH": os.environ["PATH"]},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.fixture(scope="module", params=KINDS)
def trained(request, tmp_path_factory) -> Path:
    """A small model of a shape that has learned something: with random weights the likeliest tokens are near ties."""
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


def exported(model: Path, kind: str) -> Path:
    folder = model.parent / kind
    assert not cli.main(
        ["export", str(model), f"export_dir={folder}", "export_format=gguf", f"export_gguf_type={kind}"]
    )
    return next(folder.glob("*.gguf"))


def questions(tokenizer) -> list[str]:
    lines = (DEMO / "data" / "heldout.jsonl").read_text(encoding="utf-8").splitlines()[:: 200 // PROMPTS][:PROMPTS]
    loaded = [f"{row['instruction']}\n{row['input']}".strip() for row in map(json.loads, lines)]
    return [
        tokenizer.apply_chat_template([{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True)
        for text in loaded
    ]


def greedy(folder: Path, prompts: list[list[int]]) -> list[list[int]]:
    """burnish's answers in float32."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    asks = [GenerationRequest(ids, NEW, sampling=Sampling(temperature=0.0), stop_ids=frozenset()) for ids in prompts]
    loop = Scheduler(model, SlotLimits(4, 256))
    return [done.ids for done in generate_all(loop, asks)]


def differ_at_ties_only(folder: Path, prompts, expected, result, bound: float) -> bool:
    """Whether each answer is the expected one, up to a place where the two likeliest logits are within ``bound``."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for prompt, ours, theirs in zip(prompts, expected, result, strict=True):
        place = next((at for at, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), None)
        if place is not None:
            with torch.no_grad():
                first, second = model(torch.tensor([[*prompt, *ours[:place]]])).logits[0, -1].topk(2).values.tolist()
            if first - second > bound:
                return False
    return True


def test_llama_cpp_generates_the_same_tokens(trained: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(trained)
    texts = questions(tokenizer)
    prompts = [tokenizer(text)["input_ids"] for text in texts]
    expected = greedy(trained, prompts)
    rows = [[*prompt, *made] for prompt, made in zip(prompts, expected, strict=True)]
    for kind, least in {"f32": 0.995, "f16": 0.995, "q8_0": 0.95, "q4_0": 0.7}.items():
        result = generate_with_llama_cpp(exported(trained, kind), texts=texts, prompts=prompts, rows=rows)
        assert result["ids"] == prompts
        if kind in ("f32", "f16"):  # where rounding decides between two tokens, the rest of an answer may differ
            same = sum(a == b for a, b in zip(expected, result["greedy"], strict=True))
            assert same >= PROMPTS - 2
            assert differ_at_ties_only(trained, prompts, expected, result["greedy"], 1e-3 if kind == "f32" else 2e-2)
        same = [
            a == b
            for prompt, row, ids in zip(prompts, rows, result["likeliest"], strict=True)
            for a, b in zip(row[len(prompt) :], ids[len(prompt) - 1 : -1], strict=True)
        ]
        assert sum(same) / len(same) >= least, (kind, sum(same) / len(same))


def test_k_quants_are_written_by_llama_cpp(trained: Path, monkeypatch) -> None:
    """Its packages are put behind those of this environment."""
    place = str(next((LLAMA.parents[1] / "lib").glob("python*/site-packages")))
    monkeypatch.setattr(sys, "path", [*sys.path, place])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([os.environ.get("PYTHONPATH", ""), place]))
    file = exported(trained, "q4_k_m")
    assert file.stat().st_size < 0.5 * next(trained.glob("*.safetensors")).stat().st_size
    ids = AutoTokenizer.from_pretrained(trained)("What is the opposite of hot?")["input_ids"]
    assert generate_with_llama_cpp(file, texts=[], prompts=[ids], rows=[])["greedy"]


def test_demo_model_loads_in_llama_cpp(tmp_path: Path) -> None:
    (tmp_path / "model").symlink_to(DEMO / "model")
    file = exported(tmp_path / "model", "f16")
    assert (file.parent / "Modelfile").read_text().startswith(f"FROM ./{file.name}\n")
    texts = [*questions(AutoTokenizer.from_pretrained(DEMO / "model")), "Any text, 東京 12345!!\n\n  (it's) Ġ"]
    tokenizer = AutoTokenizer.from_pretrained(DEMO / "model")
    assert generate_with_llama_cpp(file, texts=texts, prompts=[], rows=[])["ids"] == [
        tokenizer(text)["input_ids"] for text in texts
    ]
