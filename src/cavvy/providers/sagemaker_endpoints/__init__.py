"""Real-time endpoints of Amazon SageMaker: each replica of a service is one endpoint with one
instance.
"""

from cavvy.providers.sagemaker_endpoints.manifest import MANIFEST as MANIFEST
