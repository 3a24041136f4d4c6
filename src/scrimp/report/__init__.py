"""What a run looked like: one self-contained HTML page, and small tables for the terminal.

`write_report` makes the page, `read_jsonl` reads a run's records; `scrimp.report.tables` prints
accounts with rich, `scrimp.report.units` writes numbers for people.
"""

from scrimp.report.page import write_report
from scrimp.report.records import read_jsonl

__all__ = ["read_jsonl", "write_report"]
