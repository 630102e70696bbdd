"""Fixtures of the conformance suites of drivers.

Called by pytest.
"""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.support.subjects import PARAMETERS, Subject, make_driver


@pytest.fixture
def folder() -> Iterator[Path]:
    """A short folder that sandboxes' uids may enter."""
    with tempfile.TemporaryDirectory(prefix="drv-") as name:
        os.chmod(name, 0o755)
        yield Path(name)


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runtime archives that one test built and the next need not."""
    return tmp_path_factory.mktemp("archives")


@pytest.fixture(params=PARAMETERS)
async def subject(
    request: pytest.FixtureRequest, folder: Path, archives: Path
) -> AsyncIterator[Subject]:
    """Each driver in turn, with an owner of its own."""
    driver = make_driver(request.param, secrets.token_hex(8), folder)
    shutil.copytree(archives, folder / "state" / "archives")
    statement = await driver.prepare()
    if not statement.usable:
        await driver.close()
        pytest.skip(f"{driver.name} is not usable here: {statement.problem}")
    shutil.copytree(folder / "state" / "archives", archives, dirs_exist_ok=True)
    yield Subject(kind=request.param, driver=driver, statement=statement)
    await driver.close()
