"""What `scrimp doctor --ranks` found, as typed data: its file, and which links it calls slow.

The file lies in the user's cache beside the doctor's reports of devices, one for each set of hosts and devices. What is
known of ranks is found again by where they run, whatever numbers they have then.

Slow     Links are sorted by bandwidth; where one is less than `GAP` of the one before it, a tier ends. Whatever is
         below the first tier is slow. Where all links between some groups of ranks are slow, the groups are named,
         else the links.
Checked  tests/profiler/test_links_report.py
"""

from __future__ import annotations

import hashlib
import itertools
import json
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from scrimp.errors import DeviceError, StorageError
from scrimp.files import make_folder, read_bounded, user_cache, write_whole
from scrimp.json_files import NotNegative, decode_json
from scrimp.world import ranks_text

GAP = 0.5
MOST_NAMED = 8
_FORMAT = 1
"""Raised whenever the meaning of the file changes."""
MAX_FILE_BYTES = 2**24
Row = tuple[NotNegative, ...]
Link = tuple[int, int]


@dataclass(frozen=True)
class RankPlace:
    """Where a rank runs."""

    host: str
    device: str
    local_rank: int
    """Among those of its host."""


@dataclass(frozen=True)
class CollectiveRate:
    """One operation over all ranks."""

    operation: str
    num_bytes: int
    """Bytes of the whole tensor whose bandwidth was measured."""
    latency: NotNegative
    """Seconds of a few bytes."""
    bandwidth: NotNegative
    """Bytes per second that each rank sends, by a ring."""


@dataclass(frozen=True)
class RankLinks:
    """Latency and bandwidth between ranks."""

    backend: str
    torch: str
    places: tuple[RankPlace, ...]
    """In the order of ranks."""
    at_once: bool
    """Whether as many pairs as possible were measured at the same time."""
    latency: tuple[Row, ...]
    """Seconds of a small message from rank to rank; 0 on the diagonal."""
    bandwidth: tuple[Row, ...]
    """Bytes per second; 0 on the diagonal."""
    collectives: tuple[CollectiveRate, ...]

    def in_order(self, places: Sequence[RankPlace]) -> RankLinks:
        """The same links of ranks that are numbered otherwise."""
        at = [self.places.index(place) for place in places]
        return RankLinks(
            backend=self.backend,
            torch=self.torch,
            places=tuple(places),
            at_once=self.at_once,
            latency=tuple(tuple(self.latency[one][other] for other in at) for one in at),
            bandwidth=tuple(tuple(self.bandwidth[one][other] for other in at) for one in at),
            collectives=self.collectives,
        )

    def to_json(self) -> str:
        """The JSON text that `scrimp doctor --ranks --json` prints."""
        return json.dumps({"format": _FORMAT, **asdict(self)}, indent=1)

    @classmethod
    def from_json(cls, text: str | bytes, *, origin: str = "the report on links") -> RankLinks:
        """Read `to_json` back; `origin` names the file in errors.

        Raises:
            DeviceError: not such a text.
        """
        do = "run `scrimp doctor --ranks` again"
        found = decode_json(text, cls, origin=origin, error=DeviceError, do=do, version=("format", _FORMAT))
        size = len(found.places)
        rows = (found.latency, found.bandwidth)
        if any(len(matrix) != size or any(len(row) != size for row in matrix) for matrix in rows):
            raise DeviceError(f"{origin}: a matrix does not have a row and a column for each rank", do=do)
        if len(set(found.places)) != size or not all(found.bandwidth[a][b] > 0 for a, b in links_of(size)):
            raise DeviceError(f"{origin}: two ranks have one place, or a link has no bandwidth", do=do)
        return found


def links_of(ranks: int) -> Iterable[Link]:
    """All pairs of ranks."""
    return itertools.combinations(range(ranks), 2)


def cache_file(places: Iterable[RankPlace]) -> Path:
    """Where the report of these hosts and devices lies, in whatever order their ranks are."""
    where = sorted([one.host, one.device, one.local_rank] for one in places)
    digest = hashlib.sha256(json.dumps(where).encode()).hexdigest()[:16]
    return user_cache() / "doctor" / f"ranks-{len(where)}-{digest}.json"


def keep_links(links: RankLinks, tell: Callable[[str], None]) -> None:
    """Write a report to the cache; where that is not possible, say so and go on."""
    file = cache_file(links.places)
    try:
        make_folder(file.parent)
        write_whole(file, links.to_json(), shared=True)
    except StorageError as error:
        tell(f"the report is not kept: {error}")


