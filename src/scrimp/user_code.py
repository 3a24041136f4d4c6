"""Code from the user's own file: ``--objective.name my.py:Loss`` loads the class Loss of my.py.

Problem  A setting that names code makes whatever file holds the setting a program. Settings files and run folders are
         handed on; nobody expects them to run something.
Method   A setting of `CODE_SETTINGS` whose value reads FILE.py:NAME names code. It is loaded within `trusting(True)`
         alone, which the command line's --trust-code enters and nothing else: it is no setting, stands in no file
         and is read from none. Everywhere else it is refused before anything of a run is written.
         What was hashed is what runs. A process keeps a file as it first read it, and refuses one that has
         changed since.
Digest   The SHA-256 of the file stands in run.json, and with it in every checkpoint's state. A resumed run whose file
         has changed is refused, like one whose other settings have changed: its losses would be of another loss.
Limits   The digest covers the file, not what the file imports; modules beside it are not found, installed ones are.
Checked  tests/test_user_code.py
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from scrimp.errors import ConfigError
from scrimp.files import read_bounded

MODEL_KIND = "model.kind"
CODE_SETTINGS = ("objective.name", "optimizer.name", MODEL_KIND)
"""Settings that may name code."""
_CODE = re.compile(r"(?P<file>.+\.py):(?P<name>[^\W\d]\w*)")
_LONGEST_FILE = 16 << 20
_trusted = False
_modules: dict[Path, tuple[types.ModuleType, str]] = {}
"""File to module and digest, of everything that this process has loaded."""


def is_code(value: object) -> bool:
    """Whether the value of a setting names code: FILE.py:NAME."""
    return isinstance(value, str) and _CODE.fullmatch(value) is not None


def code_in(settings: Mapping[str, Any]) -> dict[str, str]:
    """The settings that name code, by dotted key.

    Args:
        settings: values by dotted key.
    """
    return {key: settings[key] for key in CODE_SETTINGS if is_code(settings.get(key))}


@contextlib.contextmanager
def trusting(trusted: bool) -> Iterator[None]:
    """Inside, code that settings name may run, or may not."""
    global _trusted
    before, _trusted = _trusted, trusted
    try:
        yield
    finally:
        _trusted = before


def anchored(value: str) -> str:
    """FILE.py:NAME with the file's path from the root; any other value as it is."""
    file, name = _parts(value)
    return f"{file.expanduser().absolute()}:{name}"


def load(key: str, value: str, *, needs: Sequence[str] = ()) -> Any:
    """What the setting `key` names, FILE.py:NAME.

    Args:
        needs: attributes that it must have.

    Raises:
        ConfigError: it is not trusted, the file cannot be read or run, or what it names is missing or incomplete.
    """
    file, name = _parts(value)
    if not _trusted:
        raise ConfigError(
            f"{key} names code, which runs only where the command line says so",
            got=value,
            expected="--trust-code, given anew with each command; no file can say it",
            do="read the file, and add --trust-code if you trust it",
        )
    found = getattr(_module(key, file), name, None)
    missing = [one for one in needs if not hasattr(found, one)]
    if found is None or missing:
        what = f"{file} has no {name}" if found is None else f"{name} in {file} lacks {', '.join(missing)}"
        raise ConfigError(f"{key}: {what}", do="see the examples of own code in examples/")
    return found


def digests(settings: Mapping[str, Any]) -> dict[str, str]:
    """SHA-256 of the files that settings name code of, by dotted key: as they were loaded, else as they are now."""
    found = {}
    for key, value in code_in(settings).items():
        file = _parts(value)[0].expanduser().resolve()
        found[key] = _modules[file][1] if file in _modules else hashlib.sha256(_read(key, file)).hexdigest()
    return found


def _parts(value: str) -> tuple[Path, str]:
    match = _CODE.fullmatch(value)
    assert match is not None, "is_code was not asked"
    return Path(match["file"]), match["name"]


def _read(key: str, file: Path) -> bytes:
    if not file.is_file():
        raise ConfigError(
            f"{key}: there is no file {file}", expected="FILE.py:NAME", do="check the spelling of the path"
        )
    return read_bounded(file, error=ConfigError, do="give a file of Python code", at_most=_LONGEST_FILE)


def _module(key: str, file: Path) -> types.ModuleType:
    file = file.expanduser().resolve()
    source = _read(key, file)
    digest = hashlib.sha256(source).hexdigest()
    if file in _modules and _modules[file][1] != digest:
        raise ConfigError(
            f"{key}: {file} has changed since this process loaded it",
            expected="the same file for as long as a process lives",
            do="start the process anew (in a notebook: restart the kernel)",
        )
    if file not in _modules:
        # In sys.modules, since dataclasses and pickling look their module up there.
        module = types.ModuleType(f"scrimp_user_code_{digest[:16]}")
        module.__file__ = str(file)
        sys.modules[module.__name__] = module
        try:
            exec(compile(source, str(file), "exec"), module.__dict__)
        except (Exception, SystemExit) as error:
            del sys.modules[module.__name__]
            raise ConfigError(
                f"{key}: {file} cannot be run",
                got=f"{type(error).__name__}: {error}{_line_of(error, file)}",
                do="repair the file",
            ) from error
        _modules[file] = module, digest
    return _modules[file][0]


def _line_of(error: BaseException, file: Path) -> str:
    """Where in the user's file an error arose."""
    trace, line = error.__traceback__, None
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == str(file):
            line = trace.tb_lineno
        trace = trace.tb_next
    return f" (line {line})" if line is not None else ""
