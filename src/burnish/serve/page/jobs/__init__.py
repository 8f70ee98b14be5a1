"""Processes that the web UI starts: runs, exports, inference servers, the planner."""
