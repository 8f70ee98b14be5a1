"""Makes torchvision importable beside a build of torch that it was not built for, before the peers are imported.

TRL and LLaMA-Factory read the images of Qwen's models through a processor that needs torchvision. Its Python code runs
beside any torch; its own compiled operators, of which image processors use none, are what does not load. Their shapes
are declared in ``torchvision._meta_registrations``, which is left empty here.
"""

import sys
from pathlib import Path
from types import ModuleType

sys.path.append(str(Path(__file__).parents[1] / ".bench" / "torchvision"))
sys.modules.setdefault("torchvision._meta_registrations", ModuleType("torchvision._meta_registrations"))
