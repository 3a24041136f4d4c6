"""Every way in which a JSON file can be wrong is one error, with the file, the key and what to do."""

from __future__ import annotations

import os
import re
import tracemalloc
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

from scrimp.errors import DataError, PlanError
from scrimp.json_files import MAX_DEPTH, decode_json, finite, read_json


@dataclass(frozen=True)
class Shard:
    name: str
    num_tokens: int
    seconds: float | None = None


@dataclass(frozen=True)
class Corpus:
    kind: Literal["text", "code"]
    splits: dict[str, list[Shard]] = field(default_factory=dict)
    stages: tuple[int, ...] = ()
    best: Shard | None = None
    settings: dict[str, Any] = field(default_factory=dict)


WHOLE = """{"kind": "text", "splits": {"held-out": [], "train": [{"name": "a", "num_tokens": 3, "seconds": 2}]},
 "stages": [1, 2], "best": null, "settings": {"share": 0.1}}"""


def decode(text: str | bytes, kind: Any = Corpus, **options: Any) -> Any:
    return decode_json(text, kind, origin="corpus.json", error=DataError, do="prepare it again", **options)


def refusal(text: str | bytes, kind: Any = Corpus, **options: Any) -> str:
    with pytest.raises(DataError) as caught:
        decode(text, kind, **options)
    assert caught.value.do is not None
    assert caught.value.do.endswith("prepare it again")
    assert not re.search(r"[\x00-\x1f\x7f-\x9f]", str(caught.value))
    return str(caught.value)


def test_a_whole_file_becomes_its_dataclass() -> None:
    found = decode(WHOLE)
    assert found == Corpus(
        "text", {"held-out": [], "train": [Shard("a", 3, 2.0)]}, (1, 2), None, {"share": 0.1}
    )
    assert isinstance(found.splits["train"][0].seconds, float)
    assert decode('{"kind": "code"}') == Corpus("code")


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ('"num_tokens": 3', '"num_tokens": "3"', '$.splits.train[0].num_tokens has the wrong type - got "3"'),
        ('"num_tokens": 3', '"num_tokens": true', "got true, expected int"),
        ('"num_tokens": 3', '"num_tokens": 3.0', "got 3.0, expected int"),
        ('"num_tokens": 3', '"num_token": 3', "$.splits.train[0] has the wrong keys - got unknown num_token"),
        ('"num_tokens": 3', '"num_token": 3', "did you mean num_tokens? Else prepare"),
        (', "num_tokens": 3', "", "got missing num_tokens, expected name, num_tokens, seconds"),
        ('"num_tokens": 3', f'"num_tokens": {"9" * 5000}', "corpus.json: $.splits.train[0].num_tokens cannot"),
        ('"num_tokens": 3', f'"num_tokens": {2**63}', "$.splits.train[0].num_tokens cannot be read - got \"9223"),
        ('"seconds": 2', '"seconds": 1e999', "$.splits.train[0].seconds cannot be read - got \"1e999"),
        ('"seconds": 2', '"seconds": NaN', "corpus.json is not JSON - got invalid character in line 1, byte "),
        ('"seconds": 2', '"seconds": Infinity', "corpus.json is not JSON"),
        ('"name": "a"', '"name": "a\\u0000"', r'$.splits.train[0].name cannot be read - got "a\u0000"'),
        ('"name": "a"', '"name": "a\\u001b[2J"', "expected text without control characters"),
        ('"train"', '"tr\\u0000"', r'$.splits, a name in it, cannot be read - got "tr\u0000"'),
        ('"name": "a"', '"name": "\\ud800"', "corpus.json is not JSON"),
        ('"text"', '"tex"', '$.kind cannot be read - got "tex", expected \'text\' or \'code\''),
        ("[1, 2]", "[1, null]", "$.stages[1] has the wrong type - got null, expected int"),
        ('"best": null', '"best": {"name": 1, "num_tokens": 1}', "$.best.name has the wrong type - got 1"),
        ('"best": null', '"best": {"odd": 1, "name": "a", "num_tokens": 1}', "$.best has the wrong keys"),
        ('"share": 0.1', f'"share": {"[" * 100 + "]" * 100}', "more than 64 levels"),
        ('"share": 0.1', f'"share": {"[" * 10**6}', "more than 64 levels"),
        ('"share": 0.1', f'"share": {{"a b": [0, {10**100}]}}', '$.settings.share["a b"][1] cannot be read'),
        ('"share": 0.1', '"share": 1e999', "a number that 64 bits can hold"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named(old: str, new: str, told: str) -> None:
    assert WHOLE.count(old) == 1
    told_instead = refusal(WHOLE.replace(old, new))
    assert told.lower() in told_instead.lower()
    assert len(told_instead) < 500


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "got 0 bytes"),
        (b"{", "got 1 bytes"),
        (b"\xff\xfe{}", "not JSON"),
        (b'{"kind": "\xff"}', "bytes that are not UTF-8"),
        (b"\xef\xbb\xbf{}", "not JSON"),
        (b"\0" * 100, "not JSON"),
        (b"[]", "has the wrong type - got a list of length 0, expected object"),
        (b"null", "got null, expected object"),
        (b"1" * 5000, "cannot be read"),
        (WHOLE.encode() + b"x", "trailing characters in line 2"),
    ],
)
def test_what_is_no_object_is_refused(content: bytes, told: str) -> None:
    assert told in refusal(content)


