"""DeepSpeed: its settings, its engine, and its shards in checkpoints of burnish."""
