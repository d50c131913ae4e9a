"""Chunks to rows: mapped chunks, the gather, and small fields kept decoded."""
