"""``burnish demo``: the bundled model and data, and the command that trains on them.

Begin with ``command.py``.
"""
