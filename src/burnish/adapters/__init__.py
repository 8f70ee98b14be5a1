"""Adapters choose the weights that are trained: full, freeze, LoRA, or a method of the peft library.

In:  a model and the options. Out: the model with the weights that train, and later its adapter's files. Begin with
     ``base.py``, then ``lora.py``. Importing the package imports every file in it, and so registers them all.
"""

from importlib import import_module
from pkgutil import iter_modules

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")
