"""The loop and its nouns. Imports torch, safetensors and the standard library only.

In: an assembled ``Run``. Out: trained weights, a state, checkpoints, events. Begin with
``loop.py``, which is the whole of training; ``types.py`` has the nouns, ``run.py`` the parts, ``checkpoint.py`` what
outlives the process, ``options.py`` how every option is declared.
"""
