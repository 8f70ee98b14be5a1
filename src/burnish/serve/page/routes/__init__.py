"""Further API routes of the web UI, one class per topic."""
