"""``python -m burnish`` is the same as the command ``burnish``."""

import sys

from burnish.cli import command

if __name__ == "__main__":
    sys.exit(command())
