"""Files of the ``Trainer``: models, checkpoints in transformers' format, model cards, the hub."""
