"""Quantized weights: 4-bit or 8-bit base models for training, and GPTQ or AWQ exports."""
