"""Encoded rows. In: examples and an objective's function that encodes them. Out: rows in concatenated arrays, made once
and cached on disk, or made while the loop runs. Begin with ``encode.py``.
"""
