"""JSON files of a checkpoint directory."""

import json
from pathlib import Path
from typing import Any

from mla_fx.effects import InputError


def read_object(path: Path) -> dict[str, Any]:
    """The object in a file, an empty one where there is no file."""
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        raise InputError(f"{path}: must be a JSON object: {error}") from None
    if not isinstance(found, dict):
        raise InputError(f"{path}: must be a JSON object: got {type(found).__name__}")
    return found
