"""Files, JSON, progress, signals and the register of patches. Used by every other package."""
