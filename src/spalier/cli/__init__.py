"""The command line. Nothing here computes: commands read their options, call the library, and print."""

from __future__ import annotations

import sys


def entry() -> None:
    """What the installed command calls."""
    try:
        from spalier.cli.main import main
    except ModuleNotFoundError as error:
        if error.name != "click":
            raise
        sys.exit("spalier: the command line needs click, which is not installed; pip install 'spalier[cli]'")
    sys.exit(main())
