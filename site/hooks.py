"""What mkdocs does with files outside of docs/: README and CHANGELOG become pages, and so does all that is in deploy/.

Links are written for a reader of the repository; here they are turned to these pages.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
MAX_SHOWN_BYTES = 8_000
LANGUAGES = {
    ".yaml": "yaml",
    ".json": "json",
    ".py": "python",
    ".sh": "bash",
    ".sbatch": "bash",
    ".service": "ini",
}
PAGES = {"README.md": "index.md", "CHANGELOG.md": "changelog.md", "SECURITY.md": "security.md"}


def on_files(files: Files, config: Any) -> Files:
    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8")))
    files.append(File.generated(config, "deploy.md", content=deployment()))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    return re.sub(r"\]\(([^)\s]+)\)", lambda found: f"]({turned(found[1])})", markdown)


def turned(target: str) -> str:
    """Where a link of the repository leads on the site."""
    path, _, anchor = target.removeprefix("../").removeprefix("docs/").partition("#")
    if path in PAGES:
        return PAGES[path] + (f"#{anchor}" if anchor else "")
    if path.startswith("deploy"):
        return f"deploy.md#{slug(path)}"
    return target.removeprefix("docs/")


def slug(path: str) -> str:
    return re.sub(r"[^a-z0-9_-]", "", path.strip("/").lower().replace("/", "-").replace(".", "-"))


def deployment() -> str:
    """All files of deploy/, folder by folder."""
    parts = ["# Files to start from", "All of `deploy/`: what each is for is in [operations](operations.md)."]
    last = None
    files = [
        path for path in (ROOT / "deploy").rglob("*") if path.is_file() and "__pycache__" not in path.parts
    ]
    for path in sorted(files, key=lambda each: (each.parts[:-1], each.name)):
        name = path.relative_to(ROOT).as_posix()
        folder = path.parent.relative_to(ROOT).as_posix()
        if folder != last:
            parts.append(f"## {folder} {{ #{slug(folder)} }}")
            last = folder
        parts.append(f"### {path.name} {{ #{slug(name)} }}")
        text = path.read_text(encoding="utf-8")
        if len(text) > MAX_SHOWN_BYTES:
            parts.append(f"`{name}` in the repository, {len(text.splitlines())} lines.")
        else:
            parts.append(f"````{LANGUAGES.get(path.suffix, 'text')}\n{text.rstrip()}\n````")
    return "\n\n".join(parts) + "\n"
