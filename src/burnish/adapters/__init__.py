"""Adapters select the weights that are trained: full, freeze, LoRA, or a method of the peft library.

In:  a model and the options. Out: the model with its trainable weights, and later the adapter's files. Begin with
``base.py``, then ``lora.py``. Importing the package imports and registers all adapters.
"""

from importlib import import_module
from pkgutil import iter_modules

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")
