"""DeepSpeed: its settings, its engine, and the conversion of its shards for checkpoints."""