def known_links(places: Sequence[RankPlace] | int) -> RankLinks | None:
    """What is known of ranks at these places, in their order; of so many ranks the newest report there is.

    None where there is none, or none that can be read.
    """
    if isinstance(places, int):
        found = (user_cache() / "doctor").glob(f"ranks-{places}-*.json")
        files = sorted(found, key=lambda file: file.stat().st_mtime_ns)[-1:]
    else:
        files = [cache_file(places)]
    for file in files:
        if not file.exists():
            continue
        try:
            content = read_bounded(file, error=DeviceError, do="delete it", at_most=MAX_FILE_BYTES)
            links = RankLinks.from_json(content, origin=str(file))
            return links if isinstance(places, int) else links.in_order(places)
        except (DeviceError, ValueError):
            return None
    return None


# -- which are slow ----------------------------------------------------------------------------


def tiers_of(bandwidth: Sequence[Sequence[float]]) -> list[list[Link]]:
    """Links that are about as fast as one another, the fastest first."""
    links = sorted(links_of(len(bandwidth)), key=lambda link: -bandwidth[link[0]][link[1]])
    found: list[list[Link]] = []
    before = 0.0
    for one, other in links:
        rate = bandwidth[one][other]
        if not found or rate < GAP * before:
            found.append([])
        found[-1].append((one, other))
        before = rate
    return found


def clusters_of(ranks: int, links: Iterable[Link]) -> list[list[int]]:
    """Ranks that some links join, directly or by others."""
    cluster = list(range(ranks))
    for one, other in links:
        old, new = cluster[other], cluster[one]
        cluster = [new if at == old else at for at in cluster]
    found: dict[int, list[int]] = {}
    for rank, at in enumerate(cluster):
        found.setdefault(at, []).append(rank)
    return list(found.values())


def slow_links_text(bandwidth: Sequence[Sequence[float]]) -> list[str]:
    """A sentence for each group of slow links; none where all are about as fast."""
    tiers, found = tiers_of(bandwidth), []

    def middle(links: Sequence[Link]) -> float:
        return statistics.median(bandwidth[one][other] for one, other in links)

    for number, tier in enumerate(tiers[1:], 1):
        faster = list(itertools.chain.from_iterable(tiers[:number]))
        clusters, own = clusters_of(len(bandwidth), faster), middle(tier)
        usual = middle(faster)
        part = f"{share_text(own / usual)} of the {rate_text(usual)}"
        between = {
            (one, other) for one, other in links_of(len(bandwidth)) if not _together(clusters, one, other)
        }
        if between and set(tier) <= between:
            joined = [one for one in clusters if any(rank in one for link in tier for rank in link)]
            named = [ranks_text(one) for one in joined[:MOST_NAMED]]
            more = len(joined) - len(named)
            names = "; ".join(named) + (f"; {more:,} more groups" if more else "")
            found.append(f"between {names}: {rate_text(own)}, {part} within them")
            continue
        for one, other in tier[:MOST_NAMED]:
            rate = bandwidth[one][other]
            part = f"{share_text(rate / usual)} of the others' {rate_text(usual)}"
            found.append(f"rank {one} – rank {other}: {rate_text(rate)}, {part}")
        if len(tier) > MOST_NAMED:
            found.append(f"and {len(tier) - MOST_NAMED:,} more links like these")
    return found


def _together(clusters: Sequence[Sequence[int]], one: int, other: int) -> bool:
    return any(one in cluster and other in cluster for cluster in clusters)


def share_text(share: float) -> str:
    """0.25 -> ``a quarter``; smaller ones as 1/9."""
    if share < 1e-6:
        return "less than a millionth"
    parts = round(1 / share)
    names = {1: "all", 2: "half", 3: "a third", 4: "a quarter", 5: "a fifth"}
    return names.get(parts, f"1/{parts:,}")


def rate_text(bytes_per_s: float) -> str:
    """9.1e8 -> ``910 MB/s``: decimal, as links are sold."""
    units = ("B/s", "kB/s", "MB/s", "GB/s", "TB/s")
    number, unit = bytes_per_s, 0
    while float(f"{number:.3g}") >= 1000 and unit < len(units) - 1:
        number, unit = number / 1000, unit + 1
    return f"{number:.3g} {units[unit]}"
