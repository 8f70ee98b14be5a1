"""The training loop and its types. Imports torch, numpy and the standard library only.

In: a model, an objective, a stream of batches. Out: trained weights, a state, events. Begin with ``loop.py``, which is
the whole of training; ``types.py`` has the types, ``state.py`` the position of a run.
"""
