"""Rows -> the groups of an epoch. In: rows and the division of a step. Out: micro-batches, padding-free, padded or
packed, in an order that depends on (seed, epoch) alone. Begin with ``stream.py``, then ``batching.py``.
"""
