"""Credentials that are replaced while a store is open, and credentials that are slow to arrive."""

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import CredentialRetrievalError

from ckpt_async.errors import FailureReason, StoreError
from ckpt_async.stores.s3 import credentials
from tests.stores.peer import Peer, Request, answer
from tests.stores.s3_calls import CALLS, connected

FILE = (
    "[default]\naws_access_key_id = {0}\naws_secret_access_key = secret\naws_session_token = token-of-{0}\n"
)


@pytest.fixture(autouse=True)
def no_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [each for each in os.environ if each.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_REGION", "us-east-1")


@pytest.mark.fault("F91")
@pytest.mark.parametrize("call", ["put", "get", "get_range", "list", "put_part"])
@pytest.mark.parametrize(("status", "code"), [(403, "InvalidAccessKeyId"), (400, "ExpiredToken")])
def test_keys_that_are_replaced_in_their_file_are_used(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, status: int, code: str
) -> None:
    """The file is read again once the old keys are refused."""
    file = tmp_path / "credentials"
    file.write_text(FILE.format("OLD"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    monkeypatch.setattr(credentials, "READ_AGAIN_S", 0.0)
    good = {"OLD"}

    def respond(request: Request) -> bytes:
        signed = request.headers.get("authorization", "") + request.path
        if not any(f"Credential={name}" in signed for name in good):
            return answer(status, code)
        # Compare a token's content, not how it is written in a URL.
        assert any(
            f"token-of-{name}" in signed + request.headers.get("x-amz-security-token", "") for name in good
        )
        if call == "list":
            told = "<Name>bucket</Name><Prefix>run/</Prefix><IsTruncated>false</IsTruncated>"
            return answer(200, body=f"<ListBucketResult>{told}</ListBucketResult>".encode())
        told = {"ETag": '"e"', "Content-Range": "bytes 0-4/5"} if call == "get_range" else {"ETag": '"e"'}
        return answer(
            206 if call == "get_range" else 200, headers=told, body=b"hello" * call.startswith("get")
        )

    async def main() -> None:
        async with connected(Peer(respond)) as store:
            for _ in range(2):
                await CALLS[call](store)
            good.clear()
            with pytest.raises(StoreError) as refused:
                await CALLS[call](store)
            assert refused.value.reason is FailureReason.AUTH
            good.add("NEW")
            file.write_text("[default\nis being written")
            with pytest.raises(StoreError) as refused:
                await CALLS[call](store)
            assert refused.value.reason is FailureReason.AUTH
            file.write_text(FILE.format("NEW"))
            for _ in range(3):
                await CALLS[call](store)

    run(main())


@pytest.mark.fault("F92")
def test_requests_that_give_up_start_no_further_process(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process that provides the credentials hangs."""
    started, program, config = tmp_path / "started", tmp_path / "hang.py", tmp_path / "config"
    program.write_text(
        "import json, os, sys, time\n"
        f"path = {str(started)!r}\n"
        "os.close(os.open(f'{path}-{os.getpid()}', os.O_CREAT))\n"
        "while not os.path.exists(path): time.sleep(0.01)\n"
        "print(json.dumps({'Version': 1, 'AccessKeyId': 'A', 'SecretAccessKey': 'S', 'SessionToken': 'T',"
        " 'Expiration': sys.argv[1]}))\n"
    )
    process = f"credential_process = {sys.executable} {program}"
    config.write_text(f"[default]\n{process} 2020-01-01T00:00:00Z\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))

    async def main() -> None:
        started.touch()  # the first process answers at once, with expired credentials

        async def ask(store: Any) -> None:
            async with asyncio.timeout(0.2):
                await CALLS["put"](store)

        peer = Peer(lambda _: answer(200, headers={"ETag": '"e"'}))
        async with connected(peer) as store:
            started.unlink()
            for _ in range(3):
                results = await asyncio.gather(*(ask(store) for _ in range(4)), return_exceptions=True)
                assert all(isinstance(each, TimeoutError) for each in results)
            assert len(list(tmp_path.glob("started-*"))) == 2
            started.touch()
            with pytest.raises(CredentialRetrievalError, match="expired"):
                await store._session.signer.credentials()

    run(main())
