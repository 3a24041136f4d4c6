"""JSON of unknown origin as typed values: bounded, strict, and refused by file and key.

Problem  A file may be damaged, edited by hand or made to harm: a list nested 100,000 deep, an integer of
         5,000 digits, 1e999, a text where a number belongs, a fifo that never ends. `json.loads` and a
         chain of ``int(raw["key"])`` fail on each of these in a way of their own, mostly a traceback.
Method   The size is bounded before anything is read. msgspec decodes straight into the dataclass that the
         caller names, so that memory is bounded by the file, and the first misfit ends the work. It does so
         twice: first into a strict twin of the dataclass, made once, in which integers have 64 bits,
         texts and names hold no control characters, and keys that no field has are refused; then into
         the dataclass itself. A misfit becomes the caller's `ScrimpError` with file, key and value.
Limits   The last of two equal keys counts. What stands at a key that no field has (in foreign files, with
         ``closed=False``) is only looked through for its syntax. Below a field typed `Any` only depth and
         integers are bounded. In files above 4 MiB a misfit is named without the keys of plain
         objects (``[...]``) and without its value.
Checked  tests/test_json_files.py, and with mutated files of every loader in tests/hostile/
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
import math
import re
import types
import typing
from collections.abc import Hashable, Iterable
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeVar

import msgspec

from scrimp.errors import ScrimpError
from scrimp.files import read_bounded

Positive = Annotated[float, msgspec.Meta(gt=0)]
NotNegative = Annotated[float, msgspec.Meta(ge=0)]
MAX_DEPTH: Final = 64
"""Levels of nested lists and objects; what Scrimp writes has less than ten."""
MAX_DIGITS: Final = 100
"""Digits of an integer below a field typed `Any`; a float can hold it, too."""

T = TypeVar("T")
_Integer = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
_Text = Annotated[str, msgspec.Meta(pattern=r"\A[^\x00-\x08\x0b-\x1f\x7f-\x9f]*\Z")]
_UNSEEN: Final[Any] = object()
_LARGEST: Final = 10**MAX_DIGITS
_SCALARS: Final = (str, float, bool, type(None))
_LOOK_AGAIN: Final = 2**22
_SHOWN: Final = 60


def read_json(
    path: Path,
    kind: type[T],
    *,
    error: type[ScrimpError],
    do: str,
    at_most: int,
    closed: bool = True,
    version: tuple[str, int] | None = None,
) -> T:
    """The content of a JSON file as `kind`: a dataclass, or a type such as ``dict[str, int]``.

    Args:
        error: raised for a file that is missing, too large or no regular file, and as by `decode_json`.
        do: its advice.
        at_most: bytes beyond which the file must be something else.
        closed, version: as for `decode_json`.
    """
    content = read_bounded(path, error=error, do=do, at_most=at_most)
    return decode_json(content, kind, origin=str(path), error=error, do=do, closed=closed, version=version)


def decode_json(
    content: bytes | str,
    kind: type[T],
    *,
    origin: str,
    error: type[ScrimpError],
    do: str,
    closed: bool = True,
    version: tuple[str, int] | None = None,
) -> T:
    """JSON whose size the caller has bounded, as `kind`.

    Args:
        origin: the name of the file in errors.
        error: raised for what is not JSON, and for a key or value that does not fit.
        do: its advice.
        closed: whether keys that no field has are refused; else they are passed over.
        version: a key beside the fields, and its only value: asked first, since another version has other keys.
    """
    twin = _twin(typing.cast(Hashable, kind), closed, version and version[0])
    try:
        if version is not None:
            _check_version(content, version, origin, error, do)
        msgspec.json.decode(content, type=twin)
        value = msgspec.json.decode(content, type=kind)
        excess = _excess(value)
    except msgspec.ValidationError as problem:
        raise _misfit(content, twin, str(problem), origin, error, do) from None
    except RecursionError:
        excess = ("", f"more than {MAX_DEPTH} levels of lists and objects")
    except (msgspec.DecodeError, UnicodeError) as problem:
        raise error(f"{origin} is not JSON", got=_syntax(content, problem), do=do) from None
    if excess is not None:
        where, got = excess
        raise error(_named(origin, f"${where}") + " cannot be read", got=got, do=do)
    return value


def as_typed(value: object, kind: type[T], *, origin: str, error: type[ScrimpError], do: str) -> T:
    """Plain values that came out of JSON or TOML, as `kind`, by the rules of `decode_json`. NaN and infinities are
    floats, dates no texts."""
    twin = _twin(typing.cast(Hashable, kind), True)
    try:
        msgspec.convert(value, twin)
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as problem:
        raise _misfit(json.dumps(value, default=str), twin, str(problem), origin, error, do) from None


def decode_loosely(content: bytes | str) -> object:
    """JSON as plain values, for readers that show whatever can be shown.

    NaN, infinities and integers of more than 64 bits are None.

    Raises:
        ValueError: not JSON, or nested deeper than `MAX_DEPTH`.
    """
    try:
        value: object = json.loads(
            content,
            parse_constant=lambda _: None,
            parse_int=_integer,
        )
        excess = _excess(value)
    except RecursionError:
        excess = ("", f"more than {MAX_DEPTH} levels of lists and objects")
    if excess is not None:
        raise ValueError(excess[1])
    return value


def finite(value: Any) -> Any:
    """`value`, of which JSON is made, with None for floats that JSON cannot write (NaN, infinities)."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _check_version(
    content: bytes | str, version: tuple[str, int], origin: str, error: type[ScrimpError], do: str
) -> None:
    key, expected = version
    head = msgspec.defstruct("Head", [(key, Any, None)])
    found = getattr(msgspec.json.decode(content, type=head), key)
    if found != expected or isinstance(found, bool):
        wanted = f"{json.dumps(key)}: {expected}"
        raise error(f"{origin} has another version", got=_shown(found), expected=wanted, do=do)


