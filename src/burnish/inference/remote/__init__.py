"""Inference servers in other processes: vLLM, SGLang, or any that serves OpenAI's completions."""
