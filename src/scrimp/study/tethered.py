"""`scrimp` as a process that does not outlive the one that started it: python -m scrimp.study.tethered PARENT WORDS...

Problem  A study that is killed with -9 can end nothing. Runs that went on without it would write into folders that the
         next study resumes.
Method   Linux sends this process SIGKILL as its parent ends (PR_SET_PDEATHSIG). Where the parent ended before that was
         asked for, this process has another parent by now, and ends itself.
Limits   Elsewhere than on Linux such runs go on to their end; the lock of their folders keeps others out meanwhile.
Checked  tests/study/test_study_runs.py
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys
from typing import Final

_PR_SET_PDEATHSIG: Final = 1


def main() -> None:
    """Tie this process to its parent, then be `scrimp`."""
    parent, words = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(128 + signal.SIGKILL)
    sys.argv[1:] = words
    runpy.run_module("scrimp", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
