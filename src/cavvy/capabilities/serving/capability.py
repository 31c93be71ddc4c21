"""What services contribute."""

from cavvy.frame.capability import Capability

_HERE = "cavvy.capabilities.serving"
CAPABILITY = Capability(
    name="serving",
    summary="Answer requests with a program on replicas.",
    docs=("guides/serve.md", "guides/service-access.md", "guides/service-calls.md"),
    routes=(
        f"{_HERE}.routes.calls:hook_router",
        f"{_HERE}.routes.calls:router",
        f"{_HERE}.routes.keys:router",
        f"{_HERE}.routes.figures:router",
    ),
    reconcilers=(f"{_HERE}.keeper:Serving",),
)
