"""simgpu: run a kernel's Python twin on an emulated CTA and count what Nsight Compute would count."""
