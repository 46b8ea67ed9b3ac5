"""A process with as many open files as a trainer's: dataloader workers, mapped shards, the fabric's queues."""

import contextlib
import os
import resource
from collections.abc import Iterator

NUM_OPEN = 1_100  # more than select() can handle


@contextlib.contextmanager
def many_open() -> Iterator[None]:
    """Open so many files that every descriptor opened in the block has a number above 1,023."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, NUM_OPEN + 500), hard))
    opened = [os.open("/dev/null", os.O_RDONLY) for _ in range(NUM_OPEN)]
    try:
        yield
    finally:
        for each in opened:
            os.close(each)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
