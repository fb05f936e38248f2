"""The operators' entry points, as assembly: each jumps through a slot that Python fills.

The wheel looks operators up by name and calls them with whatever arguments
the operator has, in registers and on the stack.  A jump leaves all of that
where the caller put it, so one trampoline serves every signature:

    aclnnX:    number := i;  load slots[i];  jump to it

An operator that is not emulated has `absent_operator` in its slot, which calls
`emulator_absent(number)`, and whose own caller then gets an error at once.

x86-64 is tested; aarch64 follows its procedure call standard (x16 and x17 may
be used between a caller and its callee) and has not been run.
"""

from collections.abc import Sequence

from mla_fx.effects import InputError

_JUMPS = {
    "x86_64": ["movl ${number}, %r10d", "movq operator_slots@GOTPCREL(%rip), %r11", "jmp *{offset}(%r11)"],
    "aarch64": [
        "mov x17, #{number}",
        "adrp x16, :got:operator_slots",
        "ldr x16, [x16, :got_lo12:operator_slots]",
        "ldr x16, [x16, #{offset}]",
        "br x16",
    ],
}
_ABSENT = {
    "x86_64": ["movq %r10, %rdi", "jmp emulator_absent@PLT"],
    "aarch64": ["mov x0, x17", "b emulator_absent"],
}
#: An aarch64 load reaches 4096 words; the offset would need another instruction beyond.
_MOST = {"x86_64": 2**28, "aarch64": 4096}


def assembly(names: Sequence[str], machine: str) -> str:
    """Assembly that defines `names` and the slots behind them; raises `InputError` for an unknown machine."""
    if machine not in _JUMPS:
        raise InputError(f"machine: the emulator can be built on {' and '.join(_JUMPS)}: got {machine}")
    if len(names) > _MOST[machine]:
        raise InputError(f"operators: {machine} has entry points for at most {_MOST[machine]}: got {len(names)}")
    lines = [".text"]
    lines += [".globl absent_operator", ".type absent_operator, %function", "absent_operator:"]
    lines += [f"  {line}" for line in _ABSENT[machine]]
    for index, name in enumerate(names):
        jump = [line.format(number=index, offset=8 * index) for line in _JUMPS[machine]]
        lines += [f".globl {name}", f".type {name}, %function", f"{name}:", *(f"  {line}" for line in jump)]
    size = 8 * len(names)
    lines += [".bss", ".balign 8", ".globl operator_slots", ".type operator_slots, %object"]
    lines += [f".size operator_slots, {size}", "operator_slots:", f"  .zero {size}"]
    lines += ['.section .note.GNU-stack,"",%progbits', ""]
    return "\n".join(lines)
