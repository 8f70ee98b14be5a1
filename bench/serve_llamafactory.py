"""Run ``llamafactory-cli`` without torchaudio, which it imports first and which is not installed.

Takes the arguments of ``llamafactory-cli``.
"""

import without_torchaudio  # noqa: F401 - first, because LLaMA-Factory imports torchaudio without need
from llamafactory.cli import main

if __name__ == "__main__":
    main()
