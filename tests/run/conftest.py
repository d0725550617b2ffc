"""A browser, for the tests of a run's page."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def opened(chromium: Any, tmp_path: Path) -> Iterator[Any]:
    """Opens a page without a network; whatever it asks for but itself is a failure, as is an error of its script."""
    contexts: list[Any] = []
    complaints: list[str] = []

    def open_page(path: Path, **options: Any) -> Any:
        context = chromium.new_context(**options)
        contexts.append(context)
        context.set_offline(True)
        page = context.new_page()
        page.on("request", lambda request: complaints.append(request.url) if request.url != path.as_uri() else None)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.goto(path.as_uri())
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert not complaints
