"""Speed of `scrimp prepare` against the same tokenizer called in a plain loop.

Subject  The whole pipeline: read the source, cut, hash, split, encode, write shards with
         checksums, fsync, manifest. The tokenizer is a BPE trained once before, so that its
         training is in neither figure. Every repeat writes into a new folder.
Peer     The same files in memory before the clock starts, the same tokenizer (the same
         tokenizer.json, the same setting for special tokens), one `encode` after the other, the
         delimiter put in front, ids gathered in one array in memory. No file is read or written.
Fair     In turn in one process (subject, peer, subject, peer, …), the same documents, and the
         same tokens: the two are compared token by token before anything is timed.

    python benchmarks/prepare.py                       the standard library
    python benchmarks/prepare.py --text FILE           a text file as well (may be repeated)
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import tokenizers
from environment import RESULTS, cpu_name, facts, markdown_table, num_cores, write_pair

from scrimp.data import CorpusSpec, open_corpus, prepare
from scrimp.data.documents import Document, documents
from scrimp.data.find_source import open_source
from scrimp.data.streams import Meter

COLUMNS = ("source", "MB", "tokens", "prepare, tokens/s", "plain loop, tokens/s", "ratio")


def plain_loop(texts: list[str], tokenizer: tokenizers.Tokenizer, delimiter: int, dtype: str) -> np.ndarray:
    """What one would write first: every document through `encode`, all ids in one array."""
    parts = []
    for text in texts:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        parts.append(np.array([delimiter, *ids], dtype=dtype))
    return np.concatenate(parts)


def timed(work: Callable[[], object]) -> float:
    """Seconds that `work` takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def measure(source: str, vocab_size: int, repeats: int, scratch: Path) -> dict[str, object]:
    """Both sides on one source, in turn."""
    texts: list[Document] = list(documents(open_source(source, "text").texts(Meter())))
    first = scratch / "first"
    prepare(CorpusSpec(source=source, tokenizer="bpe", bpe_vocab_size=vocab_size), first, progress=False)
    spec = CorpusSpec(source=source, tokenizer=str(first / "tokenizer"))
    corpus = open_corpus(CorpusSpec(source=str(first)), cache=None)
    tokenizer = tokenizers.Tokenizer.from_file(str(first / "tokenizer" / "tokenizer.json"))
    tokenizer.encode_special_tokens = True
    delimiter, dtype = corpus.tokenizer.delimiter_id, corpus.tokenizer.dtype.str
    assert corpus.manifest.split is not None
    trained = [part.text for part in corpus.manifest.split.parts(texts) if not part.held_out]
    train = plain_loop(trained, tokenizer, delimiter, dtype)
    assert np.array_equal(train, corpus.train.read(0, corpus.train.num_tokens)), "the two sides differ"
    num_tokens = corpus.train.num_tokens + corpus.held_out.num_tokens

    all_texts = [text.text for text in texts]
    seconds: dict[str, list[float]] = {"prepare": [], "plain loop": []}
    for repeat in range(repeats):
        out = scratch / f"out-{repeat}"
        seconds["prepare"].append(timed(lambda out=out: prepare(spec, out, progress=False)))
        seconds["plain loop"].append(timed(lambda: plain_loop(all_texts, tokenizer, delimiter, dtype)))
        shutil.rmtree(out)
    shutil.rmtree(first)
    rates = {side: [num_tokens / value for value in values] for side, values in seconds.items()}
    ratios = [loop / ours for ours, loop in zip(seconds["prepare"], seconds["plain loop"], strict=True)]
    name = source if source == "stdlib" else Path(source).name
    return {
        "source": name,
        "text_bytes": sum(text.num_bytes for text in texts),
        "documents": len(texts),
        "tokens": num_tokens,
        "tokens_per_s": {side: spread(values) for side, values in rates.items()},
        "ratio": spread(ratios),
        "seconds": seconds,
    }


def spread(values: list[float]) -> dict[str, float]:
    """Median, least and most."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def hardware() -> dict[str, object]:
    """What the figures depend on."""
    return {"cpu": cpu_name(), "cores": num_cores(), "load_before": os.getloadavg()[0]}


def table(report: dict) -> str:
    """The report in Markdown."""
    rows = []
    for result in report["results"]:
        cells = [result["source"], f"{result['text_bytes'] / 1e6:.1f}", f"{result['tokens']:,}"]
        for side in ("prepare", "plain loop"):
            value = result["tokens_per_s"][side]
            cells.append(f"{value['median']:,.0f} ({value['min']:,.0f} to {value['max']:,.0f})")
        ratio = result["ratio"]
        cells.append(f"{ratio['median']:.2f} ({ratio['min']:.2f} to {ratio['max']:.2f})")
        rows.append(cells)
    machine, versions = report["hardware"], report["versions"]
    return "\n".join(
        [
            "# Speed of `scrimp prepare`",
            "",
            "The whole pipeline (read, cut, hash, encode, write shards with checksums, fsync) against the same",
            "tokenizer in a plain loop over texts in memory. Measured, in turn in one process;",
            f"median (least to most) of {report['repeats']} repeats; BPE with {report['vocab_size']:,} tokens.",
            "",
            *markdown_table(COLUMNS, rows),
            "",
            f"- Command: `{report['command']}`",
            f"- Commit: {report['commit']}",
            f"- Hardware: {machine['cpu']}, {machine['cores']} cores, load {machine['load_before']:.1f} before",
            f"- Versions: {', '.join(f'{name} {version}' for name, version in versions.items())}",
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="speed of scrimp prepare against a plain loop")
    parser.add_argument(
        "--text", type=Path, action="append", default=[], help="a text file to measure as well"
    )
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--vocab-size", type=int, default=4096)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results")
    arguments = parser.parse_args()
    found = facts("tokenizers", "numpy")
    report = {
        "benchmark": "prepare",
        "date": datetime.date.today().isoformat(),
        "command": found["command"],
        "commit": found["commit"],
        "hardware": hardware(),
        "versions": found["versions"] | {"system": f"{platform.system()} {platform.release().split('-')[0]}"},
        "repeats": arguments.repeats,
        "vocab_size": arguments.vocab_size,
        "results": [],
    }
    with tempfile.TemporaryDirectory(prefix="scrimp-benchmark-") as scratch:
        for source in ["stdlib", *map(str, arguments.text)]:
            print(f"measuring {source}", file=sys.stderr)
            report["results"].append(measure(source, arguments.vocab_size, arguments.repeats, Path(scratch)))
    write_pair(arguments.out, f"{report['date']}-prepare", report, table(report))
    print(table(report))


if __name__ == "__main__":
    main()
