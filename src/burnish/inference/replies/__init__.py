"""Generated ids to text, reasoning and tool calls, and the grammars that constrain them."""
