"""`python -m benchmarks.report_parts.browser PAGE`: opens a page in a browser without a window, and says what it shows.

The browser is Qt's WebEngine, which is Chromium, from PyPI. Prints JSON: `title`, `images` (how many), `drawn` (how
many of them were decoded), `text` (what can be read), `height` (pixels), `fetched` (addresses outside of the page that
it asked for) and `messages` (of the console).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

_SETTLE_MS = 500
_PATIENCE_MS = 60_000
_LOOK = """JSON.stringify({title: document.title, images: document.images.length,
drawn: Array.from(document.images).filter(image => image.naturalWidth > 0).length,
text: document.body.innerText, height: document.documentElement.scrollHeight})"""


def look_at(page: Path, screenshot: Path | None, width: int, height: int) -> dict[str, Any]:
    """What the browser shows of `page`; see the top of this file.

    Raises:
        RuntimeError: the page could not be opened in a minute.
    """
    os.environ.setdefault("QT_QPA_PLATFORM", "offscreen")
    os.environ.setdefault("QTWEBENGINE_CHROMIUM_FLAGS", "--disable-gpu")
    if os.geteuid() == 0:
        os.environ.setdefault("QTWEBENGINE_DISABLE_SANDBOX", "1")  # Chromium's sandbox refuses to run as root
    from PySide6.QtCore import QEventLoop, QTimer, QUrl
    from PySide6.QtWebEngineCore import QWebEnginePage, QWebEngineUrlRequestInfo, QWebEngineUrlRequestInterceptor
    from PySide6.QtWebEngineWidgets import QWebEngineView
    from PySide6.QtWidgets import QApplication

    fetched: list[str] = []
    messages: list[str] = []

    class Watch(QWebEngineUrlRequestInterceptor):
        def interceptRequest(self, info: QWebEngineUrlRequestInfo) -> None:
            if info.requestUrl().scheme() not in ("data", "about") and info.requestUrl() != url:
                fetched.append(info.requestUrl().toString())

    class Page(QWebEnginePage):
        def javaScriptConsoleMessage(self, level: Any, message: str, line: int, source: str) -> None:
            messages.append(message)

    application = QApplication.instance() or QApplication([sys.argv[0]])
    url = QUrl.fromLocalFile(str(page.absolute()))
    view, watch = QWebEngineView(), Watch()
    shown = Page(view)
    shown.setUrlRequestInterceptor(watch)
    view.setPage(shown)
    view.resize(width, height)
    view.show()
    loop, seen = QEventLoop(), {}

    def loaded(well: bool) -> None:
        if well:
            QTimer.singleShot(_SETTLE_MS, lambda: shown.runJavaScript(_LOOK, 0, looked))
        else:
            loop.quit()

    def looked(facts: str) -> None:
        seen.update(json.loads(facts))
        if screenshot is not None:
            view.grab().save(str(screenshot))
        loop.quit()

    view.loadFinished.connect(loaded)
    view.load(url)
    QTimer.singleShot(_PATIENCE_MS, loop.quit)
    loop.exec()
    view.close()
    shown.deleteLater()
    application.processEvents()
    if not seen:
        raise RuntimeError(f"{page} could not be opened in the browser")
    return {**seen, "fetched": fetched, "messages": messages}


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report_parts.browser", description=__doc__)
    parser.add_argument("page", type=Path)
    parser.add_argument("--screenshot", type=Path, metavar="FILE", help="a PNG of the top of the page")
    parser.add_argument("--width", type=int, default=1160, help="pixels (1160)")
    parser.add_argument("--height", type=int, default=1000, help="pixels (1000)")
    options = parser.parse_args()
    try:
        print(json.dumps(look_at(options.page, options.screenshot, options.width, options.height)))
    except ImportError as error:
        sys.exit(
            f"error: there is no browser: {error}; pip install PySide6-Addons (and libnss3, libegl1 of the system)"
        )
    except RuntimeError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
