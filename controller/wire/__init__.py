"""The controller's gRPC services: one thin servicer each over the loop and the store.

Called by clients; made by `controller.app`.
"""
