"""FSDP: the backend and its settings."""
