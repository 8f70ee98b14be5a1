"""``burnish api``: an HTTP server for OpenAI's chat and text completions."""
