"""Archives that expand to thousands of times their size are read in bounded pieces."""

from __future__ import annotations

import gzip
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from backports import zstd

from scrimp.data.streams import Meter, text_blocks
from scrimp.errors import DataError

SIZE = 2**31
READ = """
import resource, sys
from pathlib import Path
from scrimp.data.streams import Meter, lines, text_blocks
limit = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
total = sum(len(block) for block in text_blocks(Path(sys.argv[1]), Meter()))
print(total, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - limit) * 1024)
"""


def write_bomb(path: Path) -> Path:
    """2 GiB of one letter: 66 kB as zstd, 2 MB as gzip."""
    block = b"a" * 2**24
    with zstd.open(path, "wb") if path.suffix == ".zst" else gzip.open(path, "wb", compresslevel=1) as file:
        for _ in range(SIZE // len(block)):
            file.write(block)
    return path


@pytest.mark.slow
@pytest.mark.parametrize("suffix", [".zst", ".gz"])
def test_what_an_archive_expands_to_is_never_held(tmp_path: Path, suffix: str) -> None:
    bomb = write_bomb(tmp_path / f"a.txt{suffix}")
    assert bomb.stat().st_size < SIZE / 200
    done = subprocess.run([sys.executable, "-c", READ, str(bomb)], capture_output=True, text=True, check=True)
    total, grown = map(int, done.stdout.split())
    assert total == SIZE
    assert grown < 2**27


def test_a_small_archive_cannot_ask_for_a_window_of_gigabytes(tmp_path: Path) -> None:
    path = tmp_path / "a.txt.zst"
    options = {
        zstd.CompressionParameter.window_log: 31,
        zstd.CompressionParameter.enable_long_distance_matching: 1,
    }
    compressor = zstd.ZstdCompressor(options=options)
    path.write_bytes(compressor.compress(b"text " * 1000) + compressor.flush())
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(DataError, match=r"window of more than 128 MiB.*zstd --decompress --long=31"):
        list(text_blocks(path, Meter()))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**17
