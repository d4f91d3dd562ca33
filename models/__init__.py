"""GPUs as data files, and what follows from a GPU and a kernel's resources: occupancy."""
