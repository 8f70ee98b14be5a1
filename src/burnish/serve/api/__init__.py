"""``burnish api``: a server with OpenAI's chat and text completions."""
