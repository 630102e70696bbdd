"""Builds the images that sandboxes are made from: `python -m images.build`, `make images`.

An image is one layer in a reproducible form (`images.archive`) with its bill of materials
(`images.sbom`). Its files come from Debian's packages (mmdebstrap) and pinned wheels, or from an
official Python image and the Dockerfile beside `image.json`. What was built is kept under the
digest of all that went in, and not built again. Needs root or a user namespace with subordinate
ids for Debian's way, a container engine for the other.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from images import archive, sbom

HERE = Path(__file__).resolve().parent
OUT = HERE.parent / "build" / "images"
NAMES = ("base", "data")
WAYS = ("debian", "official")
# Of the build itself: a change to any of them makes other images.
SOURCES = ("archive.py", "build.py", "debian.json", "finish.py", "sbom.py")
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
_ENVIRONMENT = ("LANG=C.UTF-8", "PATH=/usr/local/bin:/usr/bin:/bin", "PYTHONNOUSERSITE=1")


class BuildProblem(Exception):
    """An image cannot be built here; the text says why and names the mend."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What an image is made from."""

    name: str
    way: str
    packages: tuple[str, ...]
    requirements: Path | None
    mirror: str = ""
    """Where Debian's packages come from, an address or an APT line; empty: Debian's own mirrors."""

    @property
    def folder(self) -> Path:
        """Where its recipe lies."""
        return HERE / self.name


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """An image that lies on the disk."""

    name: str
    image_id: str
    """What an engine calls it by, `sha256:...`."""
    layer_sha256: str
    size_bytes: int
    components: int
    folder: Path
    """Holds `image.tar` (for `docker load`), `layer.tar` (the root's files), `sbom.cdx.json` and
    `image.json`."""


def recipe(name: str, way: str = "debian", mirror: str = "") -> Recipe:
    """Reads an image's recipe."""
    found = json.loads((HERE / name / "image.json").read_text("utf-8"))
    lock = found["requirements"]
    return Recipe(
        name=name,
        way=way,
        packages=tuple(found["packages"]),
        requirements=HERE / name / lock if lock else None,
        mirror=mirror,
    )


def build(made: Recipe, out: Path = OUT, *, fresh: bool = False) -> Built:
    """Builds an image, or takes the one that was built from the same inputs.

    Args:
        made: What to make.
        out: Where images are kept.
        fresh: Build it even if it is there.

    Raises:
        BuildProblem: a tool, a right or a package source is missing.
    """
    debian = json.loads((HERE / "debian.json").read_text("utf-8"))
    key = inputs_digest(made)
    folder = out / made.name / key[:16]
    if not fresh and (folder / "image.json").exists():
        return _read(folder)
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out, prefix=".building-") as name:
        work = Path(name)
        root = work / "root.tar"
        if made.way == "official":
            from_dockerfile(made, _official(made.name), root)
        else:
            _from_debian(made, debian, root, work)
        _finish(made, debian, root, work)
        root.unlink()
        shutil.rmtree(work / "wheels", ignore_errors=True)
        work.chmod(0o755)
        shutil.rmtree(folder, ignore_errors=True)
        folder.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(work, folder)
        work.mkdir()  # for who removes it
    return _read(folder)


def inputs_digest(made: Recipe) -> str:
    """The digest of all that goes into an image, in lower-case hexadecimal.

    Debian's packages are not among it: `--fresh` takes what is current.

    Raises:
        BuildProblem: no official image is pinned.
    """
    digest = hashlib.sha256()
    paths = [HERE / name for name in SOURCES] + [made.folder / "image.json"]
    if made.requirements is not None:
        paths.append(made.requirements)
    for path in paths:
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    digest.update(f"{made.name} {made.way} {made.mirror} {platform.machine()}".encode())
    if made.way == "official":
        digest.update((made.folder / "Dockerfile").read_bytes())
        digest.update(_official(made.name).encode())
    return digest.hexdigest()


def _finish(made: Recipe, debian: dict[str, Any], root: Path, work: Path) -> None:
    """Writes the layer, the image and its bill of materials from a root."""
    epoch = debian["source_date_epoch"]
    layer = work / "layer.tar"
    digest, size, count = archive.write_layer(root, layer, epoch)
    machine = platform.machine()
    configuration = {
        "architecture": ARCHITECTURES.get(machine, machine),
        "created": "2025-01-01T00:00:00Z",
        "config": {
            "Cmd": ["python3"],
            "Env": list(_ENVIRONMENT),
            "Labels": {"hutch.image": made.name, "hutch.layer": digest},
            "WorkingDir": "/workspace",
        },
    }
    image_id = archive.write_image(
        layer, digest, work / "image.tar", configuration, f"hutch/{made.name}:latest"
    )
    bill = sbom.document(layer, made.name, digest)
    _write_json(work / "sbom.cdx.json", bill)
    _write_json(
        work / "image.json",
        {
            "name": made.name,
            "from": made.way,
            "image_id": image_id,
            "layer_sha256": digest,
            "size_bytes": size,
            "files": count,
            "components": len(bill["components"]),
        },
    )


