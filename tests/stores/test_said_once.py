"""A newcomer with wrong credentials sees our one-sentence error, not what a library prints before it raises."""

import os
import subprocess
import sys

import pytest

from ckpt_async.cli.output import Exit
from tests.file_servers import FileServer


def said(url: str, **environment: str) -> list[str]:
    """Return the lines that `ckpt-async ls` prints, in a separate process because pytest has set up logging in this
    one.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("AZURE", "FSSPEC"))}
    command = [sys.executable, "-m", "ckpt_async", "ls", url]
    done = subprocess.run(command, env=kept | environment, capture_output=True, text=True, timeout=60)
    assert done.returncode in (Exit.ERROR, Exit.TEMPORARY)
    return done.stderr.splitlines()


def test_of_an_identity_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    [line] = said(
        "az://container/run", AZURE_STORAGE_ACCOUNT="nobody", AZURE_TOKEN_CREDENTIALS="EnvironmentCredential"
    )
    assert "no identity provided a token" in line
    assert "AZURE_STORAGE_KEY" in line


def test_of_a_login_that_is_refused(sftp_server: FileServer) -> None:
    [line] = said(sftp_server.url, **sftp_server.environment() | {"FSSPEC_SFTP_PASSWORD": "wrong"})
    assert "Authentication failed" in line


def test_of_a_server_that_does_not_speak_ssh(webdav_server: FileServer) -> None:
    """Otherwise Paramiko's thread would print its traceback."""
    port = webdav_server.port
    [line] = said(f"sftp://127.0.0.1:{port}/run", FSSPEC_SFTP_USERNAME="me", FSSPEC_SFTP_PASSWORD="mine")
    assert "SSH protocol banner" in line


def test_of_an_option_that_is_missing() -> None:
    [line] = said("webdav:///run")
    assert "the option base_url is missing (set FSSPEC_WEBDAV_BASE_URL)" in line


def test_of_a_server_that_is_not_there() -> None:
    [line] = said("webdav:///run", FSSPEC_WEBDAV_BASE_URL="http://127.0.0.1:1/")
    assert "is webdav:///run correct, and reachable from here?" in line
