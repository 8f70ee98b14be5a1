"""Quantized weights: bases in 4 or 8 bits for training, and GPTQ or AWQ exports."""
