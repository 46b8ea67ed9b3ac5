"""Documents that are generated from the code, or describe it, must match the code."""

import re
from pathlib import Path

from tests.settings_page import describe
from tests.test_architecture import ROOMS

ROOT = Path(__file__).resolve().parents[1]


def test_settings_page_is_up_to_date() -> None:
    """A setting that is missing on the page, or has another default there, misleads users."""
    page = (ROOT / "docs" / "settings.md").read_text(encoding="utf-8")
    assert page == describe(), "run: python -m tests.settings_page > docs/settings.md"


def test_drawing_of_the_architecture_has_the_floors_of_the_code() -> None:
    """Newcomers trust the drawing in docs/design.md."""
    page = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    drawing = page[page.index("+---") : page.rindex("---+")]
    floors = [re.findall(r"\w+", line[8:51]) for line in drawing.splitlines() if "|" in line[8:51]]
    assert [set(rooms) for rooms in floors] == [set(rooms) for rooms in ROOMS]


def test_every_page_is_on_the_site() -> None:
    """./dev docs builds the site; a newly added page is what breaks it first."""
    (nav,) = re.findall(r"(?ms)^nav:\n(.*)\Z", (ROOT / "site/mkdocs.yml").read_text(encoding="utf-8"))
    named = re.findall(r"([a-z-]+\.md)$", nav, re.MULTILINE)
    pages = {path.name for path in (ROOT / "docs").glob("*.md")}
    assert sorted(named) == sorted(pages | {"index.md", "changelog.md", "deploy.md"})
