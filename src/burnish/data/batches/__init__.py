"""Batches: rows -> micro-batches (padding-free, padded or packed), in an order that depends on (seed, epoch) only.

Begin with ``loader.py``, then ``batching.py``.
"""