def test_where_anything_may_stand_integers_may_have_more_than_64_bits() -> None:
    for value in (2**63, -(2**64), 10**30, int(1e30), 10**100 - 1):
        assert decode(WHOLE.replace("0.1", str(value))).settings == {"share": value}
    assert "more than 100 digits" in refusal(WHOLE.replace("0.1", str(-(10**100))))


def test_every_truncation_is_refused() -> None:
    whole = WHOLE.encode()
    for length in range(len(whole)):
        assert "corpus.json is not JSON" in refusal(whole[:length])


def test_foreign_files_may_have_keys_of_their_own() -> None:
    assert decode('{"kind": "text", "more": [{"x": null}]}', closed=False) == Corpus("text")
    assert "$.kind" in refusal('{"more": 1, "kind": 2}', closed=False)
    assert "more than 64 levels" in refusal('{"more": ' + "[" * 10**6, closed=False)


def test_the_second_of_two_equal_keys_counts_and_a_wrong_first_one_is_refused() -> None:
    assert decode('{"kind": "text", "kind": "code"}').kind == "code"
    assert "$.kind" in refusal('{"kind": 1, "kind": "code"}')
    assert "$.stages[1]" in refusal('{"kind": "text", "stages": [1, ""], "stages": []}')


def test_depth_is_bounded_where_anything_may_stand() -> None:
    def nested(levels: int) -> str:
        return "[" * levels + "]" * levels

    assert str(decode(nested(MAX_DEPTH), Any)) == nested(MAX_DEPTH)
    assert f"more than {MAX_DEPTH} levels" in refusal(nested(MAX_DEPTH + 1), Any)


def test_a_large_list_of_wrong_values_takes_no_memory() -> None:
    # A parser that collects every error takes about a kilobyte for each of these.
    content = b'{"kind": "text", "stages": [' + b'"",' * 10**6 + b"1]}"
    tracemalloc.start()
    try:
        assert "$.stages[0]" in refusal(content)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2**26


def test_the_size_is_bounded_before_anything_is_read(tmp_path: Path) -> None:
    path = tmp_path / "corpus.json"
    with open(path, "wb") as file:
        file.truncate(2**40)
    with pytest.raises(PlanError, match=r"too large - got 1,099,511,627,776 bytes, expected at most 1,000"):
        read_json(path, Corpus, error=PlanError, do="x", at_most=1000)
    path.write_text(WHOLE)
    assert read_json(path, Corpus, error=PlanError, do="x", at_most=1000) == decode(WHOLE)


def test_only_a_regular_file_is_read(tmp_path: Path) -> None:
    def told(path: Path) -> str:
        with pytest.raises(DataError) as caught:
            read_json(path, Corpus, error=DataError, do="prepare it again", at_most=1000)
        assert caught.value.do == "prepare it again"
        return str(caught.value)

    os.mkfifo(tmp_path / "pipe")
    assert "pipe cannot be read - got a named pipe instead of a file" in told(tmp_path / "pipe")
    assert "cannot be read - got Is a directory" in told(tmp_path)
    assert "got a device" in told(Path("/dev/zero"))
    assert "missing" in told(tmp_path / "none")
    assert "cannot be read" in told(Path("a\0b"))
    assert "cannot be read" in told(tmp_path / ("n" * 300))
    (tmp_path / "loop").symlink_to("loop")
    assert "cannot be read" in told(tmp_path / "loop")


def test_the_version_is_asked_before_anything_else() -> None:
    options: Any = {"version": ("scrimp_corpus", 2)}
    assert decode('{"scrimp_corpus": 2, "kind": "text"}', **options) == Corpus("text")
    for text in ('{"scrimp_corpus": 3, "other": 1}', '{"scrimp_corpus": true}', '{"kind": "text"}'):
        assert "corpus.json has another version - got" in refusal(text, **options)
    assert 'expected "scrimp_corpus": 2' in refusal('{"scrimp_corpus": null}', **options)
    assert "unknown kinds" in refusal('{"scrimp_corpus": 2, "kinds": "text"}', **options)
    assert "expected object" in refusal("[]", **options)


def test_what_json_cannot_write_becomes_null() -> None:
    given = {"a": (1, float("nan")), "b": {"c": float("-inf")}, "d": "NaN", "e": 0.5}
    assert finite(given) == {"a": [1, None], "b": {"c": None}, "d": "NaN", "e": 0.5}


def test_a_name_may_be_empty() -> None:
    assert '$.splits[""][0] has the wrong type' in refusal('{"kind": "text", "splits": {"": [1]}}')
    assert '$[""] has the wrong type' in refusal('{"a": 1, "": []}', dict[str, int])


def test_below_any_a_number_out_of_range_has_a_path_as_far_as_it_is_known() -> None:
    assert "number" in refusal('{"a": {"b": [{"c": 1e999}]}}', dict[str, Any])
    assert "number" in refusal('{"a": 1, "a": {"b": 1e999}, "a": 2}', dict[str, Any])
