"""``python -m spalier`` is the command line."""

from spalier.cli import entry

if __name__ == "__main__":
    entry()
