"""The sandbox host: the daemon that owns the sandboxes of one machine.

Started as `python -I -m sandbox.host`; called by controllers over `HostService`; calls the drivers
in `sandbox.drivers`. Whatever comes out of a sandbox is checked here, frame by frame.
"""
