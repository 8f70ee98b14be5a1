"""burnish's own numerical operations. In: tensors. Out: tensors; tests compare every module with plain torch
operations. Begin with ``cross_entropy.py`` (the head and its loss) and ``attention.py`` (padding-free attention);
``lora.py`` has the LoRA product. ``cpu`` has operations that are only useful on a CPU.
"""
