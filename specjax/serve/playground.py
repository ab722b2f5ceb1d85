"""The page at `/`: a chat that shows how its text was drafted.

It is one static file without secrets, so it needs no API key: it asks the person for one, and sends it with its own
requests. Its Content-Security-Policy allows this very script and style, by their hashes, and connections to this server
alone.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import re
from pathlib import Path

from fastapi import FastAPI
from starlette.responses import Response

from specjax.serve.middleware import PAGE

FILE = Path(__file__).with_name("playground.html")


@functools.cache
def page() -> tuple[bytes, dict[str, str]]:
    """The document and its headers."""
    text = FILE.read_text(encoding="utf-8")
    policy = {
        "default-src": "'none'",
        "script-src": _hash(text, "script"),
        "style-src": _hash(text, "style"),
        "img-src": "data:",  # the icon
        "connect-src": "'self'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
        "require-trusted-types-for": "'script'",  # text becomes markup nowhere
    }
    return text.encode(), {
        "Content-Security-Policy": "; ".join(f"{name} {value}" for name, value in policy.items()),
        "Cache-Control": "no-cache",
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
    }


def _hash(text: str, tag: str) -> str:
    """The source of the only element of that name, as a policy names it."""
    (found,) = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(found.encode()).digest()).decode()}'"


def add_playground(app: FastAPI) -> None:
    @app.api_route(PAGE, methods=["GET", "HEAD"])
    async def playground() -> Response:
        content, headers = page()
        return Response(content, headers=headers, media_type="text/html")
