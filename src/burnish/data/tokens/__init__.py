"""Text -> ids. In: pieces of text, some of a template, some of a user. Out: ids; control tokens come from the template
alone. Begin with ``encoder.py``; ``by_word`` computes the same ids as the tokenizer, faster.
"""
