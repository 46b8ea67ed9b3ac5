"""Which account an Azure URL means, and how requests are authorised."""

import asyncio
import datetime as dt
import json
import time
from urllib.parse import parse_qs

import pytest

from ckpt_async.errors import SettingsError, StoreError
from ckpt_async.stores import StoreOptions, address_of, open_store, parse_url
from ckpt_async.stores.azure import access as azure_access
from ckpt_async.stores.azure.access import Access, signed
from ckpt_async.stores.azure.account import Account
from tests.azurite import AzuriteServer
from tests.stores.bodies import put
from tests.stores.peer import SILENCE, Peer, answer

CLOUD = "https://account.blob.core.windows.net"
STRING = "AZURE_STORAGE_CONNECTION_STRING"


@pytest.mark.parametrize(
    ("url", "env", "endpoint_url"),
    [
        ("az://box/run", {"AZURE_STORAGE_ACCOUNT": "account"}, CLOUD),
        ("azure://box/run", {"AZURE_STORAGE_ACCOUNT_NAME": "account"}, CLOUD),
        ("az://box/run", {STRING: "AccountName=account;AccountKey=a=="}, CLOUD),
        (
            "az://box/run",
            {STRING: "AccountName=account;EndpointSuffix=core.x"},
            "https://account.blob.core.x",
        ),
        ("az://box/run", {STRING: f"SharedAccessSignature=s;BlobEndpoint={CLOUD}/"}, CLOUD),
        ("az://box/run", {STRING: "UseDevelopmentStorage=true"}, "http://127.0.0.1:10000/devstoreaccount1"),
        (f"{CLOUD}/box/run", {"AZURE_STORAGE_ACCOUNT": "other"}, CLOUD),
        ("abfss://box@account.dfs.core.windows.net/run", {}, CLOUD),
        ("https://account.dfs.core.windows.net/box/run", {}, CLOUD),
    ],
)
def test_the_account_of_a_url(url, env, endpoint_url):
    """The address in a journal must lead to the same account from another environment, and must contain no secret."""
    location = parse_url(url)
    assert (location.bucket, location.prefix) == ("box", "run")
    address = address_of(url, None, env=env)
    assert (address.url, address.endpoint_url) == (url, endpoint_url)
    open_store(url, StoreOptions(endpoint_url=endpoint_url), env={})


@pytest.mark.parametrize(
    ("url", "hint"),
    [
        ("az://box/run", "AZURE_STORAGE_ACCOUNT"),
        ("az://Box/run", "small letters"),
        ("az://a/run", "small letters"),
        (f"{CLOUD}/box/run?sv=1&sig=SECRET", "AZURE_STORAGE_SAS_TOKEN"),
        ("az://box/run?sig=SECRET", "AZURE_STORAGE_SAS_TOKEN"),
        ("abfss://box/run", "abfss://container@account"),
        ("az://key:SECRET@box/run", "AZURE_STORAGE"),
    ],
)
def test_a_url_that_names_no_container_or_account_is_refused(url, hint):
    with pytest.raises(SettingsError) as caught:
        open_store(url, env={})
    assert hint in caught.value.hint
    assert "SECRET" not in str(caught.value) or "@" in url


def test_a_signature_of_ones_own_is_enough(azurite: AzuriteServer, azure_url, run):
    """AZURE_STORAGE_SAS_TOKEN works with or without its question mark; an expired one is refused with the reason."""

    async def attempt(expires_in_s: float) -> None:
        sas = signed(azurite.account, azurite.container, azurite.key, time.time() + expires_in_s)
        env = {"AZURE_STORAGE_SAS_TOKEN": f"?{sas}"}
        store = open_store(azure_url, StoreOptions(endpoint_url=azurite.url), env=env)
        try:
            await store.open()
            await put(store, "a", b"hello")
        finally:
            await store.close()

    run(attempt(60))
    with pytest.raises(StoreError, match=r"AuthorizationFailure|AuthenticationFailed") as caught:
        run(attempt(-60))
    assert "sig=" not in str(caught.value)


def test_what_an_account_key_signs_never_ends_in_transit(monkeypatch, run):
    """A shard of a slow link is under way for minutes; each request has at least a quarter of an hour."""
    now, key = time.time(), "c2VjcmV0"

    async def body():
        access = Access(Account("account", CLOUD), "box", {"AZURE_STORAGE_KEY": key})
        grants = set()
        for minute in range(0, 180, 7):
            at = now + 60 * minute
            monkeypatch.setattr("ckpt_async.stores.azure.access.time.time", lambda at=at: at)
            grants.add(query := (await access.grant()).query)
            (expiry,) = parse_qs(query)["se"]
            assert dt.datetime.fromisoformat(expiry).timestamp() > at + 900
        assert len(grants) < 10, "it is used as long as it can be"

    run(body())


def test_a_managed_identity_gives_tokens(monkeypatch, run):
    """azure-identity itself runs against a server that answers as App Service's endpoint is documented to.

    A token that is about to expire, or was refused, is requested again.
    """
    lives_s, given = [60, 3600, 3600], []

    def respond(request):
        given.append(request)
        token = {"access_token": f"token-{len(given)}", "resource": "r", "token_type": "Bearer"}
        token["expires_on"] = str(int(time.time()) + lives_s[len(given) - 1])
        return answer(200, headers={"Content-Type": "application/json"}, body=json.dumps(token).encode())

    async def body():
        async with Peer(respond).serve() as url:
            monkeypatch.setenv("IDENTITY_ENDPOINT", url)
            monkeypatch.setenv("IDENTITY_HEADER", "header")
            monkeypatch.setenv("AZURE_TOKEN_CREDENTIALS", "ManagedIdentityCredential")
            access = Access(Account("account", CLOUD), "box", {})
            first, second, third = [await access.grant() for _ in range(3)]
        assert first.headers["Authorization"] == "Bearer token-1"
        assert second.headers["Authorization"] == third.headers["Authorization"] == "Bearer token-2"
        assert third.source_headers() == {"x-ms-copy-source-authorization": "Bearer token-2"}
        assert not first.query
        assert "token" not in repr(first)

    run(asyncio.wait_for(body(), 30))


@pytest.mark.fault("F92")
def test_who_gives_up_on_a_silent_identity_leaves_its_thread_to_the_next(monkeypatch, run):
    """Otherwise waiting threads would soon use up all that the event loop has."""

    async def body():
        peer = Peer(lambda _: SILENCE)
        async with peer.serve() as url:
            monkeypatch.setenv("IDENTITY_ENDPOINT", url)
            monkeypatch.setenv("IDENTITY_HEADER", "header")
            monkeypatch.setenv("AZURE_TOKEN_CREDENTIALS", "ManagedIdentityCredential")
            monkeypatch.setattr(azure_access, "_ANSWER_S", 0.3)
            access = Access(Account("account", CLOUD), "box", {})
            asking = asyncio.ensure_future(access.grant())
            await peer.arrived.wait()
            for _ in range(3):
                asking.cancel()
                await asyncio.wait([asking])
                asking = asyncio.ensure_future(access.grant())
                await asyncio.sleep(0)
            assert len(peer.requests) == 1
            with pytest.raises(StoreError, match="no identity provided a token"):
                await asking

    run(asyncio.wait_for(body(), 60))
