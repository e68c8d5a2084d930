"""python -m zse: the same as the command `zse`."""

import sys

from zse.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
