"""What others need for the same, measured in the same run: a cell of ipykernel, a child of JAZ.

Called by `bench.run`. Each runs in an environment of its own below `build/`, made at the first
need; what cannot be installed here is said and left out.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from bench.stats import Figure, figure

_IPYKERNEL = """
import json, time
from jupyter_client.manager import start_new_kernel
manager, client = start_new_kernel()
seconds = []
try:
    with open(f"/proc/{manager.provisioner.process.pid}/smaps_rollup") as file:
        pss = next(int(line.split()[1]) for line in file if line.startswith("Pss:"))
    for number in range(220):
        begin = time.perf_counter()
        client.execute_interactive("1+1", timeout=10, output_hook=lambda message: None)
        if number >= 20:
            seconds.append(time.perf_counter() - begin)
finally:
    client.stop_channels()
    manager.shutdown_kernel(now=True)
print(json.dumps({"seconds": seconds, "pss_bytes": pss * 1024}))
"""

_JAZ = """
import json, time
import jaz
from jaz.llm import MockLLM

PARENT = '''
seconds = []
for number in range(60):
    begin = clock()
    invoke(task="child")
    seconds.append(clock() - begin)
return seconds
'''
replies = [PARENT]
with jaz.ConfigOverride(llm=MockLLM(lambda messages: replies.pop() if replies else "return 1")):
    seconds = jaz.invoke(task="parent", clock=time.perf_counter)
print(json.dumps({"seconds": seconds[10:]}))
"""


def ipykernel(build: Path) -> tuple[Figure, int] | None:
    """A cell `1+1` through `jupyter_client`, and the PSS of an idle kernel in bytes."""
    python = _environment(build / "ipykernel", sys.executable, ["ipykernel", "jupyter_client"])
    found = _run(python, _IPYKERNEL) if python is not None else None
    if found is None:
        return None
    return figure("ipykernel_cell", found["seconds"]), int(found["pss_bytes"])


def jaz(build: Path) -> Figure | None:
    """A child of JAZ in its own process, with a model that answers at once; None without."""
    for newer in (os.environ.get("BENCH_PYTHON", ""), "python3.13", "python3.12"):
        program = shutil.which(newer) if newer else None
        if program and not subprocess.run([program, "-V"], capture_output=True).returncode:
            break
    else:
        print("jaz-lang needs Python 3.12 or newer (BENCH_PYTHON names one): left out")
        return None
    python = _environment(build / "jaz", program, ["jaz-lang"])
    found = _run(python, _JAZ) if python is not None else None
    return figure("jaz_child", found["seconds"]) if found is not None else None


def _environment(room: Path, interpreter: str, packages: list[str]) -> Path | None:
    python = room / "bin" / "python"
    if (room / "installed").exists():
        return python
    made = subprocess.run([interpreter, "-m", "venv", str(room)], check=False, capture_output=True)
    if made.returncode == 0:
        command = [str(python), "-m", "pip", "install", "--quiet", *packages]
        made = subprocess.run(command, check=False, capture_output=True)
    if made.returncode:
        shutil.rmtree(room, ignore_errors=True)
        print(f"{packages[0]} cannot be installed here: left out")
        return None
    (room / "installed").touch()
    return python


def _run(python: Path, program: str) -> dict[str, Any] | None:
    done = subprocess.run([str(python), "-c", program], capture_output=True, check=False)
    if done.returncode:
        print(f"{python.parent.parent.name} failed and is left out:", done.stderr.decode()[-500:])
        return None
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found
