"""`python -m hutch.cli`: the command line without the installed script.

Started by the SDK and the CLI themselves, always with `-I`; it runs nothing out of the working
directory.
"""

from __future__ import annotations

import os
import sys

if not sys.flags.safe_path and sys.path and sys.path[0] in ("", os.getcwd()):
    del sys.path[0]  # `python -m` puts the working directory first, which may be anybody's

from hutch.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
