"""Which weights move: full, freeze, LoRA, or a method of the peft library. Importing this registers them all."""

from burnish.adapters import freeze, full, lora, peft

__all__ = ["freeze", "full", "lora", "peft"]
