"""The names of the metrics by which a HorizontalPodAutoscaler of Kubernetes scales a service.
Exports for Kubernetes have these names, and Deployments that are read may have them.
"""

IN_FLIGHT = "http_requests_in_flight"
PER_SECOND = "http_requests_per_second"
GPU_PERCENT = "DCGM_FI_DEV_GPU_UTIL"  # of NVIDIA's DCGM exporter, from 0 to 100
