"""``TrainingArguments``. In: transformers' arguments of current and earlier versions. Out: one validated object, which
is also the options object of the loop. Begin with ``training.py``.
"""
