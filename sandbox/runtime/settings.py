"""What a supervisor is told on its command line.

Called by `start`. Without `argparse`, whose import would cost more than all the rest.
"""

from __future__ import annotations


class Settings:
    """The options of one supervisor."""

    __slots__ = ("grace_seconds", "open_files", "preload", "repl_uid", "use_filter", "workspace")

    def __init__(self) -> None:
        """Starts from the defaults.

        Attributes:
            workspace: the folder in which code runs and from which files are captured.
            repl_uid: the uid of everything that runs user code; -1 means the supervisor's own.
            open_files: the limit of open files of a process; 0 means the one that holds already.
            grace_seconds: how long each step of an interrupt waits for the next.
            preload: modules to import while there is nothing to do.
            use_filter: whether the REPL installs its system call filter.
        """
        self.workspace = "/workspace"
        self.repl_uid = -1
        self.open_files = 0
        self.grace_seconds = 0.3
        self.preload: list[str] = []
        self.use_filter = True


def parse(arguments: list[str]) -> Settings:
    """Reads `--name value` pairs.

    Raises:
        ValueError: an option is unknown or its value is no number.
    """
    settings = Settings()
    if len(arguments) % 2:
        raise ValueError("options come as pairs of a name and a value")
    for name, value in zip(arguments[::2], arguments[1::2]):
        if name == "--workspace":
            settings.workspace = value
        elif name == "--repl-uid":
            settings.repl_uid = int(value)
        elif name == "--open-files":
            settings.open_files = int(value)
        elif name == "--grace-milliseconds":
            settings.grace_seconds = int(value) / 1000
        elif name == "--preload":
            settings.preload = value.split(",")
        elif name == "--filter":
            settings.use_filter = value != "off"
        else:
            raise ValueError(f"unknown option {name}")
    return settings
