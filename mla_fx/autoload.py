"""Import torch without the device backends that are installed beside it.

torch imports every such backend with itself, and torch_npu without CANN fails
to import: whoever has the wheel for the emulator could not import torch.  A
backend is imported where somebody asks for it (`mla_fx.backends.get`).  Where
torch was imported before, or the variable is set, nothing is changed.
"""

import os

_NAME = "TORCH_DEVICE_BACKEND_AUTOLOAD"

if _NAME in os.environ:
    import torch as torch
else:
    os.environ[_NAME] = "0"
    try:
        import torch as torch
    finally:
        del os.environ[_NAME]
