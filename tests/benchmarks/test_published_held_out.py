"""The table of runs that were held out, by hand."""

from __future__ import annotations

import dataclasses

from published_held_out import HELD_OUT, held_out_lines
from test_published_scores import row


def test_first_predictions_stand_beside_today_s() -> None:
    """One of three rows was refused at first: errors of 50 and 10 % then, of 10, 20 and 0 % today."""
    own = [
        dataclasses.replace(row(100.0, 110.0, peak=9.0), first=150.0),
        dataclasses.replace(row(100.0, 80.0), first=90.0, fitted_first=False),
        row(100.0, 100.0),
    ]
    source, middle = held_out_lines({"page": own})
    assert source == ["page", "3", "30.0%", "50.0%", "+20.0%", "1", "10.0%", "20.0%", "+0.0%", "1"]
    assert middle == ["median of the sources", "", "30.0%", "50.0%", "", "", "10.0%", "20.0%", "", ""]
    assert len(HELD_OUT) == len(source)
