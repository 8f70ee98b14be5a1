"""Text -> ids, word by word; a word that was tokenised before is looked up. In: texts, and a tokenizer that meets the
premises of ``premises.py``. Out: the tokenizer's own ids. Begin with ``reader.py``.
"""

from burnish.data.tokens.by_word.premises import lone_byte, words_of
from burnish.data.tokens.by_word.reader import Words, any_of

__all__ = ["Words", "any_of", "lone_byte", "words_of"]
