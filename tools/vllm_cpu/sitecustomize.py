"""Put this folder on PYTHONPATH to run vLLM beside a CPU-only torch.

vLLM looks at models in child processes, which import torchvision; PyPI's torchvision links CUDA libraries, and without them
its import asks for two operator schemas that nobody has registered (common/__init__.py tells the story). Here they are
registered when torchvision is first looked for, in whatever process that is.
"""

import sys


class DefineSchemas:
    def find_spec(self, name, path=None, target=None):
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch

            if not torch.version.cuda and not torch.version.hip:
                library = torch.library.Library("torchvision", "DEF")
                library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
                library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
                sys.torchvision_schemas = library  # they live as long as this object


sys.meta_path.insert(0, DefineSchemas())
