"""Fixtures of the server's tests. A module with a server of its own replaces `server`."""

from __future__ import annotations

import pytest
from engine_helpers import shared_engine
from server_helpers import Hang, running


@pytest.fixture(scope="module")
def server():
    with running(shared_engine("NGRAM")) as served:
        yield served


@pytest.fixture
def hang():
    """A function that hangs until `let_go` is set, at the latest when the test ends."""
    function = Hang()
    yield function
    function.let_go.set()
