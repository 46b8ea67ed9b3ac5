"""A command that is told of events, by itself."""

from pathlib import Path

from ckpt_async.core.model import CheckpointId
from ckpt_async.events.command import Command
from ckpt_async.events.event import of_checkpoint
from tests.descriptors import many_open


def test_a_command_is_run_in_a_trainer_with_thousands_of_open_files(tmp_path: Path) -> None:
    event = of_checkpoint("committed", "s3://bucket/run", CheckpointId(1, 7), "step-7", 0.0)
    with many_open():
        Command(f"touch {tmp_path}/told-{{step}}", 60.0).deliver(event)
    assert (tmp_path / "told-7").exists()
