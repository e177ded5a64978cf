"""Fast operations on x86-64 and ARM CPUs."""
