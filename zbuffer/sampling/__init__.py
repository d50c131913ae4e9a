"""Which rows: samplers and windows, in plain NumPy, without I/O, threads or clock."""
