"""Instances of Vertex AI Workbench: each session is a managed notebook, which starts the agent."""

from cavvy.providers.vertex_workbench.manifest import MANIFEST as MANIFEST
