"""`python -m ckpt_async …` is `ckpt-async …`."""

import sys

from ckpt_async.cli import main

if __name__ == "__main__":
    sys.exit(main())
