"""Inference servers in other processes: vLLM, SGLang, or any server with OpenAI's completions API."""
