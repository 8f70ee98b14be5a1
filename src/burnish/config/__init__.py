"""Options, their conversion from text, registries and errors. Imports nothing else of burnish.

Begin with ``options.py``, which declares options; ``errors.py`` holds ``Problem`` and ``UserError``.
"""
