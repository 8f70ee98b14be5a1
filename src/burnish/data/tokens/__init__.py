"""Text -> ids. In: pieces of text, some of a template, some of a user. Out: ids; control tokens come from the template
alone. Begin with ``encoder.py``.
"""
