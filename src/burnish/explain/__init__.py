"""``burnish explain``, a dry run: the steps, memory, patches and examples of a run, as text and JSON.

Begin with ``explain.py``.
"""
