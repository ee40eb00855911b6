"""Linear layers over weights of whole numbers, in Triton: their layout on a GPU, the kernels, and launching them."""
