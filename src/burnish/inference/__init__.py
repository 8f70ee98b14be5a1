"""Inference engine: from token ids of prompts to generated tokens, for chat, API, evaluation and predictions.

Requests are ``types.GenerationRequest``: prompt ids, sampling settings and stop conditions. Results are
``types.StepOutput``: what each step generated. Begin with ``types.py`` (shared types) and ``scheduler.py`` (the loop);
then

    slots.py      limits, jobs and slots of the loop
    cache.py      keys and values, one row per slot
    forward.py    three backends: batched slots, the model's own cache, or no cache
    probe.py      selects the backend whose logits match the plain model's
    sampling.py   logits -> tokens and log-probabilities
    engine.py     the thread that owns the model
"""
