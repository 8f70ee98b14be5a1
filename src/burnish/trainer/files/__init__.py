"""Files of the ``Trainer``: models, checkpoints of transformers, model cards, the hub."""
