"""``SFTTrainer`` and ``SFTConfig``. In: a dataset in any of TRL's formats, a model or its name. Out: rows with labels,
and TRL's loss and metrics. Begin with ``trainer.py``; ``rows.py`` creates rows from a raw dataset.
"""
