"""./dev stores: its rows, and what it says where a server cannot be run."""

import pytest

from tests.s3_servers import __main__ as stores
from tests.s3_servers.servers import CephServer

PAGE = """before
| Server | Conformance and kills | Demo | Its own faults | Date |
| --- | --- | --- | --- | --- |
| moto | 1 passed | passed | some | 2026-01-01 |
| seaweedfs | 2 passed | passed | none seen | 2026-01-01 |

after
"""


def test_without_names_the_servers_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert stores.main([]) == stores.main(["nginx"]) == 2
    assert "ceph, localstack, moto, seaweedfs" in capsys.readouterr().err


def test_a_row_is_replaced_and_others_stay() -> None:
    lines = stores.with_row(
        stores.with_row(PAGE, "seaweedfs", "3 passed", "failed"), "ceph", "4", "5"
    ).splitlines()
    assert (lines[0], lines[-1]) == ("before", "after")
    assert [line.split(" | ")[:3] for line in lines[3:-2]] == [
        ["| ceph", "4", "5"],
        ["| moto", "1 passed", "passed"],
        ["| seaweedfs", "3 passed", "failed"],
    ]


def test_a_server_that_is_not_installed_is_skipped(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(CephServer, "PROGRAMS", ("no-such-program",))
    page = stores.PAGE.read_text()
    assert stores.main(["ceph"]) == 0
    assert "skipped: no no-such-program: apt-get install" in capsys.readouterr().err
    assert stores.PAGE.read_text() == page
