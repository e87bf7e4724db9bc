"""`python -m jaxblock.cli`: the `jaxblock` command."""

import sys

from jaxblock.cli import main

if __name__ == "__main__":
    sys.exit(main())
