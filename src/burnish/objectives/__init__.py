"""What is learned, a file per kind. Importing this registers them all."""

from burnish.objectives import lm
from burnish.objectives.base import OBJECTIVES

__all__ = ["OBJECTIVES", "lm"]