# -- strict twins ------------------------------------------------------------------------------


@functools.cache
def _twin(kind: Hashable, closed: bool, version: str | None = None) -> Any:
    """`kind` with integers, texts and names bounded, and dataclasses without room for unknown keys if `closed`.

    Args:
        version: a key beside the fields.
    """
    if kind in (int, str):
        return _Integer if kind is int else _Text
    if dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind, include_extras=True)
        fields: list[Any] = [] if version is None else [(version, Any)]
        for field in dataclasses.fields(kind):
            is_required = field.default is field.default_factory is dataclasses.MISSING
            twin = _twin(hints[field.name], closed)
            fields.append((field.name, twin) if is_required else (field.name, twin, None))
        return msgspec.defstruct("Twin", fields, kw_only=True, forbid_unknown_fields=closed)
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is None or origin is Literal:
        return kind
    if origin is Annotated:
        return Annotated[(_twin(inner[0], closed), *inner[1:])]
    inner = tuple(part if part is Ellipsis else _twin(part, closed) for part in inner)
    return functools.reduce(lambda a, b: a | b, inner) if origin is types.UnionType else origin[inner]


def _excess(value: object, depth: int = MAX_DEPTH) -> tuple[str, str] | None:
    """Key and reason of the first thing below a field typed `Any` that is out of bounds."""
    if isinstance(value, int):
        return None if abs(value) < _LARGEST else ("", f"an integer of more than {MAX_DIGITS} digits")
    if isinstance(value, dict):
        inner: Iterable[tuple[object, object]] = value.items()
    elif isinstance(value, list | tuple):
        inner = enumerate(value)
    elif dataclasses.is_dataclass(value):
        inner = ((field.name, getattr(value, field.name)) for field in dataclasses.fields(value))
    else:
        return None
    if depth == 0:
        return "", f"more than {MAX_DEPTH} levels of lists and objects"
    for key, item in inner:
        # A vocabulary has a hundred thousand numbers, and as many pairs of texts.
        if type(item) in _SCALARS or (type(item) is int and -_LARGEST < item < _LARGEST):
            continue
        found = _excess(item, depth - 1)
        if found is not None:
            return _step(key) + found[0], found[1]
    return None


# -- errors ------------------------------------------------------------------------------------


def _misfit(
    content: bytes | str, twin: Any, problem: str, origin: str, error: type[ScrimpError], do: str
) -> ScrimpError:
    """The error for a key or value that does not fit, from msgspec's words for it."""
    message, _, at = problem.partition(" - at ")
    key, value, kind = _find(content, twin, at)
    where = _named(origin, key)
    keys = re.fullmatch(r"Object (missing required|contains unknown) field `(.*)`", message, re.DOTALL)
    if keys:
        how = "unknown" if keys[1] == "contains unknown" else "missing"
        known = list(_fields(kind))
        near = difflib.get_close_matches(keys[2], known, 1) if how == "unknown" else []
        return error(
            f"{where} has the wrong keys",
            got=f"{how} {_step(keys[2]).removeprefix('.')}",
            expected=", ".join(known),
            do=f"did you mean {near[0]}? Else {do}" if near else do,
        )
    got = None if value is _UNSEEN else _shown(value)
    wrong = re.fullmatch(r"Expected `(.*?)`, got `(.*?)`", message)
    if wrong:
        return error(
            f"{where} has the wrong type",
            got=got or wrong[2],
            expected=wrong[1].replace(" | ", " or "),
            do=do,
        )
    if message.startswith("Invalid enum"):
        allowed = " or ".join(map(repr, typing.get_args(kind)))
    elif "out of range" in message:
        allowed = "a number that 64 bits can hold"
    else:
        allowed = "text without control characters" if "matching regex" in message else message
    allowed = allowed.removeprefix("Expected ").replace("`", "")
    return error(f"{where} cannot be read", got=got, expected=allowed, do=do)


