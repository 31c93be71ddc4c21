#!/usr/bin/env bash
# Run the tests; called by `make test`. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
exec .venv/bin/python -m pytest "$@"
