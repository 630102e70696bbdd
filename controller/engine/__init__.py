"""The pure engine: no I/O, no clock, no randomness, no asyncio.

`decide` answers an event with records, `apply` folds records into the state, `commands` says what
to do. `controller.loop` is the only caller in production; a simulator may be another.
"""
