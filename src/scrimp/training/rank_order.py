"""Whether ranks would do better in another order, by the links that `scrimp doctor --ranks` has measured.

`scrimp plan` asks for the newest report on as many ranks, a run for that of its own hosts and devices. The order is
advised, never taken: it holds from the meeting of the ranks on (`SCRIMP_RANK_ORDER`), before a run is decided.

Checked  tests/training/test_rank_order.py
"""

from __future__ import annotations

import os

from scrimp.launchers import RANK_ORDER, order_of
from scrimp.models import spec_of
from scrimp.planner.axis_traffic import degrees_of, traffic_of
from scrimp.planner.rank_placement import MOST_SWAPPED, place_ranks
from scrimp.profiler.links_report import known_links
from scrimp.profiler.rank_links import places
from scrimp.report.units import format_duration
from scrimp.training.setup import Decisions

WORTH = 0.9
"""An order is advised if it takes at most this share of the present order's time on links."""


def order_advice(decisions: Decisions) -> str | None:
    """The order to set, and what it saves; None where nothing is known of the links, or nothing gained.

    A collective, of which rank 0 has the answer.
    """
    config, device = decisions.config, decisions.device
    ranks, is_plan = config.layout.ranks, device.world.size == 1
    if ranks == 1 or (ranks > MOST_SWAPPED and not is_plan):  # others would wait for seconds
        return None
    spec = spec_of(decisions.architecture)
    if config.layout.pp > 1 or config.outer.every or spec.routing is not None:
        return None  # whose bytes `traffic_of` does not know
    where = ranks if is_plan else places(device)
    links = known_links(where) if device.world.is_writer else None
    if links is None:
        return None
    traffic = traffic_of(spec, config)
    found = place_ranks(degrees_of(config.layout), traffic, links.bandwidth)
    if found.seconds >= WORTH * found.seconds_given:
        return None
    present = (None if is_plan else order_of(os.environ, ranks)) or tuple(range(ranks))
    order = ",".join(str(present[rank]) for rank in found.order)
    return (
        f"{RANK_ORDER}={order} would take {format_duration(found.seconds)} of a step on links, not "
        f"{format_duration(found.seconds_given)} (predicted; links by scrimp doctor --ranks)"
    )
