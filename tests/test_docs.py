"""Documents that are made from the code must say what the code says."""

from pathlib import Path

from ckpt_async.core import settings

ROOT = Path(__file__).resolve().parents[1]


def test_settings_page_is_the_generated_one() -> None:
    """A setting that is not on the page, or has another default there, misleads."""
    page = (ROOT / "docs" / "settings.md").read_text(encoding="utf-8")
    assert page == settings.describe(), "run: python -m ckpt_async.core.settings > docs/settings.md"
