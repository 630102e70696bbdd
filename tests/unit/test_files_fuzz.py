"""Names of artifacts that hostile code chose: one stays below its folder or is refused."""

from __future__ import annotations

import mimetypes
import os.path

from hypothesis import assume, example, given
from hypothesis import strategies as st

from controller.files import NAME_BYTES, media_type_of, name_problem

_NAMES = st.text(max_size=40) | st.lists(
    st.sampled_from(
        ("..", ".", "", "a", "data:", "text/html", ",", ";", "\r\n", "\\", "\0", "é", "x" * 200)
    )
).flatmap(lambda parts: st.sampled_from(("/".join(parts), "".join(parts))))


@given(_NAMES)
@example("../up")
@example("a/..")
@example("/etc/passwd")
@example("a\r\nb")
@example("\ud800")
@example("é" * 257)
def test_case_s10_whatever_name_is_accepted_stays_below_its_folder(name: str) -> None:
    assume(not name_problem(name))
    assert len(name.encode()) <= NAME_BYTES
    assert os.path.normpath(f"/top/{name}") == f"/top/{name}"
    assert not set(name) & set("\r\n\0\\")


@given(_NAMES, st.text(max_size=140))
@example("data:text/x é,1", "")
@example("data:" + "x" * 200 + "/html,1", "")
@example("a.txt", "text/html\r\nx: y")
def test_case_s10_no_name_chooses_a_media_type_that_is_in_no_table(name: str, given: str) -> None:
    found = media_type_of(name, given)
    known = {*mimetypes.types_map.values(), "application/octet-stream"}
    assert found in known or (found == given and given.isascii() and given.isprintable())
