"""Files, JSON, progress reporting, signals, and the register of patches. Used by every other package.

Begin with ``patching.py``: every change to foreign code goes through it.
"""
