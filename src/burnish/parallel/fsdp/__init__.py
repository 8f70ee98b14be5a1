"""FSDP: the engine and its settings."""
