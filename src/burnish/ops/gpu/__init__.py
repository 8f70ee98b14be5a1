"""Kernels for a GPU: norms, gated layers, rotary positions and the loss. We have not run any of them on a GPU. Begin
with ``kernels.py``, which tests each before it is used.
"""
