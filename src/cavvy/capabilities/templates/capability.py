"""What the templates contribute."""

from cavvy.frame.capability import Capability

CAPABILITY = Capability(
    name="templates",
    summary="Start from a working program: training, rendering, simulations and others.",
    docs=("guides/templates.md",),
    templates="cavvy.capabilities.templates",
)
