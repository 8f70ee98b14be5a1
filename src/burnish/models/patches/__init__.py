"""Patches of a model's forward passes: padding-free attention, fused layers, Liger kernels."""
