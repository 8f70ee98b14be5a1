"""Read files: path -> records, one at a time, with file and line for error messages. Begin with ``files.py``."""
