"""What the changes of elastic jobs' sizes contribute."""

from cavvy.frame.capability import Capability

_HERE = "cavvy.capabilities.elastic"
CAPABILITY = Capability(
    name="elastic",
    summary="Grow running jobs with a range of nodes while nodes are free, and shrink them.",
    docs=("guides/elastic.md",),
    settings=_HERE,
    reconcilers=(f"{_HERE}.keeper:make_keeper",),
)
