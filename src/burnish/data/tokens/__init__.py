"""Tokenization: text -> token ids. Control tokens can come from the chat template only. Begin with ``encoder.py``."""
