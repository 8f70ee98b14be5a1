"""``llamafactory-cli`` without the library of sound that it imports before anything else, and which is not installed.

In: the words after ``llamafactory-cli``. Out: what it does.
"""

import without_media  # noqa: F401 - first, because LLaMA-Factory imports torchaudio where it needs none
from llamafactory.cli import main

if __name__ == "__main__":
    main()
