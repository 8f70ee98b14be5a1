"""Arithmetic of burnish's own. In: tensors. Out: tensors; tests compare every file with plain operations of torch.
Begin with ``cross_entropy.py`` (the head and its loss) and ``attention.py`` (padding-free attention); ``lora.py`` has
the LoRA product. ``cpu`` holds what only a CPU gains by.
"""
