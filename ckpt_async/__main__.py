"""Entry point of `ckpt-async …` and of `python -m ckpt_async …`."""

import sys


def main() -> int:
    """Run the command line. Ctrl-C ends it quietly, also while the rest of the package is still being imported."""
    try:
        from ckpt_async.cli import main as run

        return run()
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
