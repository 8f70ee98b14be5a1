"""Make torchvision importable next to a build of torch that it was not compiled for.

TRL and LLaMA-Factory read images for Qwen's models with a processor that needs torchvision. Its Python code works with
any torch; its compiled operators, which image processors do not use, cannot be loaded.
``torchvision._meta_registrations`` declares their shapes and is replaced by an empty module. Import this module before
the libraries.
"""

import sys
from pathlib import Path
from types import ModuleType

sys.path.append(str(Path(__file__).parents[1] / ".bench" / "torchvision"))
sys.modules.setdefault("torchvision._meta_registrations", ModuleType("torchvision._meta_registrations"))
