"""Put this folder on PYTHONPATH to run vLLM beside a CPU-only torch.

vLLM inspects models in child processes, which import torchvision. There, too, the operators that it requires must be
defined before (see common/__init__.py).
"""

import sys
from pathlib import Path


class ImportCommonFirst:
    def find_spec(self, name, path=None, target=None):
        if name == "torchvision":
            sys.meta_path.remove(self)
            sys.path.append(str(Path(__file__).parents[2]))
            import common  # noqa: F401


sys.meta_path.insert(0, ImportCommonFirst())
