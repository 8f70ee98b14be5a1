"""Parse generated ids into text, reasoning and tool calls; grammars that constrain generation."""
