"""Losses for training on the model's own completions: GRPO and variants, RLOO, PPO. Begin with ``loss.py``."""
