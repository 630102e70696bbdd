"""The control plane: schedules invocations into sandboxes and enforces what they may do.

Started as a process (`python -I -m controller`); imports only `hutch.v1` from the project.
"""
