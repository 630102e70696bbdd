"""Root file systems of templates under bubblewrap: a small one, made from the system's Python."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandbox.drivers.bubblewrap import BubblewrapDriver
from sandbox.drivers.driver import StartFailed
from tests.support.sandboxes import Speaker, request

PYTHON = Path("/usr/bin/python3")
LEFT_OUT = ("__pycache__", "dist-packages", "site-packages", "config-*", "ensurepip", "idlelib",
            "lib2to3", "pydoc_data", "test", "tkinter", "turtledemo")  # fmt: skip


def make_root(root: Path) -> None:
    """Writes a root file system with a Python, its library and nothing else."""
    python = PYTHON.resolve()
    library = Path(f"/usr/lib/{python.name}")
    for name in ("bin", "lib", "lib64"):
        (root / "usr" / name).mkdir(parents=True)
        (root / name).symlink_to(f"usr/{name}")
    shutil.copy(python, root / "usr/bin/python3")
    inside = root / "usr/lib" / python.name
    shutil.copytree(library, inside, ignore=shutil.ignore_patterns(*LEFT_OUT))
    programs = [str(python), *map(str, inside.rglob("*.so"))]
    shown = subprocess.run(["ldd", *programs], capture_output=True, text=True, check=False).stdout
    for text in set(re.findall(r"/\S+\.so[.0-9]*(?= \()", shown)):
        target = root / text.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(Path(text).resolve(), target)
    (root / "usr/marked").write_text("a root of its own")


@pytest.fixture
def roots(folder: Path) -> Iterator[dict[str, Path]]:
    """The roots of three templates, of which one is no root and one has no Python."""
    if not PYTHON.exists() or not Path(f"/usr/lib/{PYTHON.resolve().name}").is_dir():
        pytest.skip("the system has no Python of its own to copy")
    found = {name: folder / name for name in ("small", "empty", "absent")}
    make_root(found["small"])
    (found["empty"] / "usr").mkdir(parents=True)
    yield found
    for path in found.values():
        shutil.rmtree(path, ignore_errors=True)


@pytest.mark.parametrize("uses_zygote", [True, False], ids=["zygote", "without-zygote"])
async def test_a_templates_sandboxes_see_its_root_and_nothing_of_the_machines(
    folder: Path, roots: dict[str, Path], *, uses_zygote: bool
) -> None:
    (folder / "shared").mkdir(exist_ok=True)
    driver = BubblewrapDriver(
        "one", folder / "state", shared=folder / "shared", uses_zygote=uses_zygote, roots=roots
    )
    code = "import os; print(int(os.path.exists('/usr/marked')), len(os.listdir('/usr/bin')))"
    try:
        statement = await driver.prepare()
        assert statement.usable, statement.problem
        seen = {}
        for template in ("small", "default"):
            speaker = Speaker(
                await driver.create(dataclasses.replace(request(), template=template))
            )
            await speaker.ready()
            seen[template] = (await speaker.run(code)).output.split()
        assert seen["small"] == ["1", "1"]
        assert seen["default"] == ["0", str(len(os.listdir("/usr/bin")))]
        for template, problem in (("empty", "no such file"), ("absent", "no folder usr")):
            with pytest.raises(StartFailed, match=problem):
                await driver.create(dataclasses.replace(request(), template=template))
    finally:
        await driver.close()
    assert not any((folder / "shared").iterdir())
