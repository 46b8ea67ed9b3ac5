"""Takes the pictures in docs/images of a real run: this is what `./dev page pictures` runs."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tests.page.browser import Browser, find
from tests.page.scenes import going_on
from tests.seaweed import SeaweedServer

IMAGES = Path(__file__).resolve().parents[2] / "docs" / "images"
MAX_BYTES = 150_000
# Width, height, whether dark, scale.
DEVICES = {
    "page-light": (1000, 830, False, 1.0),
    "page-dark": (1000, 830, True, 1.0),
    "page-phone": (390, 844, True, 1.5),
}


def main() -> int:
    program = find()
    assert program is not None, "./dev page gets it"
    IMAGES.mkdir(exist_ok=True)
    with (
        tempfile.TemporaryDirectory() as root,
        SeaweedServer(Path(root) / "store") as server,
        going_on(server, Path(root), "llama-7b") as run,
        Browser(program) as browser,
    ):
        browser.look(390, 844)
        browser.go(run.url)
        browser.until("document.querySelector('.uploading progress')?.value >= 30")
        for name, (width, height, is_dark, scale) in DEVICES.items():
            browser.look(width, height, is_dark=is_dark, scale=scale)
            browser.ask("new Promise((next) => setTimeout(next, 300))")
            path = IMAGES / f"{name}.png"
            browser.picture(path)
            assert path.stat().st_size < MAX_BYTES, f"{path} is too large"
            print(path)
        assert not browser.complaints
    return 0


if __name__ == "__main__":
    sys.exit(main())
