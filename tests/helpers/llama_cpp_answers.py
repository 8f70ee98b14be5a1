"""Tokens and predictions of llama.cpp for a GGUF file; run by an environment that has llama-cpp-python.

In (standard input): ``{"file": path, "texts": [str], "prompts": [[id]], "new": 16, "rows": [[id]]}``. Out: the ids of
the texts, the greedy ids after each prompt, and the likeliest next id at each place of each row.
"""

import json
import sys

import numpy
from llama_cpp import Llama

request = json.load(sys.stdin)
model = Llama(request["file"], n_ctx=256, logits_all=True, type_k=0, type_v=0, n_threads=1, verbose=False)


def likeliest(ids):
    model.reset()
    model.eval(ids)
    return numpy.asarray(model.scores[: len(ids)]).argmax(-1).tolist()


def greedy(ids):
    made = likeliest(ids)[-1:]
    while len(made) < request["new"]:
        model.eval(made[-1:])
        made.append(int(numpy.asarray(model.scores[model.n_tokens - 1]).argmax()))
    return made


answers = {
    "ids": [model.tokenize(text.encode(), add_bos=False, special=True) for text in request["texts"]],
    "greedy": [greedy(prompt) for prompt in request["prompts"]],
    "likeliest": [likeliest(row) for row in request["rows"]],
}
json.dump(answers, sys.stdout)
