"""Which store a URL names, and which URLs are refused before anything is touched."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ckpt_async import Uploader
from ckpt_async.core import keys
from ckpt_async.core.model import CheckpointId
from ckpt_async.errors import InvalidNameError, SettingsError
from ckpt_async.restore import session
from ckpt_async.stores import Location, StoreOptions, address_of, open_store, parse_url
from ckpt_async.stores.backend import Backend
from ckpt_async.stores.s3.backend import find_endpoint
from ckpt_async.stores.s3.probe import S3Probe
from tests.stores.memory import MemoryStore, shared_bucket

ACCESS_POINT = "arn:aws:s3:us-west-2:123456789012:accesspoint/name"


@pytest.mark.parametrize(
    ("url", "location"),
    [
        ("s3://bucket", Location("s3", "bucket", "")),
        ("s3://bucket/", Location("s3", "bucket", "")),
        ("s3://my.bucket-1/a/b=1", Location("s3", "my.bucket-1", "a/b=1")),
        ("s3://bucket/a/", Location("s3", "bucket", "a")),
        ("r2://bucket/run", Location("r2", "bucket", "run")),
        ("s3://b--usw2-az1--x-s3/run", Location("s3", "b--usw2-az1--x-s3", "run")),
        (f"s3://{ACCESS_POINT}/a/b@1", Location("s3", ACCESS_POINT, "a/b@1")),
        (f"s3://{ACCESS_POINT}", Location("s3", ACCESS_POINT, "")),
        (f"s3://{ACCESS_POINT.replace('/', ':')}/a", Location("s3", ACCESS_POINT.replace("/", ":"), "a")),
        ("weka://bucket/run", Location("weka", "bucket", "run")),
        ("file:///data/run 1", Location("file", "", "/data/run 1")),
        # A file URL has no escapes.
        ("file:///data/lr=3#2?/a%23b", Location("file", "", "/data/lr=3#2?/a%23b")),
        ("memory://test/run", Location("memory", "test", "run")),
    ],
)
def test_urls_are_parsed(url, location):
    assert parse_url(url) == location


@pytest.mark.parametrize(
    "url",
    [
        "",
        "bucket/run",
        "/data/run",
        "s3:/bucket",
        "S3://bucket",
        "gcs://bucket/run",
        "s3://",
        "s3:///run",
        "s3://-bucket/run",
        "s3://buck et/run",
        "s3://bucket:80/run",
        "s3://key:secret@bucket/run",
        "s3://bucket/a/../b",
        "s3://bucket/./b",
        "s3://bucket//b",
        "s3://bucket/b//",
        "s3://bucket/b?region=x",
        "s3://bucket/b#1",
        "s3://bucket/b\\c",
        "s3://bucket/b\n",
        f"s3://{ACCESS_POINT}:8080/a",
        f"s3://{ACCESS_POINT}/a/../b",
        f"s3://{ACCESS_POINT}/a?x",
        "file://data/run",
        "file:///",
        "file:////run",
        "file:///data/../etc",
        None,
        Path("/data/run"),
    ],
)
def test_invalid_urls_are_rejected(url):
    with pytest.raises(SettingsError):
        parse_url(url)


@pytest.mark.parametrize(
    "arn",
    [
        "arn:aws:s3:::bucket",
        "arn:aws:s3::123456789012:accesspoint/name.mrap",
        "arn:aws:s3-outposts:us-west-2:123456789012:outpost/op-1/accesspoint/name",
        "arn:aws:s3-object-lambda:us-west-2:123456789012:accesspoint/name",
        "arn:aws:s3:us-west-2:123456789012:job/name",
    ],
)
def test_arns_of_other_things_than_access_points_are_refused(arn):
    with pytest.raises(SettingsError, match="access-point ARNs with a region") as refused:
        parse_url(f"s3://{arn}/run")
    assert "accesspoint/NAME/prefix" in refused.value.hint


@pytest.mark.parametrize(
    "url",
    [
        "s3://key:secret@bucket/run",
        "s3://key:se/secret@bucket/run",
        "s3://bucket/run?X-Amz-Signature=secret",
        "gs://bucket/run?X-Goog-Signature=secret",
        "https://bucket.s3.amazonaws.com/run?X-Amz-Signature=secret",
        "https://host/run#secret",
        "az://container/run#sig=secret",
        "https://account.blob.core.windows.net/container/run#secret",
        "abfss://container:secret@account.dfs.core.windows.net/run",
        "sftp://me:se/secret@host/run",
        "sftp://me:secret/run",
    ],
)
def test_credentials_in_a_url_are_not_shown_in_the_message(url):
    with pytest.raises(SettingsError) as raised:
        parse_url(url)
    assert "secret" not in str(raised.value) + raised.value.hint


def test_a_home_folder_in_a_url_is_refused_with_what_to_write():
    with pytest.raises(SettingsError) as refused:
        parse_url("file://~/run")
    assert "file:///home/me/folder" in refused.value.hint


def test_a_port_and_an_at_sign_are_no_credentials():
    assert parse_url("https://host:8080/run@1/a").prefix == "run@1/a"
    assert parse_url("sftp://me@host:2222/run@1").prefix == "run@1"
    assert parse_url("sftp://me@[::1]:2222/run").bucket == "me@[::1]:2222"


@pytest.mark.parametrize("scheme", ["sftp", "webdav", "hf"])
def test_without_fsspec_it_is_asked_for(monkeypatch, scheme):
    for module in ("backends", "fsspec.backend"):
        monkeypatch.setattr(f"ckpt_async.stores.{module}.has_fsspec", lambda: False)
    with pytest.raises(SettingsError, match="needs the package fsspec") as raised:
        parse_url(f"{scheme}://host/run")
    assert "pip install '.[fsspec]'" in raised.value.hint


@pytest.mark.parametrize(
    ("scheme", "env", "endpoint"),
    [
        ("s3", {}, None),
        ("s3", {"R2_ENDPOINT_URL": "http://r2"}, None),
        ("s3", {"S3_ENDPOINT_URL": "http://c", "AWS_ENDPOINT_URL": "http://b"}, "http://b"),
        ("s3", {"AWS_ENDPOINT_URL": "http://b", "AWS_ENDPOINT_URL_S3": "http://a"}, "http://a"),
        ("s3", {"AWS_ENDPOINT_URL_S3": "", "S3_ENDPOINT_URL": "http://c"}, "http://c"),
        ("r2", {"R2_ENDPOINT_URL": "https://r2", "AWS_ENDPOINT_URL": "http://b"}, "https://r2"),
        ("weka", {"WEKA_ENDPOINT_URL": "https://w:9000"}, "https://w:9000"),
        ("minio", {"S3_ENDPOINT_URL": "http://c"}, "http://c"),
    ],
)
def test_endpoint_comes_from_the_environment(scheme, env, endpoint):
    assert find_endpoint(scheme, StoreOptions(), env) == endpoint


def test_option_wins_over_the_environment():
    options = StoreOptions(endpoint_url="http://mine")
    assert find_endpoint("r2", options, {"R2_ENDPOINT_URL": "http://other"}) == "http://mine"


def test_alias_without_an_endpoint_does_not_go_to_aws():
    with pytest.raises(SettingsError, match="R2_ENDPOINT_URL"):
        open_store("r2://bucket/run", env={})


@pytest.mark.parametrize(
    "endpoint",
    [
        *(
            "host:80",
            "ftp://host",
            "http://",
            "http://a:b@host",
            "http://h/?x=1",
            "http://[",
            "https://h\\.b.com",
        ),
        *("ftp://a:b@host", "a:b@host", "http://a:b/b:b@host", "http://h/#b"),
    ],
)
def test_invalid_endpoints_are_rejected_without_their_passwords(endpoint):
    with pytest.raises(SettingsError, match="endpoint") as caught:
        StoreOptions(endpoint_url=endpoint)
    assert "a:b" not in str(caught.value)
    assert "x=1" not in str(caught.value)
    with pytest.raises(SettingsError):
        find_endpoint("s3", StoreOptions(), {"AWS_ENDPOINT_URL": endpoint})


@pytest.mark.parametrize(
    "url", ["S3://a:b@bucket/p", "s3//a:b@bucket/p", "a:b@bucket/p", "HTTPS://h/c?sig=a:b"]
)
def test_a_mistyped_url_is_rejected_without_its_password(url):
    with pytest.raises(SettingsError, match="not a store URL") as caught:
        parse_url(url)
    assert "a:b" not in f"{caught.value} {caught.value.hint}"


@pytest.mark.parametrize(
    "options",
    [
        {"addressing_style": "dns"},
        {"connect_timeout_s": 0},
        {"read_timeout_s": -1},
        {"max_connections": 0},
        {"max_connections": True},
        {"connect_timeout_s": float("nan")},
        {"read_timeout_s": float("nan")},
        {"read_timeout_s": float("inf")},
        {"endpoint_url": ""},
        {"region": ""},
        {"profile": ""},
        {"region": 1},
    ],
)
def test_invalid_options_are_rejected(options):
    with pytest.raises(SettingsError):
        StoreOptions(**options)


@pytest.mark.parametrize(
    "put_args", [{"Body": b""}, {"IfNoneMatch": "*"}, {"StorageClass": "DEEP_ARCHIVE"}], ids=str
)
def test_put_args_that_the_store_cannot_take_are_rejected(put_args):
    options = StoreOptions(put_args=put_args)
    for refused in (open_store, lambda url, options: address_of(url, options, env={})):
        with pytest.raises(SettingsError):
            refused("s3://bucket/run", options)


@pytest.mark.parametrize(
    "url", ["az://container/run", "sftp://host/run", "file:///data/run", "memory://name/run"]
)
def test_put_args_are_not_left_out_in_silence(url):
    """The user may have asked for encryption."""
    options = StoreOptions(put_args={"ServerSideEncryption": "aws:kms"})
    with pytest.raises(SettingsError, match="takes no put_args"):
        open_store(url, options, env={"AZURE_STORAGE_ACCOUNT": "account"})


def test_put_args_are_accepted():
    args = {"ServerSideEncryption": "aws:kms", "SSEKMSKeyId": "k", "Metadata": {"a": "b"}, "Tagging": "a=b"}
    assert address_of("s3://bucket/run", StoreOptions(put_args=args), env={}).put_args == args


class Theirs(Backend):
    """A backend as another package would register it."""

    schemes = ("theirs",)
    example = "theirs://bucket/prefix"

    def open(self, location, options, url, env):
        return MemoryStore(shared_bucket(location.bucket), prefix=location.prefix, url=url)


THEIRS, NO_BACKEND = Theirs(), object()


@pytest.mark.parametrize(
    ("scheme", "value", "wrong"),
    [
        ("theirs", "THEIRS", ""),
        ("other", "NO_BACKEND", "is not a Backend"),
        ("missing", "MISSING", "cannot be imported"),
    ],
)
def test_another_package_registers_a_kind_of_store(tmp_path, monkeypatch, scheme, value, wrong):
    """The entry point is written as pip would install it."""
    info = tmp_path / "theirs-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[ckpt_async.stores]\n{scheme} = {__name__}:{value}\n")
    monkeypatch.syspath_prepend(tmp_path)
    if wrong:
        with pytest.raises(SettingsError, match=wrong):
            open_store(f"{scheme}://bucket/run")
    else:
        assert isinstance(open_store("theirs://bucket/run"), MemoryStore)
        assert address_of("theirs://bucket/run", None, env={}).url == "theirs://bucket/run"


def test_the_memory_of_a_process_is_no_place_for_a_run():
    """fsspec has such a file system: what it holds ends with the trainer. (The tests register one of their own.)"""
    code = "from ckpt_async.stores import open_store; open_store('memory://name/run')"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "memory:// is not a known kind of store" in ended.stderr


def test_memory_stores_with_one_name_share_their_objects(run):
    async def body():
        from tests.stores.bodies import put

        one, same, other = (open_store(f"memory://{name}/run") for name in ("urls-a", "urls-a", "urls-b"))
        await put(one, "x", b"1")
        assert len((await same.list("")).objects) == 1
        assert len((await other.list("")).objects) == 0

    run(body())


def test_parsing_a_url_does_not_import_the_sdk():
    """Importing the SDK takes half a second, and not everybody uses S3."""
    code = (
        "import sys; from ckpt_async.stores import open_store; open_store('file:///x');"
        "sys.exit(any(n.partition('.')[0] in ('aiobotocore', 'botocore', 'aiohttp') for n in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.fault("O1")
@pytest.mark.parametrize(
    ("url", "better"),
    [
        ("s3:/b/run", "s3://b/run"),
        ("s3:b/run", "s3://b/run"),
        ("s3//b/run", "s3://b/run"),
        ("S3://b/run", "s3://b/run"),
        ("s3a://b/run", "s3://b/run"),
        ("b/run", "s3://b/run"),
        ("/data/run", "file:///data/run"),
        ("file:/data/run", "file:///data/run"),
        ("gcs://b/run", "gs://b/run"),
        ("gopher://b/run", ""),
        ("nonsense", ""),
        ("user@host:run", ""),
    ],
)
def test_a_mistyped_url_is_rejected_with_a_suggestion(url: str, better: str) -> None:
    with pytest.raises(SettingsError) as caught:
        parse_url(url)
    assert ("did you mean" in caught.value.hint) == bool(better)
    assert not better or f"did you mean {better}?" in caught.value.hint


@pytest.mark.parametrize(
    ("url", "better"),
    [(".", ""), ("./run", "/run"), ("../run", "/../run"), ("file:run", "/run"), ("file:../run", "/../run")],
)
def test_a_relative_path_is_rejected_with_the_whole_one(url, better, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SettingsError, match="is not a store URL") as refused:
        parse_url(url)
    assert refused.value.hint == f"did you mean file://{os.path.normpath(f'{tmp_path}{better}')}?"


def test_a_relative_path_is_rejected_where_the_working_directory_is_gone(tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(SettingsError, match="is not a store URL"):
        parse_url("../run")


@pytest.mark.parametrize("url", ["file:///data/m\udcfcller", "sftp://host/m\udcfcller"])
def test_bytes_that_are_no_utf_8_are_named_as_such(url):
    """So Python reads a command line in another locale's encoding."""
    with pytest.raises(SettingsError, match="not valid UTF-8"):
        parse_url(url)


