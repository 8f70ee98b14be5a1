"""Runs as their folders describe them: states, logs, series and remarks."""
