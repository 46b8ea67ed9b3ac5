"""Azure Blob Storage: its REST interface as of version 2023-11-03, over connections of our own and aiohttp's.

Microsoft's client is not used: it has no way to send a file's own pages, and repeats requests by itself. azure-identity
finds the tokens.
"""
