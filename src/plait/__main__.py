"""`python -m plait`, as torchrun starts it."""

import sys

from plait.cli import main

if __name__ == "__main__":
    sys.exit(main())
