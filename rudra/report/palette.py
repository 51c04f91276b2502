"""Colours of a figure's parts other than its lines. The page has different values for its dark mode."""

INK = "#1f2328"
MUTED = "#656d76"
GRID = "#d8dee4"
