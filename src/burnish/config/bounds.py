"""Limits for input from outside, so that no input can exhaust time or memory. Exceeding one is an error;
docs/security.md lists them for users.
"""

from __future__ import annotations

MOST_NODES, DEEPEST_NODE = 100_000, 100
"""Maximum number of values of a YAML file with expanded aliases (ten lines can expand beyond any memory), and maximum
depth."""

LARGEST_CONFIG_BYTES = 2**20
"""Maximum size of a file with options. Reading one of this size takes some seconds."""

RENDERING_S, RENDERING_BYTES, LONGEST_RENDERING = 10.0, 2**30, 2**26
"""Limits of a chat template per conversation: seconds, bytes of memory, and characters of output. A conversation of a
million words takes 0.1 seconds."""
SERVED_RENDERING_S = 2.0
"""The same limit in a server, where other requests wait for a rendering."""
FIRST_RENDERING_S = 0.25
"""The limit of the first attempt in a server. A rendering that exceeds it is repeated after those of other requests."""

LONGEST_RECORD = 16_000_000
"""Maximum number of characters of a record, about ten books. Time and memory grow linearly: 1.5 s and 200 MB per
million characters on one core."""

LONG_RECORD = 1_000_000
"""A record above this number of characters is named in the progress display, because encoding it takes seconds."""
