"""Copies of a state in the memory of hosts, which outlive processes and the failure of as many hosts as possible.

`placement` and `redundancy` say which host keeps which parts, `peer_copy` makes the `copies` after a step, and
`collect` puts a state together again from what the survivors have.
"""

__all__: list[str] = []
