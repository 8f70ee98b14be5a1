"""Tools and tool calls: JSON in records, text formats of model families, and parsers of calls."""
