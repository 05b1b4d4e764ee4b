"""Hooks of mkdocs: pages made of README.md, CONTRIBUTING.md and CHANGELOG.md, and links to files outside docs/.

Pages link to each other and to files of the repository by relative paths, which work in an editor and on a forge. On
the site a file outside docs/ is a link to the repository. A link to a file that does not exist ends the build.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[2]
FROM_ROOT = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
"""The pages that are made of files outside docs/, by the path of the file in the repository."""
_LINK = re.compile(r"(!?\[(?:[^\[\]]|\[[^\]]*\])*\]\()([^)\s]+)(\))")


def on_files(files: Any, config: Any) -> Any:
    """Adds the pages of `FROM_ROOT`."""
    for source, page in FROM_ROOT.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Returns the page with the links that the site needs."""
    made_of = {target: source for source, target in FROM_ROOT.items()}
    here = page.file.src_uri
    source = made_of.get(here, f"docs/{here}")

    def replace(link: re.Match[str]) -> str:
        return link[1] + site_link(source, here, link[2], config["repo_url"]) + link[3]

    parts = re.split(r"(^```.*?^```)", markdown, flags=re.MULTILINE | re.DOTALL)
    return "".join(part if part.startswith("```") else _LINK.sub(replace, part) for part in parts)


def site_link(source: str, page: str, link: str, repo_url: str) -> str:
    """Returns the link of the site for `link` in the file `source` of the repository, relative to `page`.

    `("README.md", "index.md", "docs/vllm.md#limits")` is `vllm.md#limits`; `("docs/vllm.md", "vllm.md",
    "../examples/vllm")` is `REPO_URL/tree/main/examples/vllm`.

    Raises:
        PluginError: the repository has no such file.
    """
    path, mark, anchor = link.partition("#")
    if not path or re.match(r"[a-z]+:", path):
        return link
    target = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
    if not (ROOT / target).exists():
        raise PluginError(f"{source} links to {link}, and there is no {target}")
    on_site = FROM_ROOT.get(target) or (target.removeprefix("docs/") if target.startswith("docs/") else "")
    if on_site:
        return posixpath.relpath(on_site, posixpath.dirname(page) or ".") + mark + anchor
    return f"{repo_url}/{'tree' if (ROOT / target).is_dir() else 'blob'}/main/{target}{mark}{anchor}"
