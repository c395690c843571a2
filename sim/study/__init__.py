"""Studies: grids of runs that are paired by their seeds, and what they show."""
