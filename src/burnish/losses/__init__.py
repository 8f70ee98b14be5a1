"""Training objectives, one file per kind: language models, pairs, KTO labels, rewards.

In:  examples, and later micro-batches with the model. Out: rows; sums of losses, and the number of items that they
share. Begin with ``lm.py``; ``base.py`` defines the interface. Importing the package imports and registers all
objectives.
"""

from importlib import import_module
from pkgutil import iter_modules

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")