LONGEST = max(map(len, keys.longest_keys()))


@pytest.mark.fault("F77")
@pytest.mark.parametrize(
    ("scheme", "most"), [("s3://bucket/", 1024), ("memory://bucket/", 1024), ("file:///", 4094)]
)
def test_a_prefix_too_long_for_some_key_is_rejected_at_open(scheme: str, most: int) -> None:
    """The limit is exact to the byte: otherwise such a run would open and upload, but never commit."""
    prefix = "p/" * 2000
    fits = most - LONGEST - 1
    open_store(scheme + prefix[: fits - 1] + "p")
    with pytest.raises(InvalidNameError, match="shorten the remote prefix"):
        open_store(scheme + prefix[:fits] + "p")
    with pytest.raises(InvalidNameError):
        open_store(scheme + prefix[: fits - 1] + "\N{LATIN SMALL LETTER E WITH ACUTE}")


def test_no_key_exceeds_the_documented_maximum_of_its_kind() -> None:
    lease = keys.lease_key(CheckpointId(1, 1), session._reader_name())
    assert len(lease) <= LONGEST
    assert len(keys.receipt_key(CheckpointId(1, 1), 0)) <= LONGEST


@pytest.mark.fault("F77")
def test_a_trainer_with_a_too_long_prefix_does_not_start(tmp_path: Path) -> None:
    with pytest.raises(InvalidNameError, match="more than 1024"):
        Uploader(tmp_path, f"s3://bucket/{'p' * 975}", rank=0, world_size=1)


