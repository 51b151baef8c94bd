"""From a trained network to its use: load it, predict with it, export it. Needs the run folder alone, not the data."""
