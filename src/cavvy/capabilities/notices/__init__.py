"""Notices: messages about jobs, budgets and other events to Slack, Teams, mail and others."""
