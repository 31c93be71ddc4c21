"""Google's Vertex AI: each gang is one custom job, whose containers start the agent."""

from cavvy.providers.vertex.manifest import MANIFEST as MANIFEST
