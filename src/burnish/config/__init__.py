"""Options, their conversion from text, registries and errors. Imports nothing else of burnish.

Begin with ``options.py``: how an option is declared; ``errors.py`` holds ``Problem`` and ``UserError``.
"""
