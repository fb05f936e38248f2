"""transformers, the independent model, beside an installed torch_npu.

It imports torch_npu wherever that is installed, which fails on a machine
without CANN; so here it is told that there is none.
"""

import transformers.utils
import transformers.utils.import_utils


def _no_npu(check_device: bool = False) -> bool:
    return False


for _module in (transformers.utils, transformers.utils.import_utils):
    _module.is_torch_npu_available = _no_npu
