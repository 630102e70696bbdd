"""Runs inside an image as the last step of its making: what Python compiled is made anew.

Called by `images.build` and by the Dockerfiles, with the image's own Python. A sandbox's root is
read-only, so Python could keep nothing that it compiles there. Every module is therefore compiled
here, in one order, as a file that Python takes without comparing it with its source: times of files
then mean nothing.
"""

import compileall
import os
import py_compile
import shutil
import site
import sys
import sysconfig

SKIPPED = ("/test/", "/tests/", "/idlelib/", "/lib2to3/tests/")


def folders() -> list[str]:
    """Where modules lie: the standard library first, then what was installed."""
    found = [sysconfig.get_path("stdlib"), *site.getsitepackages(), *sysconfig_paths()]
    return sorted({os.path.realpath(path) for path in found if os.path.isdir(path)})


def sysconfig_paths() -> list[str]:
    """The folders of installed modules in the ways that this Python knows."""
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    return [
        sysconfig.get_path("purelib"),
        sysconfig.get_path("platlib"),
        "/usr/lib/python3/dist-packages",
        f"/usr/local/lib/{version}/dist-packages",
    ]


def outermost(paths: list[str]) -> list[str]:
    """The folders that lie in none of the others."""
    return [
        path
        for path in paths
        if not any(path.startswith(other + "/") for other in paths if other != path)
    ]


def main() -> int:
    """Compiles all modules; returns the exit code."""
    if os.environ.get("PYTHONHASHSEED") != "0":
        # The order of constants in sets goes into what is compiled. -I would ignore the variable.
        environment = {**os.environ, "PYTHONHASHSEED": "0"}
        os.execve(sys.executable, [sys.executable, "-s", "-S", __file__], environment)  # noqa: S606
    compiled = 0
    for top in outermost(folders()):
        for folder, names, _ in os.walk(top):
            if "__pycache__" in names:
                shutil.rmtree(os.path.join(folder, "__pycache__"))
                names.remove("__pycache__")
        for folder, names, files in os.walk(top):
            names.sort()
            if any(part in folder + "/" for part in SKIPPED):
                continue
            for name in sorted(files):
                if name.endswith(".py"):
                    compiled += compileall.compile_file(
                        os.path.join(folder, name),
                        quiet=2,
                        invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH,
                    )
    return 0 if compiled else 1


if __name__ == "__main__":
    sys.exit(main())
