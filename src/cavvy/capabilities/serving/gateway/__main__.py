"""`python -m cavvy.capabilities.serving.gateway CONFIG.json`."""

import sys

from cavvy.capabilities.serving.gateway.process import run

if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
