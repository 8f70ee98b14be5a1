"""Create the demo's base model: a small Llama, pretrained on generated plain statements.

It reads the tokenizer, and writes config.json, generation_config.json and model.safetensors (bfloat16) next to it. The
statements come from `tasks.py`: they contain the facts and skills of the demo, but no questions, no chat tokens, and no
held-out problems except opposites. So the base model cannot answer questions, but learns to quickly. First the
statements are plain, then filler words are inserted: a model pretrained on plain statements only has the same skills,
but loses some of them in fine-tuning.

The seed determines the text and the initial weights; the last digits of the weights also depend on the processor and
the number of threads. It takes about 10 minutes on two CPU cores.

Run: python scripts/demo/make_model.py [--output FOLDER] [--steps 1200] [--buried-steps 250] [--threads 2] [--seed 0]
"""

import argparse
import time
from functools import partial
from pathlib import Path
from random import Random

import torch
from make_tokenizer import END_OF_TEXT, MAX_TOKENS, MODEL_FOLDER, TURN_END
from tasks import TASKS, invented_word, is_held_out, with_filler_words
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

# B: statements in a micro-batch, T: tokens in the longest of them
STATEMENTS_PER_STEP = 128
MICRO_BATCHES = 4  # statements of similar length are batched, which halves the padding
WARMUP_STEPS = 50
PLAIN_STEPS, BURIED_STEPS = 1200, 250
PLAIN_RATE, BURIED_RATE = 3e-3, 2e-3
SEED_OF_BURIED = 77
IGNORE_INDEX = -100

Statement = tuple[list[int], list[int]]  # token ids of the prompt and of its completion


def draw_statement(random: Random, tokenizer: PreTrainedTokenizerFast, depth: float) -> Statement:
    """Return a true statement about a problem that is not held out, split before its answer."""
    task = random.choice(TASKS)
    problem = task.draw(random, partial(invented_word, random))
    if task.name != "opposite" and is_held_out(problem.key):
        return draw_statement(random, tokenizer, depth)
    before, after = random.choice(task.statements).split(" {answer}")
    prompt = with_filler_words(random, before, depth).format(**problem.fields)
    # The tokenizer joins a space with the following word, but not a line break.
    cut = len(prompt.removesuffix(" "))
    return tokenizer.encode(END_OF_TEXT + prompt[:cut]), tokenizer.encode(f"{prompt[cut:]}{problem.answer}{after}\n")


def collate(statements: list[Statement], pad_id: int) -> tuple[Tensor, Tensor]:
    """Pad statements on the right.

    Only completions are trained. Prompts are random letters and numbers, whose loss is noise; training on them took
    more than ten times as many steps for the same skills.

    Returns:
        input_ids: (B, T) token ids.
        labels: (B, T) token ids, IGNORE_INDEX for prompts and padding.
    """
    longest = max(len(prompt) + len(completion) for prompt, completion in statements)
    input_ids = torch.full((len(statements), longest), pad_id)
    labels = torch.full((len(statements), longest), IGNORE_INDEX)
    for row, (prompt, completion) in enumerate(statements):
        end = len(prompt) + len(completion)
        input_ids[row, :end] = torch.tensor(prompt + completion)
        labels[row, len(prompt) : end] = torch.tensor(completion)
    return input_ids, labels


def new_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Return the untrained model with 3.2 million parameters."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=256,
            intermediate_size=688,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=MAX_TOKENS,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def backward_of_step(model: LlamaForCausalLM, statements: list[Statement], pad_id: int) -> float:
    """Add the gradient of the mean loss over the labels of one step, and return that mean in nats."""
    statements = sorted(statements, key=lambda parts: len(parts[0]) + len(parts[1]))
    num_labels = sum(len(completion) for _, completion in statements)
    mean_loss = 0.0
    for first in range(0, len(statements), STATEMENTS_PER_STEP // MICRO_BATCHES):
        input_ids, labels = collate(statements[first : first + STATEMENTS_PER_STEP // MICRO_BATCHES], pad_id)
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(input_ids=input_ids).logits
        loss = cross_entropy(
            logits[:, :-1].float().flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORE_INDEX, reduction="sum"
        )
        (loss / num_labels).backward()
        mean_loss += loss.item() / num_labels
    return mean_loss


def pretrain(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, random: Random, steps: int, depth: float, rate: float
) -> None:
    """Train with Muon on matrices of layers and AdamW on the rest; the rate has warmup, plateau and linear decay.

    Args:
        depth: rate of inserted filler words, from 0 (none) to 1.
        rate: the learning rate of the plateau.
    """
    matrices = [weight for name, weight in model.named_parameters() if weight.ndim == 2 and "embed" not in name]
    others = [weight for name, weight in model.named_parameters() if weight.ndim != 2 or "embed" in name]
    optimizers = (
        torch.optim.Muon(matrices, lr=rate, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=rate, weight_decay=0.0, betas=(0.9, 0.98)),
    )
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: min(1.0, (step + 1) / WARMUP_STEPS, 2 * (1 - step / steps))
        )
        for optimizer in optimizers
    ]
    began = time.perf_counter()
    for step in range(1, steps + 1):
        statements = [draw_statement(random, tokenizer, depth) for _ in range(STATEMENTS_PER_STEP)]
        loss = backward_of_step(model, statements, tokenizer.pad_token_id)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for part in (*optimizers, *schedules):
            part.step()
        model.zero_grad()
        if step % 50 == 0:
            print(f"step {step} of {steps}, loss {loss:.3f}, {time.perf_counter() - began:.0f} s", flush=True)


def write_model(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Save the weights in bfloat16, with a config for greedy generation that stops at the end of a turn or document."""
    model.generation_config = GenerationConfig(
        do_sample=False,
        max_new_tokens=32,
        eos_token_id=[tokenizer.convert_tokens_to_ids(TURN_END), tokenizer.convert_tokens_to_ids(END_OF_TEXT)],
        pad_token_id=tokenizer.pad_token_id,
    )
    model.to(torch.bfloat16).save_pretrained(folder)
    print(f"{model.num_parameters():,} parameters, written to {folder}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=MODEL_FOLDER, help="folder of the model (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=PLAIN_STEPS, help="of plain statements (default: %(default)s)")
    parser.add_argument("--buried-steps", type=int, default=BURIED_STEPS, help="after them (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)
    reader = AutoTokenizer.from_pretrained(arguments.output)
    network = new_model(reader)
    pretrain(network, reader, Random(arguments.seed), arguments.steps, depth=0.0, rate=PLAIN_RATE)
    write_model(network, reader, arguments.output)
    network = LlamaForCausalLM.from_pretrained(arguments.output, dtype=torch.float32)
    torch.manual_seed(arguments.seed)
    pretrain(network, reader, Random(SEED_OF_BURIED), arguments.buried_steps, depth=1.0, rate=BURIED_RATE)
    write_model(network, reader, arguments.output)
