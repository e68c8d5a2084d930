"""The files of images that the server's tests use, too."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "server"))
