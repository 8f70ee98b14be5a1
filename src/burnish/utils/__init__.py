"""Files, JSON, progress reporting, signals, and the register of patches. Used by every other package.

Begin with ``patching.py``: every change to code that is not burnish's own goes through it.
"""
