"""Reports of finished and running runs: tables, plots, one HTML page, and the live page of `longtail watch`."""
