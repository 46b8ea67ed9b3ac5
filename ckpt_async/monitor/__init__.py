"""What people and Prometheus see: metrics and `status`.

It reads the journal and what the engine reports, changes nothing, and never stops or slows a trainer.
"""
