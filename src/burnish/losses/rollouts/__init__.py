"""Losses of learning from the model's own completions: GRPO and its relatives, RLOO. Begin with ``loss.py``."""
