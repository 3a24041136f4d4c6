"""Made-up profiles are shared with the planner's tests."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "planner" / "bits"))
