"""Who owns this host's sandboxes: the highest epoch seen, and the host's own generation.

Asked by the servicer and the attached streams before anything is changed.
"""

from __future__ import annotations

from sandbox.host.errors import owner_fenced


class Fence:
    """Lets nobody act who was succeeded, or who means an earlier life of this host."""

    def __init__(self, generation: int) -> None:
        """Starts with an epoch that everybody has reached."""
        self.generation = generation
        self.epoch = 0

    def check(self, owner_epoch: int, host_generation: int) -> None:
        """Takes note of a higher epoch.

        Raises:
            HostError: OWNER_FENCED, the epoch is lower than one that was seen, or the generation
                is not this one.
        """
        if host_generation != self.generation:
            raise owner_fenced(
                f"generation {host_generation} of this host is over; this is {self.generation}"
            )
        if owner_epoch < self.epoch:
            raise owner_fenced(f"epoch {owner_epoch} was succeeded by {self.epoch}")
        self.epoch = owner_epoch
