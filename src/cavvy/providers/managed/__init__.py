"""The code that providers of managed services, such as SageMaker, share: each job of the service
starts the agent in the job's container.
"""
