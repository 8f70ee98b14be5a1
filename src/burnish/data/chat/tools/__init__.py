"""Tools and tool calls in a template's format: descriptions, calls, and how calls are read."""
