"""Runs the command-line interface: `python -m cavvy`."""

from cavvy.cli.entry import main

if __name__ == "__main__":
    main()
