"""``python -m burnish``: the same as the command ``burnish``."""

import sys

from burnish.cli import main

if __name__ == "__main__":
    sys.exit(main())
