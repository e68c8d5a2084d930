"""The environment in which tests start `zse` as a process of its own: it must find the package as this process does."""

import os
import sys

ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
