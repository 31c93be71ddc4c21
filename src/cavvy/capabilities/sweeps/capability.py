"""What sweeps that learn contribute."""

from cavvy.frame.capability import Capability, OwnTables

_HERE = "cavvy.capabilities.sweeps"
CAPABILITY = Capability(
    name="sweeps",
    summary="Choose values of a sweep's jobs by results, and stop early those that fall behind.",
    docs=("guides/arrays.md",),
    tables=OwnTables(_HERE, of_jobs=("rung_values",)),
    reconcilers=(f"{_HERE}.keeper:SweepsOfStore",),
)
