"""API routes of the web UI beside those of runs and of the form, one class per topic."""
