"""Use of trained networks: loading, prediction and export. Only the run folder is needed, not the data."""
