"""``TrainingArguments``. In: transformers' arguments, those of today and of former versions. Out: one checked object,
which is also the loop's options. Begin with ``training.py``.
"""
