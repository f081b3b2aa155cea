"""Loads the installed torchvision beside a CPU build of torch.

PyPI's torchvision is built against CUDA, so its compiled operators never register on a CPU build of torch and its import
fails on their missing names. The two that it names at import are declared here, then the real package takes this
module's place.
"""

import os
import sys

import torch

if not hasattr(torch.ops.torchvision, "nms"):
    torch._torchvision_names = torch.library.Library("torchvision", "FRAGMENT")  # kept alive: names go with it
    for _name in ("nms", "qnms"):
        torch._torchvision_names.define(_name + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

_here = os.path.dirname(os.path.abspath(__file__))
for _path in sys.path:
    _folder = os.path.join(os.path.abspath(_path or "."), "torchvision")
    if _folder != _here and os.path.isfile(os.path.join(_folder, "__init__.py")):
        __path__ = [_folder]
        __file__ = os.path.join(_folder, "__init__.py")
        with open(__file__) as _source:
            exec(compile(_source.read(), __file__, "exec"))
        break
else:
    raise ImportError("torchvision is not installed")
