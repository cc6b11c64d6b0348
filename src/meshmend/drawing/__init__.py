"""Drawing: schedules and routes as pictures and pages. Pictures need the extra `draw` (matplotlib)."""

from meshmend.drawing.draw import WHAT, Drawing, draw, draw_routes, figure

__all__ = ["WHAT", "Drawing", "draw", "draw_routes", "figure"]
