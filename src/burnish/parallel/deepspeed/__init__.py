"""DeepSpeed: its settings, its backend, and the conversion of its shards for checkpoints."""
