"""Files of torch.save's whose bytes are not what they say themselves."""

import io
import zipfile
from pathlib import Path

import pytest
import torch

from ckpt_async.local import zip_records
from ckpt_async.local.zip_records import wrong_record


def test_every_record_is_compared_with_what_its_directory_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("archive/data.pkl", b"a pickle")
        archive.writestr("archive/data/0", b"\1" * 400)
    whole = buffer.getvalue()
    spoilt = whole.replace(b"\1" * 400, b"\2" + b"\1" * 399)
    path = tmp_path / "file"
    torch.save({"w": torch.arange(5000.0), "step": 1}, path)
    assert wrong_record(path) == ""
    for read_bytes in (7, 400, 1 << 20):
        monkeypatch.setattr(zip_records, "_READ_BYTES", read_bytes)
        path.write_bytes(whole)
        assert wrong_record(path) == ""
        path.write_bytes(spoilt)
        assert wrong_record(path) == "archive/data/0 does not match the zip directory"
    path.write_bytes(whole[:-9])
    assert wrong_record(path)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data/0", b"1" * 99)
    assert wrong_record(path) == ""
    assert wrong_record(tmp_path / "none")


@pytest.mark.skipif(not hasattr(torch.serialization, "set_crc32_options"), reason="before torch 2.6")
def test_a_file_without_checksums_is_right(tmp_path: Path) -> None:
    """torch writes 0 for each if it is told to compute none, and every such file was taken for damaged."""
    path = tmp_path / "file"
    computes = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"w": torch.arange(5000.0)}, path)
    finally:
        torch.serialization.set_crc32_options(computes)
    assert wrong_record(path) == ""
