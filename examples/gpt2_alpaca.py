"""GPT-2 learns to follow instructions: the SFTTrainer demo of many walk-throughs, with its import line changed.

    python examples/tiny_gpt2.py tiny-gpt2
    python examples/gpt2_alpaca.py --model tiny-gpt2 --output out
    python examples/gpt2_alpaca_generate.py --model out/model --instruction "Say this in capitals." --input "bird"

GPT-2 has no token for padding: one is added behind its vocabulary, and the embeddings grow by a row. The arguments of
the trainer are the older ones that people still write; one warning says what they are called today.
"""

import argparse
from pathlib import Path

from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

import burnish
from burnish import SFTTrainer, TrainingArguments

DATA = Path(burnish.__file__).parent / "demo" / "data"
PROMPT = (
    "Below is an instruction that describes a task{paired}. "
    "Write a response that appropriately completes the request.\n\n### Instruction:\n{instruction}\n\n"
)


def prompt_of(row):
    """The prompt of Alpaca, with and without an input (https://github.com/tatsu-lab/stanford_alpaca)."""
    paired = ", paired with an input that provides further context" if row["input"] else ""
    opening = PROMPT.format(paired=paired, instruction=row["instruction"])
    return opening + (f"### Input:\n{row['input']}\n\n" if row["input"] else "") + "### Response:\n"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="tiny-gpt2", help="a folder; python examples/tiny_gpt2.py makes one")
    parser.add_argument("--data", default=str(DATA / "train.jsonl"), help="JSON lines: instruction, input, output")
    parser.add_argument("--output", default="gpt2-alpaca")
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--epochs", type=float, default=2)
    options = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForCausalLM.from_pretrained(options.model)
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    model.resize_token_embeddings(len(tokenizer))
    model.config.pad_token_id = tokenizer.pad_token_id

    rows = load_dataset("json", data_files=options.data, split="train")
    rows = rows.select(range(min(options.rows, len(rows))))
    rows = rows.map(lambda row: {"text": prompt_of(row) + row["output"]}, remove_columns=rows.column_names)
    split = rows.train_test_split(test_size=0.05, seed=42)

    trainer = SFTTrainer(
        model=model,
        args=TrainingArguments(
            output_dir=options.output,
            num_train_epochs=options.epochs,
            per_device_train_batch_size=8,
            learning_rate=2e-3,
            logging_steps=20,
            eval_strategy="epoch",
            save_strategy="epoch",
            load_best_model_at_end=True,
            report_to="none",
        ),
        train_dataset=split["train"],
        eval_dataset=split["test"],
        tokenizer=tokenizer,
        max_seq_length=96,
        dataset_text_field="text",
        packing=False,
    )
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    after = trainer.evaluate()["eval_loss"]
    print(f"Loss on rows it has not seen: {before:.2f} before, {after:.2f} after.")
    trainer.save_model(f"{options.output}/model")


if __name__ == "__main__":
    main()
