"""Objects in S3, Google Cloud Storage and Azure Blob, files on SFTP servers, and web pages, all by
URL.
"""
