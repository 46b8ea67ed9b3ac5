"""Uploads the checkpoints of trainers that know nothing of this package.

The watcher recognises checkpoints in a folder by the markers that their own writers leave, hands them to an `Uploader`,
and never modifies them. `formats` holds every rule of what is complete, `plan` of what is handed in and when.
"""