def _find(content: bytes | str, kind: Any, at: str) -> tuple[str, object, Any]:
    """Key, value and strict type of the place that msgspec calls ``$.shards[...][0]``: it leaves out names."""
    try:
        # Not msgspec: it would not get past a number out of range.
        is_small = len(content) <= _LOOK_AGAIN
        value = json.loads(content, parse_int=_number, parse_float=_number) if is_small else _UNSEEN
    except (ValueError, RecursionError):
        value = _UNSEEN
    key = "$"
    for name, number in re.findall(r"\.(\w+)|\[(\d+|\.\.\.)\]", at):
        kind = _container(kind)
        step: str | int = int(number) if number.isdecimal() else name
        if number == "...":
            kind = (*typing.get_args(kind), Any, Any)[1]
            rows = value if isinstance(value, dict) else {}
            step = next((name for name, row in rows.items() if not _fits(row, kind)), number)
        elif number:
            kind = next(iter(typing.get_args(kind)), None)
        else:
            kind = _fields(kind).get(name)
        key += "[...]" if step == "..." else _step(step)
        try:
            value = value[step]
        except (LookupError, TypeError):
            value = _UNSEEN  # too large to be looked at, or one of two equal keys
    if at.startswith("`key`"):
        kind = (*typing.get_args(_container(kind)), _Text)[0]
        value = (
            next((name for name in value if not _fits(name, kind)), _UNSEEN)
            if isinstance(value, dict)
            else value
        )
        return f"{key}, a name in it,", value, kind
    return key, value, kind


def _number(text: str) -> int | float | str:
    """A number, or its text where no number of 64 bits can hold it."""
    if text.removeprefix("-").isdecimal():
        return text if (value := _integer(text)) is None else value
    return float(text) if math.isfinite(float(text)) else text


def _integer(text: str) -> int | None:
    """An integer of 64 bits; None for a longer one."""
    value = int(text) if len(text) <= 20 else 2**63
    return value if -(2**63) <= value < 2**63 else None


def _fits(value: object, kind: Any) -> bool:
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError:
        return False
    return True


def _container(kind: Any) -> Any:
    """The type of an object or list out of ``X | None`` or an annotated type."""
    if typing.get_origin(kind) is Annotated:
        return _container(typing.get_args(kind)[0])
    if typing.get_origin(kind) in (types.UnionType, typing.Union):
        members = [_container(member) for member in typing.get_args(kind)]
        return next((member for member in members if typing.get_args(member) or _fields(member)), None)
    return kind


def _fields(kind: Any) -> dict[str, Any]:
    kind = _container(kind)
    return {field.name: field.type for field in msgspec.structs.fields(kind)} if _is_struct(kind) else {}


def _is_struct(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def _named(origin: str, key: str) -> str:
    return origin if key == "$" else f"{origin}: {key}"


def _step(key: object) -> str:
    """One step of a path: a number in brackets, a name behind a dot, any other text as JSON writes it."""
    if isinstance(key, int):
        return f"[{key}]"
    return f".{key}" if re.fullmatch(r"[\w.\-]{1,100}", str(key), re.ASCII) else f"[{_shown(key)}]"


def _shown(value: object) -> str:
    """A value as JSON writes it, shortened, without bytes that could reach a terminal."""
    if isinstance(value, dict | list):
        return (
            f"an object with {len(value):,} keys"
            if isinstance(value, dict)
            else f"a list of length {len(value):,}"
        )
    text = json.dumps(value[:_SHOWN] if isinstance(value, str) else value)
    return text if len(text) <= _SHOWN + 2 else text[:_SHOWN] + "…"


def _syntax(content: bytes | str, problem: Exception) -> str:
    """What is wrong with text that is not JSON, and in which line."""
    raw = content if isinstance(content, bytes) else content.encode(errors="replace")
    try:
        raw.decode()
    except UnicodeDecodeError:
        # msgspec says so in ways that differ from version to version.
        return "bytes that are not UTF-8"
    what, _, offset = str(problem).removeprefix("JSON is malformed: ").partition(" (byte ")
    if not offset:
        return f"{len(raw):,} bytes; {what[:1].lower()}{what[1:]}"
    before = raw[: int(offset.rstrip(")"))].split(b"\n")
    return f"{what} in line {len(before)}, byte {len(before[-1]) + 1}"
