"""The kernels through the compiler of triton-ascend 3.2, as far as it goes without CANN: what it takes, it prints.

The interpreter runs any Python; the compiler's front end takes what is Triton.  A process of its own imports this, by
`interpreter.compiled`: Triton decides when it is imported whether kernels are interpreted.
"""

from typing import Any

from triton._C.libtriton import ir
from triton.backends.ascend.compiler import AscendBackend
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from mla_fx.backends.kernels import exchange

PACK = {"RANKS": 8, "OWN": 16, "WIDTH": 8192, "BLOCK": 4096, "OWN_BLOCK": 16, "TURNS": 2}
MERGE = {"RANKS": 8, "LATENT": 512, "ROWS": 8, "BLOCK": 512, "TURNS": 2}
#: Kernel, what its pointers point to, its other arguments, which are numbers, its constants.
CALLS = [
    ("pack", "i16 i32 i16 i32", "pairs stride lse_stride", PACK),
    ("pack", "i32 i32 i32 i32", "pairs stride lse_stride", PACK),
    ("merge", "bf16 fp32 bf16 fp32 bf16", "rows stride lse_stride", MERGE),
    ("merge", "fp16 fp32 fp16 fp32 fp16", "rows stride lse_stride", MERGE),
    ("merge", "fp32 fp32 fp32 fp32 fp32", "rows stride lse_stride", MERGE),
]


def lower(name: str, pointers: str, numbers: str, constants: dict[str, Any]) -> str:
    """To linear algebra, the last stage that the wheel has by itself."""
    kernel = getattr(exchange, name)
    types = [f"*{kind}" for kind in pointers.split()] + ["i32"] * len(numbers.split())
    assert kernel.arg_names[len(pointers.split()) : len(types)] == numbers.split()
    source = ASTSource(kernel, dict(zip(kernel.arg_names, types, strict=False)), constants=constants)
    backend = AscendBackend(GPUTarget("npu", "Ascend910B", 0))
    options, context = backend.parse_options({}), ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    module = source.make_ir(options, backend.get_codegen_implementation(), backend.get_module_map(), context)
    stages: dict[str, Any] = {}
    backend.add_stages(stages, options)
    told = dict(options.__dict__)
    return str(stages["ttadapter"](stages["ttir"](module, told), told))


def taken() -> list[str]:
    """Those of `CALLS` that come out as linear algebra or moved memory."""
    texts = {f"{name} {pointers.split()[0]}": lower(name, pointers, *rest) for name, pointers, *rest in CALLS}
    return [call for call, text in texts.items() if "linalg" in text or "memref" in text]
