"""Azure Blob Storage: its REST interface, version 2023-11-03, over our own connections and aiohttp's.

Microsoft's client is not used, because it cannot send a file's pages directly and repeats requests by itself. Tokens
come from azure-identity.
"""
