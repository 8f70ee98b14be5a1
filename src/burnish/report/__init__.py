"""Reports of a run: progress, logs, plots, cards, trackers. They only observe: nothing here changes a number. Begin
with ``progress.py`` for the terminal, ``jsonl.py`` for the files.
"""
