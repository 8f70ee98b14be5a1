"""Processes, devices, precision and memory of a run.

In: a module, an optimizer, losses. Out: both on their devices, gradients, updates. Begin with ``single.py``: plain
torch on one device, the reference for all other backends.
"""
