"""A demonstration that needs nothing but this machine: `ckpt-async demo`."""
