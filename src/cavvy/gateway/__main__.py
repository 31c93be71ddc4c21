"""`python -m cavvy.gateway CONFIG.json`."""

import sys

from cavvy.gateway.process import run

if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
