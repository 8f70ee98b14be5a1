"""Encoded rows: encoded once and cached on disk, or encoded on the fly when streaming. Begin with ``encode.py``."""
