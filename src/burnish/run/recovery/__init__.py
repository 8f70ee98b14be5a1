"""Recovery: interrupts, failures, loss spikes, stalls and resuming."""
