"""Files made worse, each by one change that a seed decides: of JSON by its structure, of any file by its bytes."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

Change = Callable[[random.Random, bytes], bytes]
_RAW = "@raw@"
_TWIN = "@twin@"


def _render(value: object) -> bytes:
    """JSON, with texts that begin with `_RAW` as they stand, and keys that begin with `_TWIN` a second time."""
    text = json.dumps(value, indent=1)
    head, *parts = text.split(f'"{_RAW}')
    for part in parts:
        raw, _, rest = part.partition('"')
        head += raw.replace("'", '"') + rest
    return head.replace(f'"{_TWIN}', '"').encode()


def _places(value: object) -> list[tuple[Any, Any]]:
    """Every (container, key) of a document."""
    found: list[tuple[Any, Any]] = []
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in pairs:
        found += [(value, key), *_places(item)]
    return found


def _with_value(make: Callable[[random.Random, Any], Any]) -> Change:
    """Another value at one place."""

    def change(dice: random.Random, content: bytes) -> bytes:
        document = {"top": json.loads(content)}
        container, key = dice.choice(_places(document))
        container[key] = make(dice, container[key])
        return _render(document["top"])

    return change


def _with_keys(edit: Callable[[random.Random, dict[str, Any], str], None]) -> Change:
    """Other keys in one object."""

    def change(dice: random.Random, content: bytes) -> bytes:
        document = json.loads(content)
        places = [(holder, key) for holder, key in _places([document]) if isinstance(holder, dict)]
        if not places:
            return b"{}"
        edit(dice, *dice.choice(places))
        return _render(document)

    return change


def _nested(dice: random.Random, _: object) -> str:
    depth = dice.choice([40, 65, 200, 900, 1100, 5000, 100_000])
    is_list, is_open = dice.random() < 0.5, dice.random() < 0.2
    start, end = ("[", "]") if is_list else ("{'a':", "}")
    return _RAW + start * depth + ("" if is_open else ("" if is_list else "0") + end * depth)


def _number(dice: random.Random, _: object) -> str:
    digits = "9" * dice.choice([19, 20, 40, 400, 5000])
    tokens = [
        digits,
        "-" + digits,
        digits + ".0",
        "1e999",
        "-1e999",
        "1e-999",
        "NaN",
        "Infinity",
        "-Infinity",
    ]
    return _RAW + dice.choice(tokens)


def _size(dice: random.Random, _: object) -> int | float:
    return dice.choice(
        [0, -1, 1, 2**31, 2**31 - 1, 2**40, 2**53, 2**62, 2**63 - 1, -(2**63), 10**9, 0.5, 1e308]
    )


def _type(dice: random.Random, old: object) -> object:
    values: list[object] = [
        None,
        True,
        False,
        0,
        7,
        -1.5,
        "",
        "text",
        "7",
        [],
        {},
        [1],
        {"a": 1},
        [[]],
        [None],
    ]
    return dice.choice([value for value in values if type(value) is not type(old)])


def _text(dice: random.Random, old: object) -> str:
    odd = [
        "\0",
        "\x1b[2J",
        "\x7f",
        "\x9b",
        "\u202e",
        "\ufeff",
        "é",
        "\U0001f600",
        "\ud800",
        "/",
        "..",
        "../x",
        "%s{}",
        "\r\n",
    ]
    text = old if isinstance(old, str) else "name"
    where = dice.randint(0, len(text))
    return dice.choice(
        [text[:where] + dice.choice(odd) + text[where:], dice.choice(odd), text * 50, "x" * 10**6]
    )


def _rename(dice: random.Random, holder: dict[str, Any], key: str) -> None:
    holder[_text(dice, key)[:1000]] = holder.pop(key)


def _twin(dice: random.Random, holder: dict[str, Any], key: str) -> None:
    holder[_TWIN + key] = dice.choice([holder[key], _type(dice, holder[key]), _number(dice, None)])


def _extra(dice: random.Random, holder: dict[str, Any], key: str) -> None:
    holder[dice.choice(["more", "", "__class__", "a" * 1000, key + "s"])] = dice.choice(
        [1, {}, _nested(dice, None)]
    )


def _flip(dice: random.Random, content: bytes) -> bytes:
    changed = bytearray(content)
    for _ in range(dice.choice([1, 1, 2, 8])):
        changed[dice.randrange(min(len(changed), dice.choice([64, 4096, len(changed)])))] ^= (
            1 << dice.randrange(8)
        )
    return bytes(changed)


def _spliced(dice: random.Random, content: bytes) -> bytes:
    junk = dice.choice(
        [b"\0" * 9, b"\xff\xfe", b"\xef\xbb\xbf", b"}", b"[" * 9, b"\n", dice.randbytes(20), b'"']
    )
    where = dice.choice([0, len(content), dice.randint(0, len(content))])
    return content[:where] + junk + content[where:]


def _other(dice: random.Random, content: bytes) -> bytes:
    whole = [
        b"",
        b"\0",
        b"null",
        b"[]",
        b"{}",
        b"0",
        b'""',
        b"{",
        b"\xff" * 100,
        b"[" * 10**5,
        b"1" * 5000,
        b"\n" * 10**6,
    ]
    return dice.choice([*whole, content + content, content.upper()])


STRUCTURAL: dict[str, Change] = {
    "nested deeply": _with_value(_nested),
    "number out of range": _with_value(_number),
    "size": _with_value(_size),
    "type": _with_value(_type),
    "text": _with_value(_text),
    "key missing": _with_keys(lambda dice, holder, key: holder.__delitem__(key)),
    "key renamed": _with_keys(_rename),
    "key twice": _with_keys(_twin),
    "key added": _with_keys(_extra),
}
BYTES: dict[str, Change] = {
    "truncated": lambda dice, content: content[: dice.randrange(len(content))],
    "bits flipped": _flip,
    "bytes inserted": _spliced,
    "another content": _other,
}


def of_json_lines(change: Change) -> Change:
    """The change in one line of a file of JSON lines."""

    def changed(dice: random.Random, content: bytes) -> bytes:
        lines = content.splitlines()
        number = dice.randrange(len(lines))
        lines[number] = change(dice, lines[number]).replace(b"\n", b" ")
        return b"\n".join(lines) + b"\n"

    return changed


def of_safetensors(change: Change, metadata: str = "") -> Change:
    """The change in a safetensors file's header, or in JSON that its metadata hold under a key."""

    def changed(dice: random.Random, content: bytes) -> bytes:
        size = int.from_bytes(content[:8], "little")
        header, body = content[8 : 8 + size], content[8 + size :]
        if metadata:
            parsed = json.loads(header)
            inner = change(dice, parsed["__metadata__"][metadata].encode())
            parsed["__metadata__"][metadata] = inner.decode("utf-8", "replace")
            header = json.dumps(parsed).encode()
        else:
            header = change(dice, header)
        return len(header).to_bytes(8, "little") + header + body

    return changed
