"""MCP: coding agents plan, run and read jobs, within a spending limit."""
