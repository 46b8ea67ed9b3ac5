"""Checkpoints of trainers that know nothing of this package: found in a folder by their writers' own marks, handed to
an `Uploader`, and never touched. `formats` holds every rule of what is complete, `plan` of what is handed in and when.
"""
