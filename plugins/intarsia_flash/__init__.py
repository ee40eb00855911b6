"""Flash attention over the paged cache, in Triton on GPUs and in tiles of torch ops elsewhere."""
