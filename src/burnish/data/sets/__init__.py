"""The data sets of a run. In: names from the options, ``dataset_info.json``, records. Out: typed examples to learn from
and to evaluate on, mixed as the options say. Begin with ``sources.py``; a format of one's own goes into ``formats.py``.
"""
