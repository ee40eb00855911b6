"""Running a model that is given as data: weights, positions, the cache's tensors, the eager runner."""
