"""Data of the ``Trainer``: loaders, streams with a cursor, and generation for evaluation."""
