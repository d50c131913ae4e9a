"""Batches: drawn, assembled, prefetched, and brought to the device."""
