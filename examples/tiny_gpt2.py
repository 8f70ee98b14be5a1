"""A GPT-2 small enough for a laptop, made here: ``python examples/tiny_gpt2.py FOLDER``.

The examples take any folder that ``from_pretrained`` can load; this makes one without a download. Its tokenizer is
GPT-2's kind, learned from the demo's rows, with one special token and none for padding, as GPT-2 has it. Its weights
are random.
"""

import sys
from pathlib import Path

import torch
from tokenizers import ByteLevelBPETokenizer
from transformers import GPT2Config, GPT2LMHeadModel, GPT2TokenizerFast

import burnish

ROWS = Path(burnish.__file__).parent / "demo" / "data" / "train.jsonl"
END = "<|endoftext|>"


def make(folder: str | Path, vocab_size: int = 600) -> Path:
    """Write tokenizer, configuration and weights into ``folder``."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    learned = ByteLevelBPETokenizer()
    learned.train([str(ROWS)], vocab_size=vocab_size, special_tokens=[END], show_progress=False)
    learned.save_model(str(folder))
    tokenizer = GPT2TokenizerFast.from_pretrained(folder, bos_token=END, eos_token=END, unk_token=END)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    end = tokenizer.eos_token_id
    config = GPT2Config(
        vocab_size=len(tokenizer), n_positions=256, n_embd=64, n_layer=2, n_head=4, bos_token_id=end, eos_token_id=end
    )
    GPT2LMHeadModel(config).save_pretrained(folder)
    return folder


if __name__ == "__main__":
    print(make(sys.argv[1] if len(sys.argv) > 1 else "tiny-gpt2"))
