"""``python -m burnish.train --stage sft ...`` is the same as ``burnish train``, for torchrun and for older scripts."""

import sys

from burnish.__main__ import main

if __name__ == "__main__":
    sys.argv.insert(1, "train")
    sys.exit(main())
