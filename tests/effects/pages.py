"""Tables on a page that a command prints: held against what it prints now, or written anew."""

import contextlib
import io
import re

from mla_fx.cli import main
from tests.test_imports import ROOT

PAGE = ROOT / "mla_fx" / "README.md"


def shown(option: str) -> re.Pattern[str]:
    """The command `mla-fx show` with an option and, behind it, the table that it prints."""
    return re.compile(rf"(?<=^```sh\n)(mla-fx show {option}\b[^\n]*)\n```\n\n((?:\|[^\n]*\n)+)", re.MULTILINE)


def printed(command: str) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert main(command.split()[1:]) == 0
    return out.getvalue()


def write_anew(option: str) -> None:
    """Replace the table by what the command prints."""
    PAGE.write_text(shown(option).sub(lambda found: f"{found[1]}\n```\n\n{printed(found[1])}", PAGE.read_text()))
