"""Data of the ``Trainer``: loaders, streams with a cursor, and generation over an evaluation set."""
