"""Hooks of mkdocs: what differs between the pages of docs/ in the repository and on the site.

A link to a file outside docs/ (source code, the README) is a link in the repository, and its text alone on the site.
The decisions are listed in the navigation by the numbers of their files.

Run by mkdocs, through ``hooks`` in mkdocs.yml: make docs
"""

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
_LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(((?:\.\./)+[^)\s]+|decisions/?)\)")


def on_config(config: Any) -> Any:
    """Put the decisions where the navigation names their folder."""
    pages = [f"decisions/{path.name}" for path in sorted((ROOT / "docs" / "decisions").glob("*.md"))]
    for section in config["nav"]:
        for entry in section.get("Internals", []):
            if "Decisions" in entry:
                entry["Decisions"] = pages
    return config


def on_page_markdown(markdown: str, page: Any, **kwargs: Any) -> str:
    """Take the links out that lead out of docs/."""
    place = (ROOT / "docs" / page.file.src_uri).parent

    def shown(found: re.Match[str]) -> str:
        target = (place / found[2].partition("#")[0]).resolve()
        is_page = target.is_relative_to(ROOT / "docs") and target.is_file()
        return found[0] if is_page else found[1]

    return _LINK.sub(shown, markdown)
