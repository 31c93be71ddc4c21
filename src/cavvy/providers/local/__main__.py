"""Prints the resources that Cavvy finds on this machine, as JSON: `python -m
cavvy.providers.local`.
"""

import sys
from pathlib import Path

import msgspec

from cavvy.domain.units import HourlyRate
from cavvy.providers.hosts.machine import discover, this_machine
from cavvy.providers.local.offers import list_offers, make_host

machine = discover(this_machine(Path.cwd()))
found = {
    "machine": machine,
    "host": make_host(machine),
    "offers": list_offers(machine, HourlyRate(0)),
}
sys.stdout.buffer.write(msgspec.json.format(msgspec.json.encode(found), indent=2) + b"\n")
