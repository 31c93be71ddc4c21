"""Online endpoints of Vertex AI: each replica of a service is one endpoint with one deployed model
on one machine.
"""

from cavvy.providers.vertex_endpoints.manifest import MANIFEST as MANIFEST
