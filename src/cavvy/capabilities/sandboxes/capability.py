"""What sandboxes contribute."""

from cavvy.frame.capability import Capability, Export

_SANDBOX = "cavvy.capabilities.sandboxes.sandbox"
_ERRORS = "cavvy.capabilities.sandboxes.errors"
CAPABILITY = Capability(
    name="sandboxes",
    summary="Run untrusted code in sandboxes: `cavvy.Sandbox`.",
    needs=("functions",),
    exports=(
        Export("Sandbox", f"{_SANDBOX}:Sandbox"),
        Export("SandboxSnapshot", f"{_SANDBOX}:SandboxSnapshot"),
        Export("IsolationMissing", f"{_ERRORS}:IsolationMissing"),
        Export("SandboxEnded", f"{_ERRORS}:SandboxEnded"),
        Export("SandboxError", f"{_ERRORS}:SandboxError"),
        Export("SandboxFileError", f"{_ERRORS}:SandboxFileError"),
        Export("SandboxLost", f"{_ERRORS}:SandboxLost"),
        Export("SandboxNotFound", f"{_ERRORS}:SandboxNotFound"),
    ),
)
