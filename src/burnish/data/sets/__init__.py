"""The datasets of a run: from names in the options and ``dataset_info.json`` to typed examples, mixed and split.

Begin with ``sources.py``. Custom record formats are registered as in ``formats.py``.
"""
