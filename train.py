"""Train a model: `python train.py [CONFIG.toml] [--section.field VALUE]`; the same as `jaxblock train`."""

import sys

from jaxblock.cli import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
