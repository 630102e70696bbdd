"""The form of a layer, on a root made for it: what is left out, what is fixed, what stays whole."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

from images.archive import write_layer

EPOCH = 1_000


def root(path: Path, *, backwards: bool, mtime: int) -> Path:
    """A root whose order and times are those of one build."""
    made: list[tuple[str, bytes, int, bytes, str]] = [
        ("./usr/bin/su", tarfile.REGTYPE, 0o4755, b"su", ""),
        ("./usr/bin/also-su", tarfile.LNKTYPE, 0o4755, b"", "./usr/bin/su"),
        ("./etc/machine-id", tarfile.REGTYPE, 0o444, b"name", ""),
        ("./var/cache/x", tarfile.REGTYPE, 0o644, b"cache", ""),
        ("./var/cache", tarfile.DIRTYPE, 0o2755, b"", ""),
        ("./dev/null", tarfile.CHRTYPE, 0o666, b"", ""),
        ("./bin", tarfile.SYMTYPE, 0o777, b"", "usr/bin"),
        ("./usr/share/doc/a/copyright", tarfile.REGTYPE, 0o644, b"licence", ""),
        ("./usr/share/doc/a/changes", tarfile.REGTYPE, 0o644, b"news", ""),
    ]
    # A hard link comes after what it names, in whatever order the rest is.
    ordered = [*made[2:][:: -1 if backwards else 1], *made[:2]]
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as archive:
        for name, kind, mode, content, link in ordered:
            member = tarfile.TarInfo(name)
            member.type, member.mode, member.mtime, member.linkname = kind, mode, mtime, link
            member.size, member.uname = len(content), f"user{mtime}"
            if name.endswith("su"):
                member.pax_headers = {"SCHILY.xattr.security.capability": "x"}
            archive.addfile(member, io.BytesIO(content))
    return path


def test_order_times_and_names_of_owners_change_nothing(tmp_path: Path) -> None:
    one = root(tmp_path / "one.tar", backwards=False, mtime=5)
    other = root(tmp_path / "other.tar", backwards=True, mtime=9)
    assert one.read_bytes() != other.read_bytes()
    first = write_layer(one, tmp_path / "a", EPOCH)
    assert first == write_layer(other, tmp_path / "b", EPOCH)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_what_a_sandbox_must_not_have_is_left_out_and_links_stay_whole(tmp_path: Path) -> None:
    write_layer(root(tmp_path / "root.tar", backwards=True, mtime=5), tmp_path / "layer", EPOCH)
    with tarfile.open(tmp_path / "layer") as archive:
        members = {item.name: item for item in archive}
        content = archive.extractfile("usr/bin/su")
        assert content is not None
        assert content.read() == b"su"
    assert list(members) == [
        "bin",
        "usr/bin/also-su",
        "usr/bin/su",
        "usr/share/doc/a/copyright",
        "var/cache",
        "workspace",
    ]
    assert members["usr/bin/also-su"].isreg()  # the first of two names has the bytes
    assert members["usr/bin/su"].linkname == "usr/bin/also-su"
    assert {item.mode & 0o6000 for item in members.values()} == {0}
    assert {item.mtime for item in members.values()} == {EPOCH}
    assert not any(item.pax_headers for item in members.values())
