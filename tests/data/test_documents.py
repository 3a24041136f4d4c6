"""Cutting loses nothing and does not depend on blocks."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from scrimp.data.documents import KIB, LONGEST_DOCUMENT, cut, documents, text_target

TEXTS = st.text(alphabet="ab \n\t\ré", max_size=400)


def in_blocks(text: str, size: int) -> list[str]:
    return [text[start : start + size] for start in range(0, len(text), size)]


@given(text=TEXTS, target=st.integers(1, 40), size=st.integers(1, 100))
def test_pieces_joined_are_the_text_whatever_the_blocks(text: str, target: int, size: int) -> None:
    whole = list(cut([text], target))
    assert "".join(whole) == text
    assert list(cut(in_blocks(text, size), target)) == whole
    assert all(len(piece) <= 4 * target for piece in whole)
    assert all(len(piece) >= target for piece in whole[:-1])


def test_a_piece_ends_at_a_blank_line_if_there_is_one() -> None:
    text = "one\ntwo\n\nthree\nfour\n \nfive\n"
    assert list(cut([text], 7)) == ["one\ntwo\n\n", "three\nfour\n \n", "five\n"]
    assert list(cut(["aaaa\nbbbb\ncccc\n"], 4)) == ["aaaa\n", "bbbb\n", "cccc\n"]


def test_a_piece_of_a_text_file_is_between_1_and_64_kib() -> None:
    assert text_target(100) == KIB
    assert text_target(256 * 2000) == 2000
    assert text_target(1 << 40) == 64 * KIB


def test_long_documents_are_cut_and_blank_ones_left_out() -> None:
    long = "x" * (3 * LONGEST_DOCUMENT)
    found = list(documents(["", " \n ", "a", long]))
    assert [len(document.text) for document in found][:1] == [1]
    assert "".join(document.text for document in found[1:]) == long
    assert all(len(document.text) <= 4 * LONGEST_DOCUMENT for document in found)
    assert found[0].num_bytes == 1
    assert next(iter(documents(["é"]))).num_bytes == 2
