"""Imports that the code of cells meets, made when they are needed and not before.

Called by `repl`. The interpreter starts without `site` and without `linecache`: together they would
cost more than everything else. The first import that fails brings the installed packages in; the
first import of `linecache` makes it know the cells.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


class SiteFinder:
    """Stands last among the finders and adds the installed packages to the path, once."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Runs `site` and asks the other finders again."""
        if path is not None or self not in sys.meta_path:
            return None
        self.load()
        return _ask_others(name, path, target)

    def load(self) -> None:
        """Runs `site`, at the first call."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)
            import site

            site.main()


class SourcesFinder:
    """Stands first among the finders and completes `linecache` when it is imported."""

    def __init__(self, sources: dict[str, str]) -> None:
        """Takes the sources of cells by file name."""
        self._sources = sources

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Looks for one module only."""
        if name != "linecache" or self not in sys.meta_path:
            return None
        sys.meta_path.remove(self)
        spec = _ask_others(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Completing(spec.loader, self._sources)
        return spec


class _Completing:
    """A loader that tells `linecache` of the cells once it is loaded."""

    def __init__(self, loader: Any, sources: dict[str, str]) -> None:
        self._loader = loader
        self._sources = sources

    def create_module(self, spec: Any) -> Any:
        return self._loader.create_module(spec)

    def exec_module(self, module: Any) -> None:
        self._loader.exec_module(module)
        for filename, source in self._sources.items():
            lines = source.splitlines(keepends=True)
            module.cache[filename] = (len(source), None, lines, filename)


def _ask_others(name: str, path: Any, target: Any) -> Any:
    for finder in list(sys.meta_path):
        spec = finder.find_spec(name, path, target)
        if spec is not None:
            return spec
    return None
