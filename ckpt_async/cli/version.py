"""Prints the version: `version`."""

from __future__ import annotations

import argparse
import sys

from ckpt_async import __version__
from ckpt_async.cli.output import Exit, print_json


def version_arguments(parser: argparse.ArgumentParser) -> None:
    pass


def version(options: argparse.Namespace) -> Exit:
    """Print the version, with --json also that of Python."""
    if options.json:
        print_json({"version": __version__, "python": ".".join(map(str, sys.version_info[:3]))})
    else:
        print(f"ckpt-async {__version__}")
    return Exit.OK
