"""What sandboxes contribute."""

from cavvy.frame.capability import Capability, Command, Export

_SANDBOX = "cavvy.capabilities.sandboxes.sandbox"
_TOOLS = "cavvy.capabilities.sandboxes.tools"
_ERRORS = "cavvy.capabilities.sandboxes.errors"
CAPABILITY = Capability(
    name="sandboxes",
    summary="Run untrusted code in sandboxes: `cavvy.Sandbox`.",
    commands=(
        Command(
            name="sandbox",
            place="cavvy.capabilities.sandboxes.command:command",
            summary="Run untrusted code in sandboxes: create, exec, list and rm.",
            section="Work on nodes",
        ),
    ),
    docs=("concepts/sandboxes.md", "tutorials/sandboxes.md"),
    needs=("functions",),
    uses=("mcp",),
    tools=tuple(f"{_TOOLS}:{name}" for name in ("sandbox_create", "sandbox_run", "sandboxes")),
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
