"""``python -m burnish.train --stage sft ...`` is the same as ``burnish train``, for torchrun and for older scripts."""

import sys

from burnish.cli import command

if __name__ == "__main__":
    sys.exit(command(["train", *sys.argv[1:]]))
