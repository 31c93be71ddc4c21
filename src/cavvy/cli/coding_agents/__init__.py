"""The MCP server with which coding agents plan, run and read jobs, and their skill file."""
