"""What `./dev docs` runs: builds the site, and checks that it loads nothing from elsewhere. A warning is an error."""

import re
import sys
from pathlib import Path

from mkdocs.commands.build import build
from mkdocs.config import load_config
from mkdocs.exceptions import Abort

HERE = Path(__file__).resolve().parent
# Scripts, styles and images; links for a reader to click on are no matter.
LOADED = re.compile(
    r"""<(?:script|img|iframe|link|source)\b[^>]*?(?:src|href)=["']?(https?://[^"'\s>]+)|url\(["']?(https?://[^)"']+)"""
)


def main() -> int:
    config = load_config(str(HERE / "mkdocs.yml"))
    try:
        build(config)
    except Abort as error:
        print(f"docs: {error}", file=sys.stderr)
        return 1
    site = Path(config.site_dir)
    pages = [path for path in site.rglob("*") if path.suffix in (".html", ".css")]
    foreign = {
        url for path in pages for found in LOADED.findall(path.read_text(encoding="utf-8")) for url in found
    }
    if foreign - {""}:
        print(f"docs: the site would load {', '.join(sorted(foreign - {''}))}", file=sys.stderr)
        return 1
    print(f"docs: {site / 'index.html'}, {len(list(site.glob('*.html')))} pages")
    return 0


if __name__ == "__main__":
    sys.exit(main())
