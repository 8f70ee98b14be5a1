"""Reward functions: the built-in ones, the user's own, and how they are called. Begin with ``functions.py``."""
