"""Hooks of mkdocs: pages and files from outside docs/, mathematics as MathML, lists of errors and of keys."""

import logging
import re
from html import unescape
from pathlib import Path
from typing import Any

from configuration_page import configuration_tables
from errors_page import messages_of
from latex2mathml.converter import convert
from mkdocs.structure.files import File, Files

log = logging.getLogger("mkdocs.hooks")  # whose warnings end a strict build
ROOT = Path(__file__).parents[2]
#: Files at the root that are pages of the site too.
PAGES = {"README.md": "index.md", "CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}
#: What pages link to, outside docs/; the site has it at the same place.
LINKED = ("results/*/*.png", "examples/*.py", "examples/*.yaml", "LICENSE")
FORMULA = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.+?)\\[)\]]</\1>', re.DOTALL)


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages and files from outside docs/."""
    for source, target in PAGES.items():
        files.append(File.generated(config, target, content=(ROOT / source).read_text(encoding="utf8")))
    for path in sorted(path for pattern in LINKED for path in ROOT.glob(pattern)):
        files.append(File(path.relative_to(ROOT).as_posix(), str(ROOT), config.site_dir, config.use_directory_urls))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links as they are on the site, whose root is docs/ and the root in one; and what pages read from the source."""
    if page.file.src_uri in PAGES.values():
        markdown = re.sub(r"\]\(docs/", "](", markdown)
        for source, target in PAGES.items():
            markdown = markdown.replace(f"]({source}", f"]({target}")
    else:
        depth = page.file.src_uri.count("/")
        markdown = markdown.replace("](" + "../" * (depth + 1), "](" + "../" * depth)
    markdown = markdown.replace("<!-- configuration -->", configuration_tables())
    return re.sub(r"<!-- messages: (.+?) -->", lambda found: messages_of(found[1].split()), markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Formulas as MathML, which browsers show without a script."""
    display = {"[": "block", "(": "inline"}
    html = FORMULA.sub(lambda found: convert(unescape(found[3]), display=display[found[2]]), html)
    for left in re.findall(r'class="arithmatex"|<!-- (?:messages|configuration).*?-->', html):
        log.warning("a page still has %s", left)
    return html
