"""Exports of a trained model: merged, quantized, GGUF, with a Modelfile for Ollama."""
