"""Print tokens and predictions of llama.cpp for a GGUF file. Run in an environment with llama-cpp-python.

Input (standard input): ``{"file": path, "texts": [str], "prompts": [[id]], "new": 16, "rows": [[id]]}``. Output: the
ids
of the texts, the greedy ids after each prompt, and the most likely next id at each position of each row.
"""

import json
import sys

import numpy
from llama_cpp import Llama

request = json.load(sys.stdin)
model = Llama(request["file"], n_ctx=256, logits_all=True, type_k=0, type_v=0, n_threads=1, verbose=False)


def most_likely_ids(ids):
    model.reset()
    model.eval(ids)
    return numpy.asarray(model.scores[: len(ids)]).argmax(-1).tolist()


def greedy(ids):
    new_ids = most_likely_ids(ids)[-1:]
    while len(new_ids) < request["new"]:
        model.eval(new_ids[-1:])
        new_ids.append(int(numpy.asarray(model.scores[model.n_tokens - 1]).argmax()))
    return new_ids


answers = {
    "ids": [model.tokenize(text.encode(), add_bos=False, special=True) for text in request["texts"]],
    "greedy": [greedy(prompt) for prompt in request["prompts"]],
    "likeliest": [most_likely_ids(row) for row in request["rows"]],
}
json.dump(answers, sys.stdout)
