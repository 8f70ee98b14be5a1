"""Optimizers: a file per family. Importing the package imports every file, and so registers them all; a library is
imported when one is made."""

from importlib import import_module
from pkgutil import iter_modules

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")
