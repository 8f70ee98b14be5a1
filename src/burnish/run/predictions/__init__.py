"""Predictions for evaluation sets: generated responses, reward scores, or the loss."""
