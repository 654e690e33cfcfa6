"""Transfer-pruning runs: from a network and labelled data to a row of task files at falling densities."""
