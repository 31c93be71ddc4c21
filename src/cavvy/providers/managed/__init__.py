"""The layer for managed services, such as SageMaker: each job of the service starts the agent in
the job's container.
"""
