"""The training loop and its types. Imports torch, numpy and the standard library only.

In: a model, an objective, a loader. Out: trained weights, the trainer state, events. Begin with ``loop.py``,
which holds the training loop. ``types.py`` has the types, ``state.py`` the position of a run.
"""
