"""Interrupts, failures, spikes and resume: what keeps a run safe when something goes wrong."""
