"""`ckpt-async doctor`: checks of this node, folder and store, and what each finding means.

`checks` asks, `diagnosis` (pure) explains. It changes nothing but a probe object that it removes.
"""
