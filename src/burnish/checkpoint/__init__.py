"""Checkpoints: the parts of a run on disk, with a manifest of sizes and hashes. Nothing is pickled.

Begin with ``checkpoint.py``, which saves and loads; ``parts.py`` lists what a checkpoint holds.
"""
