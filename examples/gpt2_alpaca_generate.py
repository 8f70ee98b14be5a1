"""What the model of ``gpt2_alpaca.py`` answers to an instruction.

python examples/gpt2_alpaca_generate.py --model out/model --instruction "Say this in capitals." --input "bird"
"""

import argparse

import torch
from gpt2_alpaca import prompt_of
from transformers import AutoModelForCausalLM, AutoTokenizer

parser = argparse.ArgumentParser()
parser.add_argument("--model", default="gpt2-alpaca/model")
parser.add_argument("--instruction", default="Sort these letters.")
parser.add_argument("--input", default="d b c a")
parser.add_argument("--max-new-tokens", type=int, default=40)
options = parser.parse_args()

tokenizer = AutoTokenizer.from_pretrained(options.model)
model = AutoModelForCausalLM.from_pretrained(options.model).eval()
inputs = tokenizer(prompt_of({"instruction": options.instruction, "input": options.input}), return_tensors="pt")
with torch.no_grad():
    output = model.generate(
        **inputs, max_new_tokens=options.max_new_tokens, do_sample=False, pad_token_id=tokenizer.pad_token_id
    )
answer = output[0, inputs["input_ids"].shape[1] :]
print(tokenizer.decode(answer, skip_special_tokens=True))
