"""Runs in a store, and a relay that counts, as for restoring without torch."""

from tests.restore.conftest import counted_run, relay, run_  # noqa: F401  fixtures
