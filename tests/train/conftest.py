"""A tiny target and data on disk."""

from __future__ import annotations

from pathlib import Path

import pytest
from train_helpers import save_data, save_model


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> Path:
    return save_model(tmp_path_factory.mktemp("target") / "model")


@pytest.fixture(scope="session")
def data(tmp_path_factory) -> Path:
    return save_data(tmp_path_factory.mktemp("data") / "data.jsonl")
