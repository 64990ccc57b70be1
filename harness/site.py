"""The documentation as a site: the Markdown that git tracks, in the order of mkdocs.yml.

python -m harness.site               builds it into build/site; a dead link ends the build

The site also has every page as Markdown, under its path here, and `llms.txt`, a list of them for programs.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from harness.prose import ROOT, documents, markdown_prose

LINK = re.compile(r"\]\(([^)\s#]+)[^)\s]*\)")


class _Loader(yaml.SafeLoader):
    """Reads mkdocs.yml without making the Python objects that it names."""


_Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda *_: None)


def navigation(root: Path = ROOT) -> list[tuple[str, str, str]]:
    """Section, title and path of each page, in the order of the site."""
    settings = yaml.load((root / "mkdocs.yml").read_text(encoding="utf-8"), Loader=_Loader)
    return list(_pages(settings["nav"], ""))


def _pages(entries: list[dict[str, Any]], section: str) -> Iterator[tuple[str, str, str]]:
    for title, inner in (pair for entry in entries for pair in entry.items()):
        if isinstance(inner, str):
            yield section, title, inner
        else:
            yield from _pages(inner, title)


def copy_pages(folder: Path, root: Path = ROOT) -> None:
    """Copy every document, and what its links lead to, under the same path."""
    for name in documents(root):
        text = (root / name).read_text(encoding="utf-8")
        linked = ((root / name).parent / link for link in LINK.findall(text) if ":" not in link)
        for path in (root / name, *linked):
            if path.is_file():
                target = folder / path.resolve().relative_to(root.resolve())
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, target)


def llms_txt(root: Path = ROOT) -> str:
    """A list of the pages for programs that read: title, path, first sentence."""
    lines, last = ["# Tokenfleet"], ""
    for section, title, name in navigation(root):
        if section != last:
            lines += ["", f"## {section}", ""]
            last = section
        first = markdown_prose((root / name).read_text(encoding="utf-8")).sentences[0]
        lines.append(f"- [{title}]({name}): {first.replace('**', '')}")
    return "\n".join(lines) + "\n"


def mkdocs(folder: Path) -> subprocess.CompletedProcess[str]:
    """Build the folder's pages by its mkdocs.yml; a dead link is an error."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict"]
    calm = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, cwd=folder, env=calm, stderr=subprocess.PIPE, text=True)


def build(root: Path = ROOT) -> int:
    """Build the site; the exit code of mkdocs."""
    pages, site = root / "build" / "pages", root / "build" / "site"
    shutil.rmtree(pages, ignore_errors=True)
    copy_pages(pages, root)
    done = mkdocs(root)
    print(done.stderr, end="", file=sys.stderr)
    if done.returncode == 0:
        copy_pages(site, root)
        (site / "llms.txt").write_text(llms_txt(root), encoding="utf-8")
        print(f"{len(documents(root))} pages: {site / 'index.html'}")
    return done.returncode


if __name__ == "__main__":
    sys.exit(build())
