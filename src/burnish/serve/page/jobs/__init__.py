"""Processes that the page starts: runs, exports, models that answer, the planner."""
