"""A stand-in for torchaudio, which LLaMA-Factory imports before it reads a line of text, and uses for audio only.

The real one is built for one build of torch and fails to load beside another; ``environments.py`` takes it out.
"""

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

_stand_in = ModuleType("torchaudio")
_stand_in.__spec__ = ModuleSpec("torchaudio", None)
sys.modules.setdefault("torchaudio", _stand_in)
