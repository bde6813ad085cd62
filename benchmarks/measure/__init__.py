"""What every benchmark measures with: timed runs, the memory's floor, shapes, traces."""
