"""`python -m kilter` is `kilter`."""

import sys

from kilter.cli import main

if __name__ == "__main__":
    sys.exit(main())
