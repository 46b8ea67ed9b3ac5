"""Stores over fsspec: whatever it has a file system for, and nothing here speaks itself.

Imported only where a URL names one.
"""
