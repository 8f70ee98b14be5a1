"""Answers: prompts as token ids go in, tokens come out, one engine for chat, API, evaluation and predictions.

In:  requests (``types.GenerationRequest``): the ids of a prompt, how to sample, where to stop. Out:
``types.StepOutput``, what each step made. Begin with ``types.py`` (the words that everyone shares) and ``slots.py``
(the loop); then

    cache.py      keys and values, a row per slot
    forward.py    how a model is asked: over slots, with a cache of its own, or over the whole text
    probe.py      which of these three gives the logits that the model gives alone
    sampling.py   logits -> a token and log-probabilities
    engine.py     the thread that owns the model
"""
