"""No local link of the built site may lead nowhere: `python docs/check_site.py SITE`.

Looks at every page of HTML: the file that `href` or `src` names must be there, and the place in it (`#...`) too.
Addresses elsewhere are not asked: the build must not depend on the network.
"""

from __future__ import annotations

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class Page(HTMLParser):
    """Links of a page, and the places it has."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.places: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note what a tag links to and is called."""
        for name, value in attrs:
            if name in ("href", "src") and value:
                self.links.append(value)
            elif name == "id" and value:
                self.places.add(value)


def dead_links(site: Path) -> list[str]:
    """``page: link`` for each that leads nowhere."""
    pages = {file.resolve(): Page(file.read_text(encoding="utf-8")) for file in sorted(site.rglob("*.html"))}
    dead = []
    for file, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (file.parent / unquote(parts.path)).resolve() if parts.path else file
            found = target.exists()
            if found and parts.fragment and target in pages:
                found = unquote(parts.fragment) in pages[target].places
            if not found:
                dead.append(f"{file.relative_to(site.resolve())}: {link}")
    return dead


def main() -> None:
    """Print them and fail, or say how many pages are fine."""
    site = Path(sys.argv[1])
    count = len(list(site.rglob("*.html")))
    if not count:
        raise SystemExit(f"{site} has no pages")
    dead = dead_links(site)
    if dead:
        raise SystemExit("dead links:\n" + "\n".join(dead))
    print(f"{count} pages, no dead local link")


if __name__ == "__main__":
    main()
