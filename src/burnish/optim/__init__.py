"""Optimizers, a file per family.

In:  groups of weights and the options. Out: an optimizer of torch's. Begin with ``builtin.py``, which has the registry.
Importing the package imports every file, and so registers them all; an optimizer's library is imported when the
optimizer is made.
"""

from importlib import import_module
from pkgutil import iter_modules

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")
