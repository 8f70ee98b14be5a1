"""Language models of transformers. In: a name, a folder, a hub id. Out: a model in memory with its tokenizer, prepared
for training; and saved model folders for other programs. Begin with ``load.py`` and, for the output, ``save.py``.
"""
