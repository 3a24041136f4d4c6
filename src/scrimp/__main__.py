"""`python -m scrimp` does what `scrimp` does."""

import sys

from scrimp.cli import main

# The guard is for worker processes that are spawned: they import the main module again.
if __name__ == "__main__":
    sys.exit(main())
