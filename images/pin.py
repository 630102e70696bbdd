"""Writes the digests of the official base images into `images/bases.json`: `make images-pin`.

Asks the registry through the container engine's own client, so it needs both.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys

from images.build import HERE

BASES = HERE / "bases.json"
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


def main() -> int:
    """Pins every base; returns the exit code."""
    if shutil.which("docker") is None:
        sys.stderr.write("a container engine is needed: sudo apt-get install -y docker.io\n")
        return 1
    bases = json.loads(BASES.read_text("utf-8"))
    for name, entry in bases.items():
        command = ["docker", "pull", "--quiet", entry["image"]]
        pulled = subprocess.run(command, capture_output=True, text=True, check=False)
        command = ["docker", "image", "inspect", "--format", "{{index .RepoDigests 0}}"]
        shown = subprocess.run(
            [*command, entry["image"]], capture_output=True, text=True, check=False
        )
        digest = _DIGEST.search(shown.stdout)
        if pulled.returncode or digest is None:
            problem = (pulled.stderr or shown.stderr).strip()[-500:]
            sys.stderr.write(f"{name}: {entry['image']} cannot be pinned: {problem}\n")
            return 1
        entry["digest"] = digest.group()
        sys.stdout.write(f"{name}  {entry['image']}  {entry['digest']}\n")
    BASES.write_text(json.dumps(bases, indent=4) + "\n", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
