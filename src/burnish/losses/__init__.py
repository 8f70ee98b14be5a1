"""Training objectives, a file per kind: language models, pairs, verdicts, rewards.

In:  examples, and later micro-batches with a module of the model. Out: rows; sums of losses with the weight that they
     share. Begin with ``lm.py``; ``base.py`` is what each of them answers to. Importing the package imports every file,
     and so registers them all.
"""

from importlib import import_module
from pkgutil import iter_modules

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")
