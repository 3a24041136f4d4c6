"""`scrimp doctor --ranks` on the terminal: bandwidth and latency of pairs, collectives, and which links are slow."""

from __future__ import annotations

import sys

from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from scrimp.cli.show import plain_console, say
from scrimp.profiler import resolve_device
from scrimp.profiler.links_report import (
    RankLinks,
    clusters_of,
    keep_links,
    rate_text,
    slow_links_text,
    tiers_of,
)
from scrimp.profiler.rank_links import ALONE, measure_rank_links
from scrimp.report.units import format_bytes, format_duration
from scrimp.world import World, ranks_text

MOST_CLUSTERS = 8


def show_links(device: str, *, as_json: bool) -> int:
    """Measure the links between all ranks, keep the report on every host, and print it on rank 0."""
    world = World.current()
    resolved = resolve_device(device, world)
    with Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task("measuring links", total=1.0)
        links = measure_rank_links(resolved, progress=lambda share: bar.update(task, completed=share))
    place = links.places[world.rank]
    if place.local_rank == min(one.local_rank for one in links.places if one.host == place.host):
        keep_links(links, say)
    if world.is_writer:
        if as_json:
            print(links.to_json())
        else:
            print_links(links, plain_console())
    return 0


def print_links(links: RankLinks, console: Console) -> None:
    """The report as tables, slow links beneath."""
    ranks = len(links.places)
    console.print(f"{ranks} ranks over {links.backend}, torch {links.torch}")
    for host in dict.fromkeys(one.host for one in links.places):
        here = [rank for rank, one in enumerate(links.places) if one.host == host]
        names = dict.fromkeys(links.places[rank].device for rank in here)
        console.print(f"  {ranks_text(here)}: {host}, {', '.join(names)}")
    console.print(_matrix(links) if ranks <= ALONE else _tiers(links))
    if links.at_once:
        console.print("pairs of a round were measured at once: ranks that share a link share its bandwidth")
    console.print(_collectives(links))
    slow = slow_links_text(links.bandwidth)
    for sentence in slow:
        console.print(f"slow  {sentence}")
    if not slow:
        console.print("no slow links: none has less than half of the bandwidth of the next one")


def _matrix(links: RankLinks) -> Table:
    """Above the diagonal bandwidth, below it latency."""
    ranks = range(len(links.places))
    table = Table(
        "rank", *map(str, ranks), "bandwidth above, latency below", box=box.SIMPLE, padding=(0, 1, 0, 0)
    )
    for one in ranks:
        cells = [
            ""
            if one == other
            else rate_text(links.bandwidth[one][other])
            if one < other
            else format_duration(links.latency[one][other])
            for other in ranks
        ]
        table.add_row(str(one), *cells, "")
    return table


def _tiers(links: RankLinks) -> Table:
    """Links that are about as fast as one another, and the groups of ranks that they and faster ones join."""
    table = Table("links", "bandwidth", "latency", "joins", box=box.SIMPLE, padding=(0, 1, 0, 0))
    faster: list[tuple[int, int]] = []
    for tier in tiers_of(links.bandwidth):
        faster += tier
        rates = [links.bandwidth[one][other] for one, other in tier]
        waits = [links.latency[one][other] for one, other in tier]
        joined = [ranks_text(one) for one in clusters_of(len(links.places), faster)]
        more = f"; {len(joined) - MOST_CLUSTERS:,} more groups" * (len(joined) > MOST_CLUSTERS)
        table.add_row(
            f"{len(tier):,}",
            f"{rate_text(min(rates))} to {rate_text(max(rates))}",
            f"{format_duration(min(waits))} to {format_duration(max(waits))}",
            "; ".join(joined[:MOST_CLUSTERS]) + more,
        )
    return table


def _collectives(links: RankLinks) -> Table:
    table = Table(
        "over all ranks",
        "latency",
        "sent by each rank",
        "of a tensor of",
        box=box.SIMPLE,
        padding=(0, 1, 0, 0),
    )
    for one in links.collectives:
        table.add_row(
            one.operation, format_duration(one.latency), rate_text(one.bandwidth), format_bytes(one.num_bytes)
        )
    return table
