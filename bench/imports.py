"""Measure the time to import libraries, the lower bound of every start.

    python bench/imports.py torch transformers.models.qwen2.modeling_qwen2

Takes names of modules and prints the line of ``gauge.py`` with processor time, wall time and memory after the imports.
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
