"""Triton's interpreter, which plays kernels on the host: that of triton-ascend 3.2, kept where only these tests look.

`python tests/backends/kernels/interpreter.py` gets it.  It installs the package
`triton`, which torch and transformers would find, if it were on the path, and
take for the one that they want.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.processes import Member

#: 54 MB; the second is what the first imports and does not ask for.
PACKAGES = ("triton-ascend==3.2.0", "pybind11==3.1.0")
SHELF = Path(sys.prefix) / "share" / "mla_fx" / "interpreted"
_KERNELS = "mla_fx.backends.kernels.exchange"


def install() -> None:
    """By pip."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--upgrade", "--target", str(SHELF)]
    subprocess.run([*command, *PACKAGES], check=True)


def why_not() -> str | None:
    """Why nothing can be interpreted here, None where it can."""
    if find_spec("triton") is not None:
        return "Triton's interpreter: there is a triton for a device, and two do not go into a process"
    if (SHELF / "triton").is_dir():
        return None
    return "Triton's interpreter: not there; python tests/backends/kernels/interpreter.py gets it"


@contextmanager
def interpreted() -> Iterator[None]:
    """With `triton` to be imported, and every kernel played on the host.  Once in a process: it is C++ inside."""
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"
    sys.path.insert(0, str(SHELF))
    try:
        yield
    finally:
        sys.path.remove(str(SHELF))
        for name in [name for name in sys.modules if name.partition(".")[0] == "triton" or name == _KERNELS]:
            del sys.modules[name]
        os.environ.pop("TRITON_INTERPRET")
        if before is not None:
            os.environ["TRITON_INTERPRET"] = before


def compiled(member: "Member") -> list[str]:
    """The kernels that the compiler takes, by name and first pointer; in a process that has loaded no triton."""
    assert "triton" not in sys.modules
    os.environ.pop("TRITON_INTERPRET", None)
    sys.path.insert(0, str(SHELF))
    from tests.backends.kernels import lowered

    return lowered.taken()


if __name__ == "__main__":
    install()
