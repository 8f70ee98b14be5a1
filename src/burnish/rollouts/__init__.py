"""Rollouts: prompts -> completions -> rewards -> advantages, for stages that train on completions of the model itself.

Begin with ``options.py``, then ``advantages.py``. ``rewards/`` calls the reward functions of the user. The losses are
in ``losses/rollouts/``.
"""
