"""The command line: thin commands over the other rooms. `main` is the `scrimp` program."""

from scrimp.cli.entry import main

__all__ = ["main"]
