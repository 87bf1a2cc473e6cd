"""Hooks of mkdocs.yml: README.md is the first page, and links to files outside docs/ lead to the repository."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
_LINK = re.compile(r"\[([^\[\]]*)\]\(([^)#\s:]+)((?:#[^)\s]*)?)\)")
_BLOCK = re.compile(r"^(```.*?^```|    .*?$)", re.DOTALL | re.MULTILINE)


def on_config(config: Any) -> Any:
    """Takes the repository's address from pyproject.toml."""
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"].get("urls", {})
    config.repo_url = urls.get("Repository", "")
    return config


def on_files(files: Files, config: Any) -> Files:
    """Adds README.md as index.md."""
    files.append(File.generated(config, "index.md", content=(ROOT / "README.md").read_text()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Links as the site has them. Raises PluginError for one that leads nowhere."""
    source = ROOT / "README.md" if page.file.src_uri == "index.md" else ROOT / "docs" / page.file.src_uri

    def replaced(link: re.Match[str]) -> str:
        target = (source.parent / link[2]).resolve()
        if not target.exists():
            raise PluginError(f"{source.relative_to(ROOT)}: {link[2]} does not exist")
        within = target.relative_to(ROOT).as_posix()
        if within == "README.md":
            place = _relative("index.md", page.file.src_uri)
        elif within.startswith("docs/") and files.get_file_from_path(within.removeprefix("docs/")):
            place = _relative(within.removeprefix("docs/"), page.file.src_uri)
        elif config.repo_url:
            place = f"{config.repo_url.rstrip('/')}/blob/main/{within}"
        else:
            return link[1]
        return f"[{link[1]}]({place}{link[3]})"

    parts = _BLOCK.split(markdown)
    return "".join(part if _BLOCK.fullmatch(part) else _LINK.sub(replaced, part) for part in parts)


def _relative(target: str, page: str) -> str:
    return "../" * page.count("/") + target
