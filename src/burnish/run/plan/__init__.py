"""Options of a run: joined, read from YAML and the command line, checked, and decided in a ``Plan``."""
