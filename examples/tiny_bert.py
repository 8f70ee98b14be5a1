"""A BERT small enough for a laptop, made here: ``python examples/tiny_bert.py FOLDER``.

The examples take any folder that ``from_pretrained`` can load; this makes one without a download. Its weights are
random, so it shows that training works and not what BERT knows.
"""

import sys
from pathlib import Path

import torch
from transformers import BertConfig, BertForSequenceClassification, BertTokenizerFast

WORDS = (
    "i love hate this movie film it is was great good bad terrible boring wonderful the a an acting plot "
    "of and not really true that very awful fantastic worst best ever seen what waste time enjoyed every "
    "minute dull bright story company said shares rose fell grew shrank opened closed percent on monday "
    "tuesday bank profit quarter year last first new old office in city its stock higher lower market "
    "report results sold bought for million "
)


def make(folder: str | Path) -> Path:
    """Write tokenizer, configuration and weights into ``folder``."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    letters = [
        *"abcdefghijklmnopqrstuvwxyz0123456789.,!?'",
        *(f"##{letter}" for letter in "abcdefghijklmnopqrstuvwxyz"),
    ]
    vocabulary = list(dict.fromkeys(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS.split(), *letters]))
    (folder / "vocab.txt").write_text("\n".join(vocabulary), encoding="utf-8")
    BertTokenizerFast(vocab=str(folder / "vocab.txt"), model_max_length=128).save_pretrained(folder)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(vocabulary), hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=128,
    )  # fmt: skip
    BertForSequenceClassification(config).save_pretrained(folder)
    return folder


if __name__ == "__main__":
    print(make(sys.argv[1] if len(sys.argv) > 1 else "tiny-bert"))
