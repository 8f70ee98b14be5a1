"""The time to import libraries, which nobody's start can be below.

    python bench/imports.py torch transformers.models.qwen2.modeling_qwen2

In: names of modules. Out: the line of ``gauge.py`` with processor time, wall time and memory once they are imported.
"""

from __future__ import annotations

import sys
from importlib import import_module

from gauge import Gauge

if __name__ == "__main__":
    for name in sys.argv[1:]:
        import_module(name)
    gauge = Gauge()
    gauge.on_step_begin()
    gauge.report()
