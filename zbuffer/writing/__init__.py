"""Rows to chunks: the tail, the writer, and the thread that seals."""
