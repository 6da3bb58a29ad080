"""Ends with a plain message where Python is too old to even parse the package."""

import sys

if sys.version_info < (3, 11):
    found = ".".join(str(part) for part in sys.version_info[:3])
    sys.exit("ridethrough needs Python 3.11 or newer, this is %s: make PYTHON=python3.11 ..." % found)
