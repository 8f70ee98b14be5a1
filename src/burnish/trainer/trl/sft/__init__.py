"""``SFTTrainer`` and ``SFTConfig``. In: a data set in any of TRL's forms, a model or its name. Out: rows with labels,
and TRL's loss and metrics. Begin with ``trainer.py``; ``rows.py`` makes rows of a raw set.
"""
