"""Bounds on what is read from others, so that no input takes all time or all memory. Each is refused with a sentence
where it is exceeded; docs/security.md names them to users."""

from __future__ import annotations

MOST_NODES, DEEPEST_NODE = 100_000, 100
"""Values of a YAML file with its aliases written out, ten lines of which can stand for more than any memory holds; and
the depth to which they are nested."""

RENDERING_S, RENDERING_BYTES, LONGEST_RENDERING = 10.0, 2**30, 2**26
"""Time and memory of a chat template for one conversation, and the characters that it may make. One of a million words
takes a tenth of a second."""

LONGEST_RECORD = 16_000_000
"""Characters of a record, some ten books. Its time and memory grow with its length: on one core 1.5 s and 200 MB for
each million, however its words are cut."""

LONG_RECORD = 1_000_000
"""Characters of a record that is named while it is encoded, because that takes seconds."""
