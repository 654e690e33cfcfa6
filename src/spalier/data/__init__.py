"""Data sets by name: checked, decoded once, augmented in whole batches."""