def _from_debian(made: Recipe, debian: dict[str, Any], root: Path, work: Path) -> None:
    if shutil.which("mmdebstrap") is None:
        raise BuildProblem("mmdebstrap is missing: sudo apt-get install -y mmdebstrap")
    mode = "root" if os.geteuid() == 0 else "unshare"
    hooks = [f"--customize-hook=copy-in {HERE / 'finish.py'} /"]
    if made.requirements is not None:
        wheels = work / "wheels"
        _install_wheels(made.requirements, wheels, debian["python"])
        inside = f"/usr/local/lib/python{debian['python']}/dist-packages"
        hooks = [
            f'--customize-hook=mkdir -p "$1{inside}"',
            f"--customize-hook=sync-in {wheels} {inside}",
            *hooks,
        ]
    hooks += [
        '--customize-hook=chroot "$1" python3 -I -S /finish.py',
        '--customize-hook=rm "$1/finish.py"',
    ]
    command = ["mmdebstrap", "--variant=minbase", f"--mode={mode}", "--format=tar"]
    command += [f"--include={','.join(made.packages)}", *hooks, "--quiet"]
    command += [debian["suite"], str(root)]
    if made.mirror:
        command.append(made.mirror)  # else Debian's own, with its security updates
    epoch = str(debian["source_date_epoch"])
    _run(command, {"SOURCE_DATE_EPOCH": epoch})


def _install_wheels(lock: Path, target: Path, python: str) -> None:
    """Puts the pinned wheels of this machine's kind into a folder, each checked by its digest."""
    machine = platform.machine()
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile"]
    command += ["--require-hashes", "--requirement", str(lock), "--target", str(target)]
    command += ["--only-binary", ":all:", "--implementation", "cp", "--python-version", python]
    for glibc in ("manylinux_2_28", "manylinux_2_17", "manylinux2014"):
        command += ["--platform", f"{glibc}_{machine}"]
    _run(command, {})
    shutil.rmtree(target / "bin", ignore_errors=True)  # they name this machine's Python


def from_dockerfile(made: Recipe, base: str, root: Path, network: str = "default") -> None:
    """Writes the root that an image's Dockerfile makes, as a tar file.

    Args:
        made: Whose Dockerfile.
        base: The image that it begins with, as the engine names it.
        root: Where the files go.
        network: What its steps may reach: `default`, or `none`.

    Raises:
        BuildProblem: there is no engine, or a step failed.
    """
    if shutil.which("docker") is None:
        raise BuildProblem("a container engine is needed: sudo apt-get install -y docker.io")
    tag = f"hutch-building/{made.name}:{os.getpid()}"
    command = ["docker", "build", "--quiet", "--force-rm", "--network", network, "--tag", tag]
    command += ["--build-arg", f"BASE={base}", "--file", str(made.folder / "Dockerfile")]
    _run([*command, str(HERE)], {})
    try:
        with _container(tag) as container:
            _run(["docker", "export", "--output", str(root), container], {})
    finally:
        _run(["docker", "image", "rm", "--force", tag], {})


@contextlib.contextmanager
def _container(tag: str) -> Iterator[str]:
    made = _run(["docker", "create", "--network", "none", tag], {}).strip()
    try:
        yield made
    finally:
        _run(["docker", "rm", "--force", made], {})


def _official(name: str) -> str:
    entry = json.loads((HERE / "bases.json").read_text("utf-8"))[name]
    if not entry["digest"]:
        raise BuildProblem(
            f"images/bases.json has no digest of {entry['image']}: make images-pin writes it,"
            " where a registry answers"
        )
    repository = entry["image"].rpartition(":")[0]
    return f"{repository}@{entry['digest']}"


def _run(command: Sequence[str], environment: dict[str, str]) -> str:
    done = subprocess.run(
        command,
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        text = f"{command[0]} ended with {done.returncode}: {done.stderr.strip()[-2000:]}"
        raise BuildProblem(text)
    return done.stdout


def _write_json(path: Path, document: dict[str, Any]) -> None:
    path.write_text(json.dumps(document, indent=1, sort_keys=True) + "\n", "utf-8")


def _read(folder: Path) -> Built:
    found = json.loads((folder / "image.json").read_text("utf-8"))
    return Built(
        name=found["name"],
        image_id=found["image_id"],
        layer_sha256=found["layer_sha256"],
        size_bytes=found["size_bytes"],
        components=found["components"],
        folder=folder,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m images.build", description="Builds images.")
    parser.add_argument("names", nargs="*", default=NAMES, help="Which: base, data. Default: all.")
    parser.add_argument("--base", choices=WAYS, default="debian", help="What they are made from.")
    parser.add_argument("--out", type=Path, default=OUT, help="Where images are kept.")
    parser.add_argument("--mirror", default="", help="Where Debian's packages come from.")
    parser.add_argument("--fresh", action="store_true", help="Build what is there again.")
    parser.add_argument("--load", action="store_true", help="Load them into the engine.")
    options = parser.parse_args(arguments)
    for name in options.names:
        if name not in NAMES:
            parser.error(f"there is no image {name!r}; there are {', '.join(NAMES)}")
        try:
            built = build(
                recipe(name, options.base, options.mirror), options.out, fresh=options.fresh
            )
            if options.load:
                _run(["docker", "load", "--quiet", "--input", str(built.folder / "image.tar")], {})
        except BuildProblem as problem:
            sys.stderr.write(f"{name}: {problem}\n")
            return 1
        mib = built.size_bytes / 1024**2
        sys.stdout.write(
            f"{name}  {built.image_id}  {mib:.0f} MiB  {built.components} components"
            f"  {built.folder}\n"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
