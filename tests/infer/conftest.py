"""Makes the helpers beside the other tests importable from this room."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
