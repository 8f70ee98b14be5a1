"""``burnish export``: merge a model and its adapters, quantize it, write GGUF and a Modelfile for Ollama.

Begin with ``export.py``.
"""
