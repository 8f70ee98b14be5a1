"""Reports of a run: progress, logs, plots, model card, trackers. They observe and do not change the training.

Begin with ``progress.py`` for the terminal, and with ``jsonl.py`` for the files.
"""
