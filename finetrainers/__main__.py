"""`python -m finetrainers` is the `finetrainers` command."""

import sys

from finetrainers.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
