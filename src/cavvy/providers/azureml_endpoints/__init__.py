"""Managed online endpoints of Azure Machine Learning: each replica of a service is one endpoint
with one deployment on one machine.
"""

from cavvy.providers.azureml_endpoints.manifest import MANIFEST as MANIFEST
