"""Imports that the code of cells meets, made when they are needed and not before.

Called by `repl`. The interpreter starts without `site` and without `linecache`: together they would
cost more than everything else. The first import that fails brings the installed packages in; the
first import of `linecache` makes it know the cells; others are completed likewise.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
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


class Completer:
    """Stands first among the finders and completes some modules once they are imported."""

    def __init__(self, completions: dict[str, Callable[[Any], None]]) -> None:
        """Takes what is done to which module; each is done once, now to those that are there."""
        self._completions = completions
        for name in sys.modules.keys() & completions.keys():
            completions.pop(name)(sys.modules[name])

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Looks for these modules only."""
        if name not in self._completions:
            return None
        complete = self._completions.pop(name)
        spec = _ask_others(name, path, target)
        if spec is None:
            self._completions[name] = complete
        elif spec.loader is not None:
            spec.loader = _Completing(spec.loader, complete)
        return spec


class _Completing:
    """A loader that completes what another one loaded."""

    def __init__(self, loader: Any, complete: Callable[[Any], None]) -> None:
        self._loader = loader
        self._complete = complete

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: Any) -> Any:
        return self._loader.create_module(spec)

    def exec_module(self, module: Any) -> None:
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._complete(module)


def _ask_others(name: str, path: Any, target: Any) -> Any:
    for finder in list(sys.meta_path):
        spec = finder.find_spec(name, path, target)
        if spec is not None:
            return spec
    return None
