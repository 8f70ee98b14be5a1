"""Replace torchaudio, which LLaMA-Factory always imports but uses for audio only, by an empty module.

torchaudio is compiled for one build of torch and cannot be loaded with another; ``environments.py`` uninstalls it.
"""

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

_stand_in = ModuleType("torchaudio")
_stand_in.__spec__ = ModuleSpec("torchaudio", None)
sys.modules.setdefault("torchaudio", _stand_in)
