"""Checkpoints: the parts of a run on disk, with a manifest, without pickles."""
