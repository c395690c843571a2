"""Studies: grids of paired runs, with what is compared and by what margin fixed before the first run."""
