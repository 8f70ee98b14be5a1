"""The methods of a ``Trainer``, by subject."""
