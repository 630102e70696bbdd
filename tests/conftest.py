"""What holds for every test: a private temporary folder, no user settings, nothing left behind.

Called by pytest. The leak check fails a test that leaves an asyncio task, a descriptor, a process
(an orphan as well), a folder under the temporary folder, or a control group.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import hypothesis
import pytest

from tests.support import leaks

_TASK_CHECK = "tasks_are_gone"


def pytest_configure(config: pytest.Config) -> None:
    """Gives the run a temporary folder of its own and hides the user's settings from it."""
    leaks.become_subreaper()
    # Short: socket paths have 107 characters. Open to other users: sandboxes run as them.
    folder = tempfile.mkdtemp(prefix="ht-")
    os.chmod(folder, 0o755)
    os.environ["TMPDIR"] = tempfile.tempdir = folder
    for name in [name for name in os.environ if name.startswith(("HUTCH_", "XDG_"))]:
        del os.environ[name]
    os.environ["XDG_STATE_HOME"] = str(Path(folder, "pytest-of-all", "state"))
    config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
    examples = int(os.environ.get("HYPOTHESIS_EXAMPLES", "100"))
    hypothesis.settings.register_profile(
        "hutch", deadline=None, print_blob=True, max_examples=examples
    )
    hypothesis.settings.load_profile("hutch")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts the task check around the other fixtures of every asynchronous test."""
    for item in items:
        if isinstance(item, pytest.Function) and inspect.iscoroutinefunction(item.function):
            item.fixturenames.insert(0, _TASK_CHECK)


@pytest.fixture
async def tasks_are_gone() -> AsyncIterator[None]:
    """Fails a test that leaves asyncio tasks behind: the loop's end would hide them."""
    before = asyncio.all_tasks()
    yield
    for _ in range(200):
        left = {task for task in asyncio.all_tasks() - before if task is not asyncio.current_task()}
        if not left:
            return
        await asyncio.sleep(0.01)
    pytest.fail("left asyncio tasks behind: " + "; ".join(sorted(map(repr, left))))


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """Fails a test that leaves a descriptor, a process, a folder or a control group behind."""
    temporary = Path(tempfile.gettempdir())
    before = leaks.take_census(temporary)
    yield
    found = leaks.find_leaks(before, temporary)
    if found:
        leaks.end_processes(before)
        pytest.fail("left behind:\n  " + "\n  ".join(found))
