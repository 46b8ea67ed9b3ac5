"""Stores over fsspec: every store that it has a file system for, through its API alone.

This package is imported only if a URL names such a store.
"""
