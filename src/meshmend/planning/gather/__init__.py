"""Gather: reduce-scatters and all-gathers planned as such, near what the cables can carry.

`spreading` decides who brings which chunk to whom.
"""
