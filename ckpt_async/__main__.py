"""Entry point: `python -m ckpt_async …` does the same as `ckpt-async …`."""

import sys

from ckpt_async.cli import main

if __name__ == "__main__":
    sys.exit(main())
