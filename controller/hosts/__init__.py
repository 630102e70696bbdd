"""The client of `HostService`: carries out the engine's commands on sandbox hosts.

Called by `controller.app`; posts what happens as events into `controller.loop`.
"""
