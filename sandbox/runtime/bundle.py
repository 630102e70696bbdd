"""Finds the runtime's modules in one copy of all their compiled code.

Run first of all by what `sandbox.packing` gives the interpreter. The interpreter's own importers
look for files and read archives entry by entry; for two dozen small modules that costs more than
running them.
"""

from __future__ import annotations

import sys
from marshal import loads  # noqa: TID251 - code that the host packed, never a value

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


class Bundle:
    """A finder and loader over compiled modules by their names."""

    def __init__(self, package: str, places: dict[str, tuple[int, int]], code: memoryview) -> None:
        """Takes where each module's code begins and ends; it is unpacked when it is imported."""
        self._package = package
        self._places = places
        self._code = code
        self._spec = sys.modules["_frozen_importlib"].ModuleSpec

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Answers for the modules it has."""
        if name in self._places:
            return self._spec(name, self, origin="<hutch>", is_package=name == self._package)
        return None

    def create_module(self, spec: Any) -> None:
        """Leaves it to the import system."""

    def exec_module(self, module: Any) -> None:
        """Runs the module's code."""
        begin, end = self._places[module.__name__]
        exec(loads(self._code[begin:end]), module.__dict__)  # noqa: S302 - as above


def install(package: str, places: dict[str, tuple[int, int]], code: memoryview) -> None:
    """Puts the modules before everything else that can be imported."""
    sys.meta_path.insert(0, Bundle(package, places, code))
