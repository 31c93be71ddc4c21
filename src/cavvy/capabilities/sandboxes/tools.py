"""What coding agents may do with sandboxes (`cavvy mcp`): make one that costs nothing, and run code
in it. They run commands, as the other tools do.
"""

import asyncio

from mcp.server.mcpserver.exceptions import ToolError

from cavvy.capabilities.mcp import server
from cavvy.cli.view.failure import CommandFailure


async def sandbox_create(minutes: int = 10) -> str:
    """Make a sandbox for untrusted code, which has no network and ends after some minutes. Returns
    its ID. Only machines that cost nothing are used.
    """
    return await _run("create", "--free", "--title", "coding agent", "--timeout", f"{minutes}m")


async def sandbox_run(sandbox: str, code: str) -> str:
    """Run Python code in a sandbox, and return what it printed. Files that it leaves in its folder
    are there for the next call.
    """
    try:
        name = server.check_name(sandbox)
    except CommandFailure as error:
        raise ToolError(f"{error.message} ({error.hint})") from error
    return await _run("exec", name, "--", "python3", "-c", code)


async def sandboxes() -> str:
    """List the project's sandboxes."""
    return await _run("list", "-o", "json")


async def _run(*words: str) -> str:
    try:
        return await asyncio.to_thread(server.run_command, ["sandbox", *words])
    except CommandFailure as error:
        raise ToolError(f"{error.message} ({error.hint})") from error
