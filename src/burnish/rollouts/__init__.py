"""Rollouts: prompts -> completions -> rewards -> advantages, for stages that learn from what the model itself writes.

Begin with ``options.py``, then ``advantages.py``. ``rewards/`` calls the user's functions. What a token of a completion
costs is in ``losses/rollouts/``.
"""
