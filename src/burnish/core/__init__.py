"""The loop and its nouns. Imports torch and the standard library only."""
