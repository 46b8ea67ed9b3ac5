"""Asynchronous upload and lifecycle manager for training checkpoints."""
