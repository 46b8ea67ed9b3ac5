"""`ckpt-async doctor`: `checks` tries out this node, folder and store; `diagnosis` (pure) explains the findings.

It defines no rule of its own and leaves nothing behind: it removes its probe objects and files again.
"""
