"""The plan of a run: options are read from YAML and the command line, merged, and checked."""
