"""The process that parses tenants' JSON: it checks values and schemas, and may be killed any time.

Started by `controller.contracts` as `python -I -m controller.contract_worker`. It has no network,
no secrets and nothing to lose: two pipes, a limit of memory and one of CPU time.
"""
