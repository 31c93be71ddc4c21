"""What the MCP server for coding agents contributes."""

from cavvy.frame.capability import Capability, Command

CAPABILITY = Capability(
    name="mcp",
    summary="Let coding agents plan, run and read jobs, within a spending limit.",
    commands=(
        Command(
            name="mcp",
            place="cavvy.capabilities.mcp.command:command",
            summary="Let coding agents plan, run and read jobs, within a spending limit.",
            section="Set up",
            after="server",
        ),
    ),
    docs=("adr/0201-coding-agents.md",),
)
