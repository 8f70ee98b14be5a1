"""Operations for CPUs: attention in blocks, linear layers without second copies of their weights, a buffer pool for
large tensors. Begin with ``short.py`` and ``blockwise.py``.
"""
