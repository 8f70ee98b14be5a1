"""Hooks of mkdocs for differences between the pages of docs/ in the repository and on the site.

On the site, a link to a file outside of docs/ (source code, the README) is replaced by its text. The decisions are
added to the navigation in the order of their numbers.

Run by mkdocs through ``hooks`` in mkdocs.yml: make docs
"""

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
_LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(((?:\.\./)+[^)\s]+|decisions/?)\)")


def on_config(config: Any) -> Any:
    """Add the decisions to the navigation."""
    pages = [f"decisions/{path.name}" for path in sorted((ROOT / "docs" / "decisions").glob("*.md"))]
    for section in config["nav"]:
        for entry in section.get("Internals", []):
            if "Decisions" in entry:
                entry["Decisions"] = pages
    return config


def on_page_markdown(markdown: str, page: Any, **kwargs: Any) -> str:
    """Replace links to files outside of docs/ by their text."""
    folder = (ROOT / "docs" / page.file.src_uri).parent

    def replacement(match: re.Match[str]) -> str:
        target = (folder / match[2].partition("#")[0]).resolve()
        is_page = target.is_relative_to(ROOT / "docs") and target.is_file()
        return match[0] if is_page else match[1]

    return _LINK.sub(replacement, markdown)
