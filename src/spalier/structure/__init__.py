"""Find what can be pruned in a network: labels on its graph, streams of channels, and what is frozen, and why."""
