"""How errors of file systems are classified."""

import paramiko

from ckpt_async.errors import FailureReason
from ckpt_async.stores.fsspec.failures import reason_of


def test_a_connection_that_breaks_while_it_logs_in_is_not_a_refusal() -> None:
    broken = paramiko.AuthenticationException("Authentication failed: transport shut down or saw EOF")
    refused = paramiko.AuthenticationException("Authentication failed.")
    assert [reason_of(each) for each in (broken, refused)] == [FailureReason.TRANSIENT, FailureReason.AUTH]
