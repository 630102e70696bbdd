"""Which versions of a container runtime have known escapes.

Called by the docker driver; pure. A version cannot show what a distribution has mended in its own
copy, so such a runtime can be allowed by its name.
"""

from __future__ import annotations

import re

# (the first version with the fix in each series, what was mended)
_RUNC = (
    (((1, 1, 12),), "CVE-2024-21626"),
    (((1, 2, 8), (1, 3, 3), (1, 4, 0)), "CVE-2025-31133, CVE-2025-52565, CVE-2025-52881"),
)
_MENDED_CANDIDATE = 3  # the release candidate of 1.4.0 that has them


def known_escapes(runtime: str, version: str) -> str:
    """Names the published escapes that a runtime of this version has; empty when none is known.

    Args:
        runtime: `runc`; of others none is known here.
        version: As the engine says it, for example `1.1.5+ds1`.
    """
    if runtime != "runc":
        return ""
    words = re.match(r"(\d+)\.(\d+)\.(\d+)(?:[-~]rc\.?(\d+))?", version)
    if words is None:
        return f"it does not say which version it is ({version[:50]!r})"
    number = (int(words[1]), int(words[2]), int(words[3]))
    candidate = int(words[4]) if words[4] else None
    found = [names for fixed, names in _RUNC if not _is_fixed(number, candidate, fixed)]
    return ", ".join(found)


def _is_fixed(
    number: tuple[int, int, int], candidate: int | None, fixed: tuple[tuple[int, int, int], ...]
) -> bool:
    for first in fixed:
        if first[:2] == number[:2]:
            if number == first and candidate is not None:
                return candidate >= _MENDED_CANDIDATE
            return number >= first
    return number > max(fixed)
