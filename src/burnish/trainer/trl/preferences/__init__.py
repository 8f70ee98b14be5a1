"""``DPOTrainer``, ``KTOTrainer``, ``RewardTrainer``, ``ORPOTrainer``, ``CPOTrainer`` and their configs, as in TRL.

In: a dataset in any of TRL's formats, a model or its name. Out: rows of prompts and responses; the losses and metrics
of ``losses``, which the command line uses as well. Begin with ``trainer.py``. ``rows.py`` creates rows from a raw
dataset, ``config.py`` maps TRL's names to burnish's options.
"""
