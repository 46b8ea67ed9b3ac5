"""The demo shows the main purpose of the package, so it runs here for real; and its verdict must be able to fail."""

import json
import subprocess
from pathlib import Path

from ckpt_async.core import keys
from tests.demo.check import check
from tests.demo.config import Config, read_log

DEV = Path(__file__).resolve().parent.parent / "dev"


def test_a_killed_rank_loses_nothing_and_a_damaged_byte_is_found(tmp_path: Path) -> None:
    """Run torchrun, SIGKILL a rank in the middle of an upload, resume, compare every byte and loss, then check with
    damage.
    """
    command = [DEV, "demo", "--store", "file", "--json", "--keep", tmp_path, "--steps", "12"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    result = json.loads(ended.stdout)
    assert (ended.returncode, result["wrong"]) == (0, []), ended.stderr[-3000:]
    assert result["kill"]["rank"] == 1
    assert result["kill"]["resumed_from_step"] == result["kill"]["step"]
    assert result["generations"] == [1, 2]
    assert result["shards_compared"] == 2 * result["checkpoints_committed"] > 0
    assert all(url.startswith("http://127.0.0.1:") for url in result["metrics_urls"])

    config = Config.read(str(tmp_path / "config.json"))
    assert check(config, 2).wrong == []
    root = Path(config.remote.removeprefix("file://"))
    shard = next(path for path in sorted((root / keys.DATA).rglob("*")) if path.is_file())
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    key = shard.relative_to(root).as_posix()
    assert any(key in wrong for wrong in check(config, 2).wrong)

    losses = [line for line in read_log(config.log(1)) if line["event"] == "loss"]
    assert len({line["step"] for line in losses}) == 12
    _, resumed = (line["at"] for line in read_log(config.log(1)) if line["event"] == "started")
    assert {line["at"] < resumed for line in losses} == {True, False}, "trained before the kill and after it"
    with config.log(1).open("a", encoding="utf-8") as log:
        log.write(json.dumps({**losses[0], "loss": -1.0}) + "\n")
    assert any("different losses at step 1" in wrong for wrong in check(config, 2).wrong)
