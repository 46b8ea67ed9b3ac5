"""The runs and the counting relay of the restore tests, for the torch tests."""

from tests.restore.conftest import counted_run, relay, run_  # noqa: F401  fixtures
