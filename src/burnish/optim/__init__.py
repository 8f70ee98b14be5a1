"""Optimizers, one file per family.

In:  parameter groups and the options. Out: a torch optimizer. Begin with ``builtin.py``, which has the registry.
Importing the package imports and registers all optimizers. An optimizer's library is imported when the optimizer is
created.
"""

from importlib import import_module
from pkgutil import iter_modules

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")
