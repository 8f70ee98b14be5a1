"""``DPOTrainer``, ``KTOTrainer``, ``RewardTrainer``, ``ORPOTrainer``, ``CPOTrainer`` and their configs, as in TRL.

In: a data set in any of TRL's forms, a model or its name. Out: rows of prompts and answers, the losses and metrics of
``objectives``, which the command line has too. Begin with ``trainer.py``; ``rows.py`` makes rows of a raw set
(``records.py``), ``config.py`` leads TRL's names to burnish's options.
"""
