"""What the commands print."""

import json
import math
import re
from typing import Any


def print_json(value: Any) -> None:
    """One JSON object; null stands for a number that is not finite, which JSON does not have."""
    print(json.dumps(_finite(value), indent=1, allow_nan=False))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def visible(text: str) -> str:
    """Control characters as escapes, so that what comes from elsewhere can write to a terminal, but not command it."""
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]", lambda match: repr(match[0])[1:-1], text)
