"""A small source is read once, a large one again for every pass; both give the same documents."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from scrimp.data import passes
from scrimp.data.passes import Passes
from scrimp.data.sources import Source
from scrimp.data.streams import Meter

TEXTS = [f"text {number} " * 50 for number in range(40)]


class Counted(Source):
    """Counts how many texts were asked for."""

    def __init__(self) -> None:
        super().__init__("counted")
        self.asked = 0

    def texts(self, meter: Meter) -> Iterator[str]:
        for text in TEXTS:
            self.asked += 1
            yield text

    def fingerprint(self) -> str:
        return "counted"


@pytest.mark.parametrize(("held_bytes", "times"), [(1 << 20, 1), (10_000, 3), (0, 3)])
def test_documents_are_held_as_far_as_memory_goes(
    monkeypatch: pytest.MonkeyPatch, held_bytes: int, times: int
) -> None:
    monkeypatch.setattr(passes, "HELD_BYTES", held_bytes)
    monkeypatch.setattr(passes, "host_memory_available", lambda: 0)
    source = Counted()
    text = Passes(source, progress=False)
    for _ in range(3):
        assert [document.text for document in text.read("reading")] == TEXTS
    assert source.asked == times * len(TEXTS)


@pytest.mark.parametrize(("available", "times"), [(1 << 20, 1), (10_000, 3)])
def test_an_eighth_of_the_free_memory_is_taken(
    monkeypatch: pytest.MonkeyPatch, available: int, times: int
) -> None:
    monkeypatch.setattr(passes, "HELD_BYTES", 0)
    monkeypatch.setattr(passes, "host_memory_available", lambda: available)
    source = Counted()
    text = Passes(source, progress=False)
    for _ in range(3):
        assert [document.text for document in text.read("reading")] == TEXTS
    assert source.asked == times * len(TEXTS)


def test_a_pass_that_ended_early_is_not_taken_for_the_whole() -> None:
    text = Passes(Counted(), progress=False)
    assert len(list(itertools.islice(text.read("reading"), 3))) == 3
    assert [document.text for document in text.read("reading")] == TEXTS


@pytest.mark.slow
def test_many_small_documents_count_with_what_they_take_beside_their_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import tracemalloc

    monkeypatch.setattr(passes, "HELD_BYTES", 1 << 20)
    monkeypatch.setattr(passes, "host_memory_available", lambda: 0)
    monkeypatch.setattr(f"{__name__}.TEXTS", [chr(97 + number % 26) for number in range(200_000)])
    text = Passes(Counted(), progress=False)
    tracemalloc.start()
    assert sum(1 for _ in text.read("reading")) == len(TEXTS)
    assert tracemalloc.get_traced_memory()[1] < 1.5 * (1 << 20)
    tracemalloc.stop()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="glibc gives heap back, and /proc tells")
def test_what_was_held_leaves_the_process(tmp_path: Path) -> None:
    """A run plans with the memory that is free when its text is prepared."""
    words = [f"{number:07d}" for number in range(20_000)]
    for name, count in (("small", 100), ("large", 20_000)):
        texts = (" ".join(words[number : number + 250]) for number in range(count))
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    script = (
        "import sys; from pathlib import Path; from scrimp.data import CorpusSpec, passes, prepare\n"
        "from scrimp.profiler.process_memory import resident_bytes\n"
        "passes.HELD_BYTES, folder = 1 << 20, Path(sys.argv[1])\n"
        "for name in ('small', 'large'):\n"
        "    before, source = resident_bytes(), str(folder / f'{name}.jsonl')\n"
        "    spec = CorpusSpec(source=source, tokenizer='bytes', held_out=0.0)\n"
        "    prepare(spec, folder / name, progress=False)\n"
        "print(resident_bytes() - before)\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(done.stdout) < 20 << 20, "the documents, of 40 MB, are still there"