@pytest.mark.fault("F77")
def test_a_lower_key_limit_of_the_store_is_detected_at_open(s3_url: str) -> None:
    """The probe's keys are as long as any key of a run."""

    async def body() -> None:
        store: Any = open_store(s3_url)
        await store.open()
        found: list[str] = []
        put = store.put

        async def noting(key: str, *rest: Any, **options: Any) -> Any:
            found.append(key)
            return await put(key, *rest, **options)

        store.put = noting
        await S3Probe(store, store._session, store._sender, 30.0).capabilities()
        await store.close()
        assert {len(key) for key in found} == {LONGEST}

    asyncio.run(body())


@pytest.mark.parametrize(
    ("url", "location"),
    [
        ("sftp://me@host:2222/data/run/", Location("sftp", "me@host:2222", "data/run")),
        ("oci://bucket@namespace/run", Location("oci", "bucket@namespace", "run")),
        ("hf://datasets/me/runs/a", Location("hf", "datasets", "me/runs/a")),
        ("webdav:///runs/a", Location("webdav", "", "runs/a")),
    ],
)
def test_what_fsspec_knows_is_a_store(url: str, location: Location) -> None:
    assert parse_url(url) == location
    open_store(url)  # does not connect yet


@pytest.mark.parametrize(
    "url",
    [
        "sftp://me:secret@host/run",
        "sftp://host/run?password=secret",
        "sftp://host/run#secret",
        "sftp://host",
        "sftp://host/a/../secret",
        "zip://secret/run",  # a wrapper around another file system
        "simplecache://secret/run",
    ],
)
def test_a_url_of_fsspec_that_holds_credentials_or_names_no_place_is_rejected(url: str) -> None:
    with pytest.raises(SettingsError) as raised:
        parse_url(url)
    assert "secret" not in str(raised.value) or not ("@" in url or "?" in url or "#" in url)


