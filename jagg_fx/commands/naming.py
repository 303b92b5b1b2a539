"""What a user names on the command line: `module:function`, or `file.py:function`."""

import contextlib
import difflib
import importlib
import importlib.util
import os
import re
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

PACKAGE = Path(__file__).parents[1]


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Within the block modules are found in the current directory first, as with `python -m`."""
    before = list(sys.path)
    sys.path.insert(0, os.getcwd())
    try:
        yield
    finally:
        sys.path[:] = before


def find(name: str) -> Any:
    """The object that `module:attribute` or `file.py:attribute` names; the attribute may be a path, `pipeline.transformer`.

    Raises:
        ValueError: there is none, or its module raised; the message is one line.
    """
    where, _, attribute = name.rpartition(":")
    if not where or not attribute:
        raise ValueError(f"{name}: write module:name or path/to/file.py:name.")
    found: Any = _module(where)
    for part in attribute.split("."):
        if not hasattr(found, part):
            near = (
                difflib.get_close_matches(part, dir(found), 1) or [each for each in vars(found) if each[0] != "_"][:9]
            )
            raise ValueError(f"{name}: there is no {part}. Write one of what is there: {', '.join(near)}.")
        found = getattr(found, part)
    return found


def _module(name: str) -> ModuleType:
    path = Path(name)
    if path.suffix == ".py" and not path.is_file():
        raise ValueError(
            f"{name}: there is no such file below {os.getcwd()}. Write the path of the file, or module:name."
        )
    try:
        return _run(path.resolve()) if path.suffix == ".py" else importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{name}.".startswith(f"{error.name}."):
            raise ValueError(
                f"{name}: there is no module {error.name} in {os.getcwd()}, nor installed. Write module:name as it is imported "
                "from here, or path/to/file.py:name."
            ) from error
        raise ValueError(f"importing {name} raised {told(error)}.") from error
    except (Exception, SystemExit) as error:
        raise ValueError(f"importing {name} raised {told(error)}.") from error


def _run(path: Path) -> ModuleType:
    """The module of a file, under a name that no other has: torch.compile looks modules up by their names."""
    name = re.sub(r"\W", "_", str(path))
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        sys.path.insert(0, str(path.parent))  # as `python file.py` does
        sys.modules[name] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(sys.modules[name])
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]


def told(error: BaseException) -> str:
    """An exception of the user's code in one line, with the place that raised it."""
    while type(error).__module__.startswith("torch.") and (inner := error.__cause__ or error.__context__):
        error = inner  # what the compiler wrapped
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not _is_machinery(frame.filename)]
    place = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {' '.join(str(error).split()).rstrip('.')}{place}"


def _is_machinery(file: str) -> bool:
    path = Path(file)
    return file.startswith("<") or PACKAGE in path.parents or not {"importlib", "site-packages"}.isdisjoint(path.parts)
