"""Campaigns: all-reduces over real links, and jobs whose hosts are killed."""

__all__: list[str] = []