@pytest.mark.parametrize(
    ("url", "better"),
    [
        ("https://b.s3.eu-north-1.amazonaws.com/run/a", "s3://b/run/a"),
        ("https://s3.amazonaws.com/b/run", "s3://b/run"),
        ("http://minio:9000/b/run", "s3://b/run with the endpoint http://minio:9000"),
    ],
)
def test_a_web_server_is_no_place_to_upload_to(tmp_path: Path, url: str, better: str) -> None:
    """It is refused before anything is written, and the hint names what was probably meant."""
    for upload in (
        lambda: address_of(url, None, env={}),
        lambda: Uploader(tmp_path, url, rank=0, world_size=1),
    ):
        with pytest.raises(SettingsError, match="can only be read") as caught:
            upload()
        assert f"did you mean {better}?" in caught.value.hint
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("url", ["https://me:secret@host/run", "https://host/run?sig=secret", "https:///run"])
def test_a_web_server_is_named_without_credentials(url: str) -> None:
    with pytest.raises(SettingsError):
        parse_url(url)


@pytest.mark.parametrize(
    ("bucket", "env", "address"),
    [
        (
            ACCESS_POINT,  # through PrivateLink
            {"AWS_ENDPOINT_URL_S3": "https://accesspoint.vpce-1a2b.s3.us-west-2.vpce.amazonaws.com"},
            "https://name-123456789012.accesspoint.vpce-1a2b.s3.us-west-2.vpce.amazonaws.com/k",
        ),
        ("bucket", {}, "https://bucket.s3.us-west-2.amazonaws.com/k"),
        # A certificate for *.s3.… covers only one label.
        ("my.bucket", {}, "https://s3.us-west-2.amazonaws.com/my.bucket/k"),
        ("bucket", {"AWS_USE_FIPS_ENDPOINT": "true"}, "https://bucket.s3-fips.us-west-2.amazonaws.com/k"),
        (
            "bucket",
            {"AWS_USE_DUALSTACK_ENDPOINT": "true"},
            "https://bucket.s3.dualstack.us-west-2.amazonaws.com/k",
        ),
        # The alias of an access point.
        ("ap-x1-s3alias", {}, "https://ap-x1-s3alias.s3.us-west-2.amazonaws.com/k"),
        (ACCESS_POINT, {}, "https://name-123456789012.s3-accesspoint.us-west-2.amazonaws.com/k"),
        (
            ACCESS_POINT.replace("us-west-2", "eu-central-1"),
            {},
            "https://name-123456789012.s3-accesspoint.eu-central-1.amazonaws.com/k",
        ),
        (
            ACCESS_POINT,
            {"AWS_USE_FIPS_ENDPOINT": "true", "AWS_USE_DUALSTACK_ENDPOINT": "true"},
            "https://name-123456789012.s3-accesspoint-fips.dualstack.us-west-2.amazonaws.com/k",
        ),
    ],
)
def test_where_the_sdk_sends_requests_to_aws(
    bucket: str, env: dict[str, str], address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", **env}.items():
        monkeypatch.setenv(name, value)

    async def body() -> str:
        store: Any = open_store(f"s3://{bucket}/run", StoreOptions(region="us-west-2"), env=env)
        await store.open(is_read_only=True)
        try:
            url: str = await store._session.client.generate_presigned_url(
                "get_object", {"Bucket": bucket, "Key": "k"}
            )
        finally:
            await store.close()
        return url.partition("?")[0]

    assert asyncio.run(body()) == address
