"""The images that `images.build` makes: the same twice, nothing that must not be there, usable.

They are built, which takes minutes and needs mmdebstrap and a mirror: `make test-images`.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest

from images.archive import kept
from images.build import HERE, NAMES, OUT, Built, build, recipe
from sandbox.drivers.selfcheck import bwrap_candidates
from tests.support import repository

SCHEMAS = repository.ROOT / "build/test-images/cyclonedx/schema/_res"
OLDEST = 1735689600
USED = {"base": ("json", "sqlite3", "ssl"), "data": ("numpy", "pandas", "matplotlib", "pyarrow")}

pytestmark = [pytest.mark.images, pytest.mark.timeout(1800)]


@dataclasses.dataclass(frozen=True)
class Made:
    """One image and its root, unpacked."""

    built: Built
    root: Path
    members: list[tarfile.TarInfo]


@pytest.fixture(scope="module", params=NAMES)
def made(request: pytest.FixtureRequest) -> Iterator[Made]:
    if shutil.which("mmdebstrap") is None:
        pytest.skip("mmdebstrap is not installed")
    built = build(recipe(request.param), OUT)
    folder = Path(tempfile.mkdtemp(prefix="root-"))
    with tarfile.open(built.folder / "layer.tar", "r:") as archive:
        members = archive.getmembers()
        archive.extractall(folder, filter="tar")
    yield Made(built=built, root=folder, members=members)
    shutil.rmtree(folder)


def inside(root: Path, *command: str) -> str:
    """Runs a command with an image's root, read-only, as an ordinary user without a network."""
    walls = [str(bwrap_candidates()[0]), "--unshare-all", "--ro-bind", str(root), "/"]
    walls += ["--uid", "1000", "--gid", "1000"]
    walls += ["--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp", "--clearenv"]
    done = subprocess.run(
        [*walls, "--chdir", "/workspace", "--", *command],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_two_builds_have_one_digest(made: Made, tmp_path: Path) -> None:
    again = build(recipe(made.built.name), tmp_path, fresh=True)
    assert (again.layer_sha256, again.image_id) == (made.built.layer_sha256, made.built.image_id)
    for name in ("layer.tar", "image.tar", "sbom.cdx.json"):
        assert (again.folder / name).read_bytes() == (made.built.folder / name).read_bytes(), name


def test_what_was_built_is_not_built_again(made: Made) -> None:
    before = (made.built.folder / "layer.tar").stat()
    assert build(recipe(made.built.name), OUT) == made.built
    assert (made.built.folder / "layer.tar").stat() == before


def test_no_file_gives_rights_and_none_is_a_device(made: Made) -> None:
    assert [item.name for item in made.members if item.mode & 0o6000] == []
    assert [item.name for item in made.members if item.isdev()] == []
    assert [item.name for item in made.members if item.pax_headers] == []


def test_order_times_and_owners_are_fixed(made: Made) -> None:
    names = [item.name for item in made.members]
    assert names == sorted(names)
    assert {item.mtime for item in made.members} == {OLDEST}
    assert {(item.uname, item.gname) for item in made.members} == {("", "")}


def test_no_cache_log_or_name_of_a_machine_is_left(made: Made) -> None:
    assert [item.name for item in made.members if not kept(item.name)] == []
    left = [item for item in made.members if re.match(r"(var/(cache|log)|root|tmp)/.", item.name)]
    assert left == []
    for name in ("etc/machine-id", "etc/hostname", "etc/resolv.conf", "var/lib/apt/lists/lock"):
        assert not (made.root / name).exists()


def test_the_bill_of_materials_is_valid(made: Made) -> None:
    document = json.loads((made.built.folder / "sbom.cdx.json").read_text("utf-8"))
    assert _validator().is_valid(document)
    document["components"][0].pop("name")
    assert not _validator().is_valid(document)


def test_the_bill_of_materials_names_what_is_there_and_nothing_else(made: Made) -> None:
    document = json.loads((made.built.folder / "sbom.cdx.json").read_text("utf-8"))
    listed = {item["purl"] for item in document["components"]}
    query = ["dpkg-query", "--admindir", str(made.root / "var/lib/dpkg"), "--show"]
    wanted = "${db:Status-Status} ${Package} ${Version} ${Architecture}\n"
    shown = subprocess.run(
        [*query, f"--showformat={wanted}"], capture_output=True, text=True, check=True
    )
    packages = [line.split() for line in shown.stdout.splitlines()]
    debian = {(name, version) for state, name, version, _ in packages if state == "installed"}
    assert {_name_and_version(item) for item in listed if item.startswith("pkg:deb/")} == debian
    metadata = "import importlib.metadata as m, json;"
    metadata += "print(json.dumps([[d.metadata['Name'], d.version] for d in m.distributions()]))"
    found = json.loads(inside(made.root, "python3", "-c", metadata))
    python = {(re.sub(r"[-_.]+", "-", name).lower(), version) for name, version in found}
    assert {_name_and_version(item) for item in listed if item.startswith("pkg:pypi/")} == python
    if lock := recipe(made.built.name).requirements:
        pinned = dict(re.findall(r"^([\w.-]+)==(\S+)", lock.read_text(), re.MULTILINE))
        assert python == {(name.replace("_", "-"), version) for name, version in pinned.items()}


def test_every_program_and_library_belongs_to_what_the_bill_names(made: Made) -> None:
    owned: set[str] = set()
    for path in (made.root / "var/lib/dpkg/info").glob("*.list"):
        for line in path.read_text("utf-8").splitlines():
            owned.add(_merged(line))
    for path in made.root.rglob("*.dist-info/RECORD"):
        folder = path.parent.parent
        for line in path.read_text("utf-8").splitlines():
            owned.add(
                "/" + os.path.normpath(folder / line.split(",")[0])[len(str(made.root)) + 1 :]
            )
    strangers = []
    for item in made.members:
        if item.isreg() and _is_program(made.root / item.name) and f"/{item.name}" not in owned:
            strangers.append(item.name)
    assert strangers == []


def test_everything_named_can_be_used_and_is_compiled(made: Made) -> None:
    code = f"""
import importlib, json
names = {list(USED[made.built.name])!r}
cached = [importlib.import_module(name).__spec__.cached for name in names]
print(json.dumps(cached))
"""
    cached = json.loads(inside(made.root, "python3", "-c", code))
    assert all((made.root / path[1:]).is_file() for path in cached)


def test_the_data_image_has_git_and_draws_without_a_screen(made: Made) -> None:
    if made.built.name != "data":
        assert not (made.root / "usr/bin/git").exists()
        return
    assert inside(made.root, "git", "--version").startswith("git version")
    code = """
import io, matplotlib
matplotlib.use("agg")
import matplotlib.pyplot as plt, numpy as np, pandas as pd, pyarrow as pa
plt.plot(np.arange(3)); drawn = io.BytesIO(); plt.savefig(drawn)
table = pa.Table.from_pandas(pd.DataFrame({"a": [1, 2]}))
print(len(drawn.getvalue()) > 1000, table.num_rows)
"""
    out = inside(made.root, "env", "MPLCONFIGDIR=/tmp", "python3", "-c", code)
    assert out.split() == ["True", "2"]


def test_the_image_is_what_its_id_says(made: Made) -> None:
    with tarfile.open(made.built.folder / "image.tar") as archive:
        manifest = json.load(_member(archive, "manifest.json"))[0]
        configuration = json.load(_member(archive, manifest["Config"]))
    assert manifest["Config"] == made.built.image_id.removeprefix("sha256:") + ".json"
    assert configuration["rootfs"]["diff_ids"] == [f"sha256:{made.built.layer_sha256}"]
    assert "Volumes" not in configuration["config"]


def test_every_dockerfile_takes_its_base_as_an_argument() -> None:
    for name in NAMES:
        lines = (HERE / name / "Dockerfile").read_text("utf-8").splitlines()
        words = [line for line in lines if line and not line.startswith("#")]
        assert words[:2] == ["ARG BASE", "FROM ${BASE}"]


def _member(archive: tarfile.TarFile, name: str) -> Any:
    file = archive.extractfile(name)
    assert file is not None
    return file


def _validator() -> Any:
    """Checks against the official schema, as the library of CycloneDX carries it."""
    assert SCHEMAS.is_dir(), "the schemas are not there: make test-images fetches them"
    resources = {
        f"http://cyclonedx.org/schema/{name}.SNAPSHOT.schema.json": json.loads(
            (SCHEMAS / f"{name}.SNAPSHOT.schema.json").read_text("utf-8")
        )
        for name in ("spdx", "jsf-0.82")
    }
    schema = json.loads((SCHEMAS / "bom-1.5.SNAPSHOT.schema.json").read_text("utf-8"))
    registry = jsonschema_rs.Registry(list(resources.items()), draft=jsonschema_rs.Draft7)
    return jsonschema_rs.Draft7Validator(schema, registry=registry, offline=True)


def _name_and_version(purl: str) -> tuple[str, str]:
    from urllib.parse import unquote

    name, _, version = purl.rpartition("/")[2].partition("?")[0].rpartition("@")
    return unquote(name), unquote(version)


def _merged(path: str) -> str:
    """Where a file of a package lies now that /bin and its like are links into /usr."""
    return "/usr" + path if re.match(r"/(bin|sbin|lib\w*)/", path) else path


def _is_program(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == b"\x7fELF"
