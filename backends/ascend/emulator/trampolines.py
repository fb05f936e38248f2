"""The operators' entry points, as assembly: each jumps through a slot that Python fills.

The wheel looks operators up by name and calls them with whatever arguments
the operator has, in registers and on the stack.  A jump leaves all of that
where the caller put it, so one trampoline serves every signature:

    aclnnX:    load slots[i];  jump to it

x86-64 is tested; aarch64 follows its procedure call standard (x16 may be used
between a caller and its callee) and has not been run.
"""

from collections.abc import Sequence

from mla_fx.effects import InputError

_JUMPS = {
    "x86_64": ["movq operator_slots@GOTPCREL(%rip), %r11", "jmp *{offset}(%r11)"],
    "aarch64": [
        "adrp x16, :got:operator_slots",
        "ldr x16, [x16, :got_lo12:operator_slots]",
        "ldr x16, [x16, #{offset}]",
        "br x16",
    ],
}


def assembly(names: Sequence[str], machine: str) -> str:
    """Assembly that defines `names` and the slots behind them; raises `InputError` for an unknown machine."""
    if machine not in _JUMPS:
        raise InputError(f"machine: the emulator can be built on {' and '.join(_JUMPS)}: got {machine}")
    lines = [".text"]
    for index, name in enumerate(names):
        jump = [line.format(offset=8 * index) for line in _JUMPS[machine]]
        lines += [f".globl {name}", f".type {name}, %function", f"{name}:", *(f"  {line}" for line in jump)]
    size = 8 * len(names)
    lines += [".bss", ".balign 8", ".globl operator_slots", ".type operator_slots, %object"]
    lines += [f".size operator_slots, {size}", "operator_slots:", f"  .zero {size}"]
    lines += ['.section .note.GNU-stack,"",%progbits', ""]
    return "\n".join(lines)
