"""Reports: one page, and figures for papers, of a run, a sweep, a store or a folder of runs."""
