"""Colours that a figure has beside those of its lines; the page gives all of them another value where it is dark."""

INK = "#1f2328"
MUTED = "#656d76"
GRID = "#d8dee4"
