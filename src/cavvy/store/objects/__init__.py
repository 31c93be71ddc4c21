"""Gives access by URL to objects in S3, Google Cloud Storage and Azure Blob, to files on SFTP
servers, and to web pages.
"""
