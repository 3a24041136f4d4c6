"""Two documents become pairs to train on; what is in no other language, or no document, does not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from ciphers import ciphered, english

from scrimp.cli import main
from scrimp.data import parallel_text
from scrimp.data.find_source import open_source
from scrimp.data.parallel_text import Profile, mine, read_sentences, sentences_in
from scrimp.data.streams import Meter
from scrimp.errors import DataError


def documents(folder: Path, count: int = 300) -> tuple[Path, Path, set[tuple[str, str]]]:
    """A text, its cipher, and the pairs that are right."""
    text = ciphered(english(count), 1)
    one, other = folder / "english.txt", folder / "cipher.txt"
    one.write_text("\n".join(text.source), encoding="utf-8")
    other.write_text("\n".join(text.target), encoding="utf-8")
    right = set[tuple[str, str]]()
    for pair in text.pairs:  # what is merged is two sentences again where it is read
        own = "\n".join(text.source[pair.source : pair.source + pair.sources])
        theirs = "\n".join(text.target[pair.target : pair.target + pair.targets])
        right |= set(zip(sentences_in(own), sentences_in(theirs), strict=True))
    return one, other, right


def test_the_command_writes_pairs_that_are_right_and_read_as_a_source(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, other, right = documents(tmp_path)
    out = tmp_path / "pairs.jsonl"
    assert main(["align", str(one), str(other), str(out)]) == 0
    rows = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    found = {(row["source"], row["target"]) for row in rows}
    both = len(found & right)
    print(f"precision {both / len(found):.3f}, recall {both / len(right):.3f}")
    assert 2 * both / (len(found) + len(right)) >= 0.95
    assert f"{out}: {len(rows):,} pairs of " in capsys.readouterr().out
    texts = list(open_source(str(out), "text").texts(Meter()))
    assert texts == [f"{row['source']}\n{row['target']}" for row in rows]
    before = out.read_bytes()
    assert main(["align", str(one), str(other), str(out)]) == 2
    assert "exists already" in capsys.readouterr().err
    assert out.read_bytes() == before


def test_a_profile_knows_its_language_by_sentences_that_it_has_not_seen() -> None:
    text = ciphered(english(400), 2)
    own, other = Profile(text.source[:200]), Profile(text.target[:200])
    right = [own.likeness(one) > other.likeness(one) for one in text.source[200:]]
    right += [other.likeness(one) > own.likeness(one) for one in text.target[200:]]
    assert sum(right) >= 0.98 * len(right)
    first = text.source[0]
    assert own.likeness(first, within=True) == pytest.approx(
        Profile(text.source[1:200]).likeness(first), rel=0.05
    )


def test_what_nobody_translated_is_left_out(tmp_path: Path) -> None:
    one, other, _ = documents(tmp_path)
    quoted = sentences_in(one.read_text(encoding="utf-8"))[100]
    lines = other.read_text(encoding="utf-8").splitlines()
    lines[40:40] = [quoted] * 3
    other.write_text("\n".join(lines), encoding="utf-8")
    assert quoted not in {target for _, target, _ in mine(one, other).kept}


@pytest.mark.parametrize(("words", "goes"), [(2, False), (3, True), (9, True), (27, True), (28, False)])
def test_a_pair_is_left_out_where_its_lengths_are_too_far_from_those_of_the_documents(
    words: int, goes: bool
) -> None:
    """Documents of equal lengths; one of three times as many words has pairs of as many more."""
    nine = " ".join("abcdefghi")
    assert parallel_text._go_together((nine, " ".join("x" * words)), 1.0) is goes
    assert parallel_text._go_together((" ".join("x" * words), nine), 1.0) is goes
    assert parallel_text._go_together((nine, " ".join("x" * (3 * words))), 3.0) is goes


def test_a_pair_is_left_out_where_a_side_reads_like_the_other_language() -> None:
    text = ciphered(english(400), 2)
    for pair in text.pairs[:20]:
        own = text.source[pair.source : pair.source + pair.sources]
        theirs = text.target[pair.target : pair.target + pair.targets]
        assert parallel_text._are_in((own, theirs), (Profile(text.source), Profile(text.target)))
        quoted = Profile(text.source), Profile([*text.target, *own])
        assert not parallel_text._are_in((own, own), quoted)
        quoted = Profile([*text.source, *theirs]), Profile(text.target)
        assert not parallel_text._are_in((theirs, theirs), quoted)


def test_sentences_end_with_lines_and_marks_and_are_normalised() -> None:
    text = "One.  Two \u00a0words!\tThree?\r\n\r\n---\nＦｏｕｒ１ ﬁve\n你好。再见！ok"
    assert sentences_in(text) == ["One.", "Two words!", "Three?", "Four1 five", "你好。", "再见!", "ok"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "holds no words"),
        (b"\n --- \n", "holds no words"),
        (b"caf\xe9 au lait", "is not UTF-8 text"),
        (b"One sentence.\nAnd another one.", "are of too different lengths to be translations"),
        (None, "is missing"),
    ],
)
def test_documents_that_cannot_be_are_refused_by_name(
    content: bytes | None, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, other, _ = documents(tmp_path, 60)
    other.unlink()
    if content is not None:
        other.write_bytes(content)
    for words in ([str(one), str(other)], [str(other), str(one)]):
        assert main(["align", *words, str(tmp_path / "out.jsonl")]) == 2
        said = capsys.readouterr().err
        assert message in said
        assert str(other) in said
    assert not (tmp_path / "out.jsonl").exists()


def test_a_byte_order_mark_is_no_part_of_the_first_sentence(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfHello there.")
    assert read_sentences(tmp_path / "a.txt") == ["Hello there."]


def test_sentences_that_are_merged_are_kept_as_one_side_of_a_pair(tmp_path: Path) -> None:
    """Two sentences of one language beside one of the other, whose marks would end it are gone."""
    text = ciphered(english(300), 3)
    one, other = tmp_path / "one.txt", tmp_path / "other.txt"
    one.write_text("\n".join(text.source), encoding="utf-8")
    merged = [line.replace(". ", ", ") for line in text.target]
    other.write_text("\n".join(merged), encoding="utf-8")
    kept = mine(one, other).kept
    doubles = [source for source, _, _ in kept if len(sentences_in(source)) > 1]
    assert len(doubles) >= 3
    assert len(kept) >= 200


def test_a_document_of_one_endless_sentence_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "one.txt"
    path.write_text("word " * 1001, encoding="utf-8")
    with pytest.raises(DataError, match="has an implausibly long sentence"):
        read_sentences(path)
