"""Runs as read from their folders: states, logs, metrics and warnings."""
