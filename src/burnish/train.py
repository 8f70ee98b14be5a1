"""``python -m burnish.train --stage sft ...``: the same as ``burnish train``, for torchrun and for older scripts."""

import sys

from burnish.cli import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
