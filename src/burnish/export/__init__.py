"""``burnish export``: merge a model and its adapters, quantize it, write GGUF files and a Modelfile for Ollama.

Begin with ``export.py``.
"""
