"""Engines: processes, devices, precision, memory. In: a module, an optimizer, losses. Out: the same on their
devices, gradients, updates. Begin with ``base.py``: plain torch on one device, the reference for every other engine.
"""
