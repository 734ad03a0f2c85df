"""The two modules that all scripts share: packing (prefix-shared batches, attention, log-probs) and kl.

Importing this package also mends one installation trap, see below; nothing else happens at import.
"""

import importlib.util
import sys

import torch


def _mend_torchvision() -> torch.library.Library | None:
    """Make `import torchvision` work beside a CPU-only torch.

    PyPI's Linux wheel of torchvision links CUDA libraries. Without them its operators stay unregistered and the import dies
    with `operator torchvision::nms does not exist`, and with it every transformers image processor. The Python part is all
    that is needed here, and it only asks that the two operator *schemas* exist. With a CUDA (or ROCm) torch, or a
    torchvision whose own operators load, this does nothing.
    """
    if torch.version.cuda or torch.version.hip or importlib.util.find_spec("torchvision") is None:
        return None
    try:
        import torchvision  # noqa: F401

        return None
    except RuntimeError as error:
        if "torchvision::nms" not in str(error):
            raise
    for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
        del sys.modules[name]  # the half-imported package
    library = torch.library.Library("torchvision", "DEF")
    library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library


_TORCHVISION_SCHEMAS = _mend_torchvision()  # the schemas live as long as this object
