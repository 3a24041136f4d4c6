"""No damaged file is a traceback, a hang or a large allocation: mutations of every file that Scrimp reads.

Each test prints its seed. SCRIMP_SEED repeats a run, SCRIMP_MUTATION one mutation of it (a number from 0),
SCRIMP_MUTATIONS sets how many there are, and SCRIMP_MUTATION_TABLE names a file for the run's table, as Markdown.
"""

from __future__ import annotations

import os
import random
import resource
import secrets
import signal
import sys
import time
import traceback
from collections import Counter
from pathlib import Path
from types import FrameType

import pytest
from loaders import Loader, make_material

from scrimp.errors import ScrimpError

SECONDS = 10
"""How long one call may take."""
GROWTH = 2**19
"""KiB that the process may grow by in one call."""


class HangError(BaseException):
    """A call took longer than `SECONDS`."""


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Loader]]:
    folder = tmp_path_factory.mktemp("material")
    return folder, make_material(folder)


def numbers(default: int) -> tuple[int, list[int]]:
    seed = int(os.environ.get("SCRIMP_SEED") or secrets.randbits(32))
    one = os.environ.get("SCRIMP_MUTATION")
    count = int(os.environ.get("SCRIMP_MUTATIONS") or default)
    return seed, [int(one)] if one else list(range(count))


def mutated(seed: int, number: int, loaders: list[Loader], folder: Path) -> tuple[Loader, str, bytes]:
    dice = random.Random(f"{seed} {number}")
    loader = loaders[number % len(loaders)]
    kind = dice.choice(sorted(loader.changes))
    return loader, kind, loader.changes[kind](dice, (folder / loader.file).read_bytes())


def failure(loader: Loader, folder: Path) -> str | None:
    """What went wrong; None where the file was read, or refused in words."""

    def ring(number: int, frame: FrameType | None) -> None:
        raise HangError

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    old = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        loader.load(folder)
    except ScrimpError as error:
        if len(str(error)) > 10_000:
            return f"a message of {len(str(error)):,} characters: {str(error)[:200]}"
    except HangError:
        return f"more than {SECONDS} s: " + traceback.format_exc(limit=-2)[-400:]
    except BaseException:
        return traceback.format_exc()[-1200:]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return f"{grown >> 10:,} MiB more" if grown > GROWTH else None


@pytest.mark.slow
def test_no_mutation_is_a_traceback(
    material: tuple[Path, list[Loader]], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, loaders = material
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    seed, order = numbers(10_000)
    print(f"\nseed {seed}", file=sys.__stdout__, flush=True)
    tried: Counter[tuple[str, str]] = Counter()
    bad: dict[int, tuple[str, str, str]] = {}
    for loader in loaders:
        assert failure(loader, folder) is None, f"{loader.file}: whole, and refused"
    for number in order:
        loader, kind, content = mutated(seed, number, loaders, folder)
        path = folder / loader.file
        whole = path.read_bytes()
        try:
            path.write_bytes(content)
            found = failure(loader, folder)
        finally:
            path.write_bytes(whole)
        tried[loader.file, kind] += 1
        if found is not None:
            bad[number] = (loader.file, kind, found)
    write_table(seed, tried, bad)
    shown = "\n\n".join(f"mutation {number}: {' / '.join(what)}" for number, what in list(bad.items())[:8])
    assert not bad, f"seed {seed}: {len(bad)} of {len(order)}\n{shown}"


@pytest.mark.slow
def test_no_mutation_is_a_traceback_of_the_command(
    material: tuple[Path, list[Loader]], tmp_path: Path
) -> None:
    folder, loaders = material
    loaders = [loader for loader in loaders if loader.words]
    seed, order = numbers(300)
    print(f"\nseed {seed}", file=sys.__stdout__, flush=True)
    bad = []
    for number in order:
        loader, kind, content = mutated(seed, number, loaders, folder)
        path = folder / loader.file
        whole = path.read_bytes()
        (folder / "out.py").unlink(missing_ok=True)
        try:
            path.write_bytes(content)
            code, told = in_a_child(
                [word.replace("{}", str(folder)) for word in loader.words], tmp_path / "told"
            )
        finally:
            path.write_bytes(whole)
        if code not in (0, 2) or "Traceback" in told:
            bad.append(f"mutation {number}: {loader.file} / {kind}: exit code {code}\n{told[-800:]}")
    assert not bad, f"seed {seed}: {len(bad)} of {len(order)}\n" + "\n\n".join(bad[:8])


def in_a_child(words: list[str], told: Path) -> tuple[int, str]:
    """Exit code and output of a command in a fork of this process, which has imported everything."""
    from scrimp.cli import main

    child = os.fork()
    if child == 0:
        try:
            output = os.open(told, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(output, 1)
            os.dup2(output, 2)
            sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
            code = main(words)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        finally:
            os._exit(99)
    deadline = time.monotonic() + 60
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status), told.read_text(encoding="utf-8", errors="replace")
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return 98, "more than 60 s"
        time.sleep(0.002)


def write_table(seed: int, tried: Counter[tuple[str, str]], bad: dict[int, tuple[str, str, str]]) -> None:
    path = os.environ.get("SCRIMP_MUTATION_TABLE")
    if not path:
        return
    wrong = Counter((file, kind) for file, kind, _ in bad.values())
    files, kinds = (sorted({pair[place] for pair in tried}) for place in (0, 1))
    rows = [
        f"seed {seed}: {sum(tried.values()):,} mutations, {len(bad)} neither read nor refused in words",
        "",
    ]
    rows += ["| file | " + " | ".join(kinds) + " | all |", "| --- |" + " --- |" * (len(kinds) + 1)]
    for file in files:
        cells = [f"{wrong[file, kind]} / {tried[file, kind]}" if tried[file, kind] else "–" for kind in kinds]
        total = sum(tried[file, kind] for kind in kinds)
        rows.append(
            f"| {file} | " + " | ".join(cells) + f" | {sum(wrong[file, kind] for kind in kinds)} / {total} |"
        )
    Path(path).write_text("\n".join(rows) + "\n", encoding="utf-8")
